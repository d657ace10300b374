//! A generation in the engine: its sequence, its client, its clock.

use std::time::{Duration, Instant, SystemTime};

use shimmer_proto::trace::names;

use super::events::{Event, EventSender, FinishReason, Finished, Timings, Usage, WorkerTimings};
use super::handle::Ticket;
use super::requests::{EndedRequest, RequestStats};
use crate::dispatch::{WorkerInfo, WorkerStats};
use crate::sequence::{Ended, Sequence};
use crate::trace::RequestTrace;

/// A queued or running generation.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) id: String,
    pub(super) sequence: Sequence,
    pub(super) events: EventSender,
    pub(super) first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Of a sampled request.
    pub(super) trace: Option<Box<RequestTrace>>,
    max_tokens: u32,
    ticket: Ticket,
    submitted: Instant,
    admitted: Option<Instant>,
    /// Counts of the workers at admission.
    workers: Vec<WorkerStats>,
}

impl Active {
    pub(super) fn new(
        id: String,
        sequence: Sequence,
        max_tokens: u32,
        events: EventSender,
        ticket: Ticket,
        submitted: Instant,
    ) -> Self {
        Self {
            id,
            sequence,
            events,
            first_token: None,
            last_token: None,
            trace: None,
            max_tokens,
            ticket,
            submitted,
            admitted: None,
            workers: Vec::new(),
        }
    }

    /// Takes its place in the batch.
    pub(super) fn start(&mut self, workers: &[WorkerStats], stats: &mut RequestStats) {
        self.ticket.admitted();
        let (now, waited) = (Instant::now(), self.submitted.elapsed());
        self.admitted = Some(now);
        stats.admitted(waited);
        if let Some(trace) = &mut self.trace {
            let now = SystemTime::now();
            trace.span(names::QUEUE, [now.checked_sub(waited).unwrap_or(now), now]);
        }
        self.workers = workers.to_vec();
        self.events.send(Event::Started {
            prompt_tokens: count(self.sequence.prompt_tokens()),
            max_tokens: self.max_tokens,
            seed: self.sequence.seed(),
        });
    }

    /// Notes that a token was sampled.
    #[inline(never)]
    pub(super) fn token(&mut self, stats: &mut RequestStats) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            Some(last) => stats.next_token(now.saturating_duration_since(last)),
            None => {
                self.first_token = Some(now);
                let prompt_tokens = count(self.sequence.prompt_tokens());
                stats.first_token(now.saturating_duration_since(self.submitted), prompt_tokens);
            }
        }
    }

    /// The request in numbers, as it ends now.
    pub(super) fn ended(&self, reason: FinishReason) -> EndedRequest {
        let now = Instant::now();
        let since = |from: Instant| now.saturating_duration_since(from);
        let answer_tokens = count(self.sequence.generated());
        let between = self.first_token.zip(self.last_token);
        let per_token = between.and_then(|(first, last)| {
            last.saturating_duration_since(first).checked_div(answer_tokens.saturating_sub(1))
        });
        EndedRequest {
            reason,
            prompt_tokens: count(self.sequence.prompt_tokens()),
            answer_tokens,
            whole: since(self.submitted),
            inference: self.admitted.map(since),
            decode: self.first_token.map(since),
            per_token,
        }
    }

    /// Frees the generation's id, so that the last event finds it free, and gives the way to send that event.
    pub(super) fn release(self) -> EventSender {
        let Self { events, ticket, .. } = self;
        drop(ticket);
        events
    }

    /// The final event's content.
    pub(super) fn finish(
        &mut self,
        ended: Ended,
        infos: &[WorkerInfo],
        workers: &[WorkerStats],
    ) -> Finished {
        if let Some(trace) = &mut self.trace {
            trace.say("shimmer.prompt_tokens", self.sequence.prompt_tokens());
            trace.say("shimmer.completion_tokens", self.sequence.generated());
            let reason = match ended.reason {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
                FinishReason::Cancelled => "cancelled",
            };
            trace.say("shimmer.finish_reason", reason);
            trace.ended(None);
        }
        let now = Instant::now();
        let admitted = self.admitted.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        // Workers that joined since have no earlier figures.
        let none = WorkerStats::default();
        let before = self.workers.iter().chain(std::iter::repeat(&none));
        let of_worker =
            |((info, stats), before): ((&WorkerInfo, &WorkerStats), &WorkerStats)| WorkerTimings {
                worker_id: info.id.clone(),
                results: stats.results.saturating_sub(before.results),
                expert_rows: stats.expert_rows.saturating_sub(before.expert_rows),
                compute_ms: milliseconds(stats.compute.saturating_sub(before.compute)),
                wait_ms: milliseconds(stats.wait.saturating_sub(before.wait)),
            };
        Finished {
            reason: ended.reason,
            matched_stop: ended.matched_stop,
            usage: Usage {
                prompt_tokens: count(self.sequence.prompt_tokens()),
                completion_tokens: count(self.sequence.generated()),
            },
            timings: Timings {
                queue_ms: milliseconds(admitted.saturating_duration_since(self.submitted)),
                prefill_ms: milliseconds(first.saturating_duration_since(admitted)),
                decode_ms: milliseconds(now.saturating_duration_since(first)),
                workers: infos.iter().zip(workers).zip(before).map(of_worker).collect(),
            },
            logits_sha256: self.sequence.logits_sha256(),
        }
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).expect("the context is counted in u32")
}
