//! HOT PATH. One layer's round with the workers: a state machine over parts, events and time, and the loop that drives it.
//!
//! [`Exchange::run`] is what the trunk calls. What happens when a worker is lost, late or wrong stands in `rescue` and
//! `audits`; none of it changes a byte, because any worker computes the same and the sums are exact.

mod audits;
mod rescue;
mod sums;
mod traced;

use std::time::{Duration, Instant};

use serde::Serialize;
use shimmer_kernels::{ActivationRows, Kernels};
use shimmer_proto::expert::v1::{ErrorCode, ExpertResult, Fence, WorkerError};

use super::plan::{Plan, State};
use super::recipients::{Recipient, Recipients};
use super::{ExpertTransport, FaultCounts, FaultPolicy, Hints, Reply, TransportError};
use crate::gating::{Choices, RowFault, RowFaults};
use crate::histogram::{Histogram, micros};
use audits::Audit;
pub use traced::{StepTrace, TracedAnswer, TracedRound, TracedWork};

/// Sends of one part to one worker before others are asked: the first, and again after a frame was damaged or a row was
/// taken out.
const ATTEMPTS_MAX: u32 = 4;

/// What one worker did for the step thread so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerStats {
    /// Result messages.
    pub results: u64,
    /// Pairs of row and expert.
    pub expert_rows: u64,
    /// By the worker's clock.
    #[serde(rename = "compute_us", serialize_with = "micros")]
    pub compute: Duration,
    /// Time in which the step thread had nothing else to do.
    #[serde(rename = "wait_us", serialize_with = "micros")]
    pub wait: Duration,
}

/// What one layer sends.
#[derive(Clone, Copy, Debug)]
pub struct LayerRound<'a> {
    /// Number of the step; grows for as long as the engine lives.
    pub step: u64,
    /// The layer.
    pub layer: u32,
    /// All rows of the step in the experts' format.
    pub activations: &'a ActivationRows,
    /// Experts and gates of every row.
    pub choices: &'a Choices,
    /// Experts that a later layer will probably need; they go out with the work.
    pub hints: Option<&'a Hints>,
    /// Longest wait for the results of this layer.
    pub deadline: Duration,
}

/// What every step of a round gets.
#[derive(Debug)]
pub struct Reach<'a> {
    /// The workers.
    pub transport: &'a mut dyn ExpertTransport,
    /// The layer.
    pub round: &'a LayerRound<'a>,
    /// The rows that fail.
    pub faults: &'a mut RowFaults,
    /// The time.
    pub now: Instant,
}

/// The round under way, and the buffers and counts of all rounds.
#[derive(Debug)]
pub struct Exchange {
    kernels: Kernels,
    policy: FaultPolicy,
    plan: Plan,
    recipients: Recipients,
    audits: Vec<Audit>,
    fence: Fence,
    deadline: Option<Instant>,
    /// `[rows][hidden]` in units of 2^-30.
    sums: Vec<i64>,
    /// Sums of single parts that are compared.
    compared: [Vec<i64>; 2],
    stats: Vec<WorkerStats>,
    waits: Histogram,
    counts: FaultCounts,
    trace: StepTrace,
    /// Messages that may be sent twice now.
    hedges_left: f64,
}

/// Most messages that may be sent twice in a row: a worker that stops is late once, and then avoided.
const HEDGES_MAX: f64 = 16.0;

impl Exchange {
    /// No round yet.
    pub fn new(kernels: Kernels, policy: FaultPolicy) -> Self {
        Self {
            kernels,
            policy,
            plan: Plan::default(),
            recipients: Recipients::default(),
            audits: Vec::new(),
            fence: Fence::default(),
            deadline: None,
            sums: Vec::new(),
            compared: Default::default(),
            stats: Vec::new(),
            waits: Histogram::default(),
            counts: FaultCounts::default(),
            trace: StepTrace::default(),
            hedges_left: HEDGES_MAX,
        }
    }

