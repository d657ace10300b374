//! One generation's events as the numbered messages of its gRPC stream.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use shimmer_proto::status as statuses;
use shimmer_proto::v1::{self, GenerateResponse, generate_response};
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::Status;

use super::{ClusterStatus, convert, status};
use crate::engine::{Event, EventStream, Finished};
use crate::journal::{Ending, Entry};

/// Where a stream's events come from.
#[derive(Debug)]
pub(super) struct Source {
    /// Events that are known without the engine, in front of its own.
    pub(super) replayed: VecDeque<Event>,
    /// The engine's; none when all events are known.
    pub(super) live: Option<EventStream>,
    /// Where the engine's events are written down.
    pub(super) journal: Option<Entry>,
    /// The journal has the request, whether or not more of it is written down.
    pub(super) resumable: bool,
    /// Events up to this number are with the client.
    pub(super) after: Option<u64>,
}

/// What all messages of a stream have in common.
#[derive(Debug)]
pub(super) struct About {
    pub(super) request_id: String,
    pub(super) fingerprint: v1::Fingerprint,
    pub(super) cluster: watch::Receiver<ClusterStatus>,
    /// Lets the server wait for its streams.
    pub(super) _running: TaskTrackerToken,
}

/// Started, any number of Deltas, and Finished or a status; or the rest of them. Dropping it ends the generation within
/// one step; what the journal has of it stays.
#[derive(Debug)]
pub struct GenerateStream {
    source: Source,
    about: About,
    /// Number of the next event.
    sequence: u64,
    ended: bool,
}

impl GenerateStream {
    pub(super) fn new(source: Source, about: About) -> Self {
        Self { source, about, sequence: 0, ended: false }
    }

    /// The request's name.
    pub fn request_id(&self) -> &str {
        &self.about.request_id
    }

    /// The message of the next event; none when the client has it.
    fn message(&mut self, event: Event) -> Option<Result<GenerateResponse, Status>> {
        let event = match event {
            Event::Started { prompt_tokens, max_tokens, seed } => {
                generate_response::Event::Started(v1::Started {
                    request_id: self.about.request_id.clone(),
                    fingerprint: Some(self.about.fingerprint.clone()),
                    prompt_tokens,
                    seed,
                    max_tokens,
                    resumable: self.source.resumable,
                })
            }
            Event::Delta { text, token_ids, logprobs } => {
                generate_response::Event::Delta(v1::Delta {
                    text,
                    token_ids,
                    logprobs: logprobs.into_iter().map(convert::logprobs).collect(),
                })
            }
            Event::Finished(finished) => {
                self.ended = true;
                if let Some(after) = self.source.after.filter(|&after| after > self.sequence) {
                    let last = self.sequence;
                    let description = format!("is {after}; the last event has number {last}");
                    return Some(Err(statuses::invalid_argument("after_sequence", description)));
                }
                generate_response::Event::Finished(convert::finished(
                    finished,
                    &self.about.cluster.borrow(),
                ))
            }
            Event::Failed(error) => {
                self.ended = true;
                let request_id = &self.about.request_id;
                status::log_failure(request_id, &error);
                let resumable = self.source.resumable.then_some(request_id.as_str());
                return Some(Err(status::generation(&error, resumable)));
            }
        };
        let sequence = self.sequence;
        self.sequence += 1;
        let known = self.source.after.is_some_and(|after| sequence <= after);
        (!known).then_some(Ok(GenerateResponse { sequence, event: Some(event) }))
    }

    /// Writes down what the engine said.
    fn note(&mut self, event: &Event) {
        let Some(journal) = &mut self.source.journal else { return };
        match event {
            Event::Started { .. } => {}
            Event::Delta { token_ids, .. } => journal.tokens(token_ids),
            Event::Finished(finished) => {
                journal.finish(ending(finished));
                self.source.journal = None;
            }
            // It can be resumed; there is nothing to add to what is written.
            Event::Failed(_) => self.source.journal = None,
        }
    }

    /// The next event, whether or not the client has it.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        loop {
            if let Some(event) = self.source.replayed.pop_front() {
                return Poll::Ready(Some(event));
            }
            let Some(live) = &mut self.source.live else { return Poll::Ready(None) };
            let event = ready!(pin!(live.recv()).poll(context));
            if let Some(event) = &event {
                self.note(event);
            }
            // A generation that goes on starts once more; its client has heard so from the replay.
            if self.sequence > 0 && matches!(event, Some(Event::Started { .. })) {
                continue;
            }
            return Poll::Ready(event);
        }
    }
}

fn ending(finished: &Finished) -> Ending {
    Ending {
        reason: finished.reason,
        matched_stop: finished.matched_stop.clone(),
        completion_tokens: finished.usage.completion_tokens,
        logits_sha256: finished.logits_sha256.clone(),
    }
}

impl Stream for GenerateStream {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while !self.ended {
            let Some(event) = ready!(self.poll_event(context)) else {
                self.ended = true;
                return Poll::Ready(Some(Err(status::engine_gone())));
            };
            if let Some(message) = self.message(event) {
                return Poll::Ready(Some(message));
            }
        }
        Poll::Ready(None)
    }
}
