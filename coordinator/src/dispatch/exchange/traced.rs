//! HOT PATH. Times of the rounds of a step that is traced. Of any other step it costs a branch for each message.

use std::time::Instant;

use shimmer_proto::{
    expert::v1::{ExpertResult, ExpertWork},
    trace::TraceContext,
};

/// Messages of a step that are remembered: 64 layers with 32 messages each.
const WORKS: usize = 2048;
/// Rounds of a step that are remembered.
const ROUNDS: usize = 256;

/// One layer's round.
#[derive(Debug, Clone, Copy)]
pub struct TracedRound {
    /// The layer.
    pub layer: u32,
    /// Id of its span.
    pub span: u64,
    /// Before anything is planned.
    pub begun: Instant,
    /// When there was nothing left but to wait.
    pub sent: Instant,
    /// When the last answer was combined.
    pub ended: Instant,
}

/// One message to a worker.
#[derive(Debug, Clone, Copy)]
pub struct TracedWork {
    /// The worker, by the transport's order.
    pub worker: usize,
    /// The layer.
    pub layer: u32,
    /// Part and attempt of its fence.
    pub part: u32,
    /// The attempt.
    pub attempt: u32,
    /// Id of its span, which the message carries.
    pub span: u64,
    /// Id of the round's span.
    pub above: u64,
    /// Experts in it.
    pub experts: usize,
    /// When it went out.
    pub sent: Instant,
    /// None if it was lost, late or refused.
    pub answer: Option<TracedAnswer>,
}

/// What came back.
#[derive(Debug, Clone, Copy)]
pub struct TracedAnswer {
    /// When.
    pub at: Instant,
    /// By the worker's clock.
    pub compute_us: u32,
    /// By the worker's clock.
    pub queue_us: u32,
    /// Experts that were in memory.
    pub ram_hits: u32,
}

/// The rounds of the step under way, if it is traced; buffers are made by the first such step and kept.
#[derive(Debug, Default)]
pub struct StepTrace {
    above: Option<TraceContext>,
    /// Ids of the spans grow from a random one.
    next: u64,
    rounds: Vec<TracedRound>,
    works: Vec<TracedWork>,
}

impl StepTrace {
    /// Remembers the rounds from now on, for the span `above`; ids grow from `first`.
    pub fn begin(&mut self, above: TraceContext, first: u64) {
        (self.above, self.next) = (Some(above), first);
        self.rounds.clear();
        self.works.clear();
        self.rounds.reserve_exact(ROUNDS);
        self.works.reserve_exact(WORKS);
    }

    /// Remembers nothing more.
    pub fn end(&mut self) {
        self.above = None;
    }

    /// The rounds of the last traced step.
    pub fn rounds(&self) -> &[TracedRound] {
        &self.rounds
    }

    /// Its messages.
    pub fn works(&self) -> &[TracedWork] {
        &self.works
    }

    /// The message that took longest.
    pub fn slowest(&self) -> Option<&TracedWork> {
        let took = |work: &&TracedWork| Some(work.answer?.at.saturating_duration_since(work.sent));
        self.works.iter().max_by_key(took)
    }

    pub(super) fn round(&mut self, layer: u32, now: Instant) {
        if self.above.is_some() && self.rounds.len() < ROUNDS {
            let span = self.id();
            self.rounds.push(TracedRound { layer, span, begun: now, sent: now, ended: now });
        }
    }

    pub(super) fn round_over(&mut self, sent: Instant, ended: Instant) {
        if self.above.is_some()
            && let Some(round) = self.rounds.last_mut()
        {
            (round.sent, round.ended) = (sent, ended);
        }
    }

    /// Puts the context of a span of its own into a message.
    pub(super) fn sent(&mut self, worker: usize, work: &mut ExpertWork, now: Instant) {
        let Some(above) = self.above else { return };
        let (Some(fence), Some(round)) = (work.fence, self.rounds.last()) else { return };
        if self.works.len() >= WORKS || round.layer != fence.layer {
            return;
        }
        let round = round.span;
        let span = self.id();
        work.trace = Some(TraceContext { span, ..above }.on_wire());
        self.works.push(TracedWork {
            worker,
            layer: fence.layer,
            part: fence.part,
            attempt: fence.attempt,
            span,
            above: round,
            experts: work.experts.len(),
            sent: now,
            answer: None,
        });
    }

    pub(super) fn answered(&mut self, worker: usize, result: &ExpertResult, now: Instant) {
        if self.above.is_none() {
            return;
        }
        let Some(fence) = result.fence else { return };
        let sent = self.works.iter_mut().rev().find(|work| {
            let place = (work.worker, work.layer, work.part, work.attempt);
            place == (worker, fence.layer, fence.part, fence.attempt)
        });
        if let Some(work) = sent {
            let ExpertResult { compute_us, queue_us, ram_hits, .. } = *result;
            work.answer = Some(TracedAnswer { at: now, compute_us, queue_us, ram_hits });
        }
    }

    fn id(&mut self) -> u64 {
        self.next = self.next.wrapping_add(1).max(1);
        self.next
    }
}