    /// What every worker did since the start.
    pub fn stats(&self) -> &[WorkerStats] {
        &self.stats
    }

    /// Forgets what was known of the worker at a place.
    pub fn forget(&mut self, worker: usize) {
        if let Some(stats) = self.stats.get_mut(worker) {
            *stats = WorkerStats::default();
        }
        self.recipients.forget(worker);
    }

    /// How long each round waited for workers.
    pub fn waits(&self) -> &Histogram {
        &self.waits
    }

    /// The rounds of a step that is traced.
    pub fn trace(&mut self) -> &mut StepTrace {
        &mut self.trace
    }

    /// What went wrong and was answered since the start.
    pub fn counts(&self) -> &FaultCounts {
        &self.counts
    }

    /// Sends every row to its experts, runs `meanwhile`, and writes each row's sum of gated expert outputs to `out`,
    /// `[rows][hidden]`. Rows whose experts nobody can compute fail; their part of `out` is meaningless.
    pub fn run(
        &mut self,
        transport: &mut dyn ExpertTransport,
        round: &LayerRound<'_>,
        faults: &mut RowFaults,
        meanwhile: impl FnOnce(),
        out: &mut [f32],
    ) {
        let mut reach = Reach { now: transport.now(), transport, round, faults };
        self.begin(&mut reach);
        meanwhile();
        let sent = reach.transport.now();
        reach.now = sent;
        while !self.is_done() {
            let due = self.due(&reach);
            let begun = reach.now;
            let arrival = reach.transport.receive(due);
            reach.now = reach.transport.now();
            match arrival {
                Ok(reply) => {
                    if let Some(stats) = self.stats.get_mut(reply.worker) {
                        stats.wait += reach.now.saturating_duration_since(begun);
                    }
                    self.reply(&mut reach, reply);
                }
                Err(TransportError::Lost { worker, detail }) => {
                    self.lost(&mut reach, worker, &detail);
                }
                // What has arrived counts before what is late.
                Err(TransportError::Timeout) => self.tick(&mut reach),
                Err(TransportError::Closed) => {
                    for worker in 0..self.stats.len() {
                        self.lost(&mut reach, worker, "the transport is closed");
                    }
                }
            }
        }
        self.waits.observe(reach.now.saturating_duration_since(sent));
        self.trace.round_over(sent, reach.now);
        self.finish(round.activations.cols(), out);
    }

    /// Begins a round: plans and sends everything.
    pub fn begin(&mut self, reach: &mut Reach<'_>) {
        let Reach { transport, round, faults, now } = reach;
        let (rows, hidden) = (round.activations.rows(), round.activations.cols());
        let workers = transport.workers().len();
        self.trace.round(round.layer, *now);
        self.stats.resize(workers, WorkerStats::default());
        let paced = self.policy.hedge_factor > 0.0;
        self.recipients.begin(&**transport, paced, *now);
        self.audits.clear();
        self.deadline = now.checked_add(round.deadline);
        let (plan, recipients) = (&mut self.plan, &mut self.recipients);
        let sizes = [row_bytes(round), rows];
        plan.build(&**transport, recipients, round.layer, round.choices, sizes, faults);
        let (epoch, generation) = transport.fence_base();
        self.fence =
            Fence { epoch, generation, step: round.step, layer: round.layer, attempt: 0, part: 0 };
        let fence = self.fence;
        if let Some(hints) = round.hints {
            // Workers that compute nothing in this layer have the most time to read ahead.
            let idle = |worker| self.plan.parts.iter().all(|p| p.to != Recipient::Worker(worker));
            (0..workers)
                .filter(|&worker| idle(worker))
                .for_each(|worker| hints.send(&mut **transport, worker, fence));
        }
        let planned = self.plan.parts.len();
        let earned = self.policy.hedge_share * planned as f64;
        self.hedges_left = (self.hedges_left + earned).min(HEDGES_MAX);
        for part in 0..planned {
            for entries in self.plan.entries(part).chunk_by(|a, b| a.expert == b.expert) {
                let rows = u32::try_from(entries.len()).unwrap_or(u32::MAX);
                transport.used(round.layer, entries[0].expert, rows);
            }
        }
        let mut hinted = None;
        for part in 0..planned {
            let to = self.plan.parts[part].to;
            if let (Some(hints), Recipient::Worker(worker)) = (reach.round.hints, to)
                && hinted.replace(worker) != Some(worker)
            {
                // Right before the work, so that one wake-up and one write carry both.
                hints.send(reach.transport, worker, fence);
            }
            if !self.policy.audits(reach.round.step, reach.round.layer, part)
                || !self.audit(reach, part)
            {
                self.send(reach, part);
                self.spare(reach, part);
            }
        }
        self.sums.clear();
        self.sums.resize(rows * hidden, 0);
        self.advance(reach);
    }

