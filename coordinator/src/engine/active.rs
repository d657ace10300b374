//! A generation in the engine: its sequence, its client, its clock.

use std::time::{Duration, Instant};

use super::events::{Event, EventSender, Finished, Timings, Usage, WorkerTimings};
use super::handle::Ticket;
use crate::dispatch::{WorkerInfo, WorkerStats};
use crate::sequence::{Ended, Sequence};

/// A queued or running generation.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) id: String,
    pub(super) sequence: Sequence,
    pub(super) events: EventSender,
    pub(super) first_token: Option<Instant>,
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
            max_tokens,
            ticket,
            submitted,
            admitted: None,
            workers: Vec::new(),
        }
    }

    /// Takes its place in the batch.
    pub(super) fn start(&mut self, workers: &[WorkerStats]) {
        self.ticket.admitted();
        self.admitted = Some(Instant::now());
        self.workers = workers.to_vec();
        self.events.send(Event::Started {
            prompt_tokens: count(self.sequence.prompt_tokens()),
            max_tokens: self.max_tokens,
            seed: self.sequence.seed(),
        });
    }

    /// Frees the generation's id, so that the last event finds it free, and gives the way to send that event.
    pub(super) fn release(self) -> EventSender {
        let Self { events, ticket, .. } = self;
        drop(ticket);
        events
    }

    /// The final event's content.
    pub(super) fn finish(
        &self,
        ended: Ended,
        infos: &[WorkerInfo],
        workers: &[WorkerStats],
    ) -> Finished {
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