    /// The sums of the round, `[rows][hidden]` in units of 2^-30; of rows that have not failed once nothing is awaited.
    pub fn sums(&self) -> &[i64] {
        &self.sums
    }

    /// Nothing is awaited any more.
    pub fn is_done(&self) -> bool {
        self.plan.parts.iter().all(|part| part.combined || part.parent.is_some())
    }

    /// When [`Self::tick`] has something to do.
    pub fn due(&self, reach: &Reach<'_>) -> Instant {
        let late = self.plan.parts.iter().enumerate().filter(|(part, p)| {
            p.late_at.is_some() && p.is_out() && !self.plan.parts[self.root(*part)].combined
        });
        let late = late.filter_map(|(_, part)| part.late_at);
        let contests = self.audits.iter().filter_map(Audit::until);
        let latest = self.deadline.unwrap_or(reach.now + reach.round.deadline);
        late.chain(contests).fold(latest, Instant::min)
    }

    /// Time has passed: late parts go to others as well, and at the deadline everything ends.
    pub fn tick(&mut self, reach: &mut Reach<'_>) {
        if self.deadline.is_some_and(|deadline| deadline <= reach.now) {
            return self.time_out(reach);
        }
        for part in 0..self.plan.parts.len() {
            let late = self.plan.parts[part].late_at.is_some_and(|late| late <= reach.now);
            if late && self.plan.parts[part].is_out() && !self.plan.parts[self.root(part)].combined
            {
                self.late(reach, part);
            }
        }
        self.judge(reach);
        self.advance(reach);
    }

    /// A reply has arrived.
    pub fn reply(&mut self, reach: &mut Reach<'_>, reply: Reply) {
        let Reply { worker, outcome } = reply;
        match outcome {
            Ok(result) => self.accept(reach, worker, result),
            Err(error) => self.refused(reach, worker, &error),
        }
    }

    /// A worker has gone, with everything that was out on it.
    pub fn lost(&mut self, reach: &mut Reach<'_>, worker: usize, detail: &str) {
        if reach.transport.is_quarantined(worker) {
            self.disproved(worker);
        }
        for part in 0..self.plan.parts.len() {
            if self.plan.parts[part].to == Recipient::Worker(worker)
                && self.plan.parts[part].is_out()
            {
                self.gone(reach, part, detail);
            }
        }
        self.judge(reach);
        self.advance(reach);
    }

    /// The part that a reply answers, if it is one that is out.
    fn part_of(&mut self, worker: usize, fence: Option<Fence>) -> Option<usize> {
        let found = fence.and_then(|fence| {
            let index = usize::try_from(fence.part).ok()?;
            let part = self.plan.parts.get(index)?;
            let expected = Fence { attempt: part.attempt, part: fence.part, ..self.fence };
            let awaited = part.is_out() && !self.plan.parts[self.root(index)].combined;
            (fence == expected && part.to == Recipient::Worker(worker) && awaited).then_some(index)
        });
        if found.is_none() {
            self.counts.dropped += 1;
        }
        found
    }

    /// The planned part that a part belongs to.
    fn root(&self, part: usize) -> usize {
        let mut at = part;
        while let Some(parent) = self.plan.parts[at].parent {
            at = parent;
        }
        at
    }

    fn accept(&mut self, reach: &mut Reach<'_>, worker: usize, result: ExpertResult) {
        let Some(part) = self.part_of(worker, result.fence) else { return };
        if !self.fits(part, reach.round.activations.cols(), &result) {
            let detail = "it answered with a payload of the wrong size";
            reach.transport.give_up(worker, detail);
            return self.lost(reach, worker, detail);
        }
        self.trace.answered(worker, &result, reach.now);
        let stats = &mut self.stats[worker];
        stats.results += 1;
        stats.expert_rows += self.plan.entries(part).len() as u64;
        stats.compute += Duration::from_micros(u64::from(result.compute_us));
        let is_plain = self.plan.parts[part].parent.is_none() && !self.is_audited(part);
        if is_plain {
            let mut sums = std::mem::take(&mut self.sums);
            self.add(reach, part, &result, &mut sums);
            self.sums = sums;
            self.plan.parts[part].state = State::Answered(None);
            self.plan.parts[part].combined = true;
            return;
        }
        self.plan.parts[part].state = State::Answered(Some(Box::new(result)));
        self.judge(reach);
        self.advance(reach);
    }

    fn refused(&mut self, reach: &mut Reach<'_>, worker: usize, error: &WorkerError) {
        let Some(part) = self.part_of(worker, error.fence) else { return };
        let again = self.plan.parts[part].attempt + 1 < ATTEMPTS_MAX;
        if error.code() == ErrorCode::Overflow && self.doubt(reach, part, &error.detail) {
            return self.advance(reach);
        }
        let rows: &[u32] = match error.code() {
            ErrorCode::Overflow if !error.rows.is_empty() => &error.rows,
            ErrorCode::Checksum if again => &[],
            code => {
                if let (ErrorCode::Load, Some(expert)) = (code, error.expert) {
                    let until = Recipients::until(reach.now, self.policy.sick);
                    self.recipients.fell_sick(worker, reach.round.layer, expert, until);
                }
                self.gone(reach, part, &error.detail);
                self.judge(reach);
                return self.advance(reach);
            }
        };
        self.overflow(reach, part, rows, &error.detail);
        let before = self.plan.rows(part).len();
        self.plan.without(part, rows);
        let left = self.plan.rows(part).len();
        if left == 0 {
            self.plan.parts[part].state = State::Answered(None);
        } else if again || left < before {
            self.send(reach, part);
        } else {
            self.gone(reach, part, &error.detail);
        }
        self.judge(reach);
        self.advance(reach);
    }

    /// Fails the named rows of a part by their own arithmetic.
    fn overflow(&mut self, reach: &mut Reach<'_>, part: usize, gone: &[u32], detail: &str) {
        let layer = reach.round.layer;
        for (index, &row) in (0_u32..).zip(self.plan.rows(part)) {
            if gone.contains(&index) {
                let fault = RowFault::Arithmetic { layer, what: detail.to_owned() };
                reach.faults.fail(row as usize, fault);
            }
        }
    }
}

/// Bytes of one row in the larger direction: its values and its experts, or its sums.
fn row_bytes(round: &LayerRound<'_>) -> usize {
    let hidden = round.activations.cols();
    let values =
        ActivationRows::wire_bytes(round.activations.format(), 1, hidden).unwrap_or(usize::MAX);
    // An index of 5 bytes, a gate of 4, and at worst an item of its own of 10.
    let work = values.saturating_add(round.choices.top_k() * 20);
    work.max(hidden * size_of::<i64>())
}

#[cfg(test)]
mod tests;
