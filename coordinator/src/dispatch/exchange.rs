//! HOT PATH. One layer's round with the workers.

use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::Serialize;
use shimmer_kernels::{ActivationRows, Kernels};
use shimmer_proto::expert::v1::expert_result::Payload;
use shimmer_proto::expert::v1::{ErrorCode, ExpertResult, Fence, WorkerError};

use super::plan::Plan;
use super::{ExpertTransport, Hints, Reply, TransportError};
use crate::gating::{Choices, RowFault, RowFaults};
use crate::histogram::{Histogram, micros};

/// Sends of one part before its rows fail: the first, and again after a frame was damaged or a row was taken out.
const ATTEMPTS_MAX: u32 = 4;

/// Values of one combine below which handing them to other threads costs more than it saves.
const PARALLEL_VALUES: usize = 1 << 16;

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

/// Buffers and counts of all rounds.
#[derive(Debug)]
pub struct Exchange {
    kernels: Kernels,
    plan: Plan,
    /// `[rows][hidden]` in units of 2^-30.
    sums: Vec<i64>,
    stats: Vec<WorkerStats>,
    waits: Histogram,
    dropped: u64,
}

impl Exchange {
    /// No round yet.
    pub fn new(kernels: Kernels, workers: usize) -> Self {
        let stats = vec![WorkerStats::default(); workers];
        Self {
            kernels,
            plan: Plan::default(),
            sums: Vec::new(),
            stats,
            waits: Histogram::default(),
            dropped: 0,
        }
    }

    /// What every worker did since the start.
    pub fn stats(&self) -> &[WorkerStats] {
        &self.stats
    }

    /// How long each round waited for workers.
    pub fn waits(&self) -> &Histogram {
        &self.waits
    }

    /// Replies that answered nothing that was out; they never enter a sum.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Sends every row to its experts, runs `meanwhile`, and writes each row's sum of gated expert outputs to `out`,
    /// `[rows][hidden]`. Rows whose experts cannot answer fail; their part of `out` is meaningless.
    pub fn run(
        &mut self,
        transport: &mut dyn ExpertTransport,
        round: &LayerRound<'_>,
        faults: &mut RowFaults,
        meanwhile: impl FnOnce(),
        out: &mut [f32],
    ) {
        let hidden = round.activations.cols();
        let rows = round.activations.rows();
        self.plan.build(transport, round.layer, round.choices, row_bytes(round), rows, faults);
        let (epoch, generation) = transport.fence_base();
        let fence =
            Fence { epoch, generation, step: round.step, layer: round.layer, attempt: 0, part: 0 };
        if let Some(hints) = round.hints {
            // Workers that compute nothing in this layer have the most time to read ahead.
            let idle = |worker| self.plan.parts.iter().all(|part| part.worker != worker);
            (0..self.stats.len())
                .filter(|&worker| idle(worker))
                .for_each(|worker| hints.send(transport, worker, fence));
        }
        for part in 0..self.plan.parts.len() {
            self.send(transport, round, fence, part, faults);
        }
        meanwhile();
        self.sums.clear();
        self.sums.resize(rows * hidden, 0);
        let sent = Instant::now();
        let deadline = sent + round.deadline;
        while self.plan.parts.iter().any(|part| !part.answered) {
            let begun = Instant::now();
            match transport.receive(deadline) {
                Ok(Reply { worker, outcome }) => {
                    self.stats[worker].wait += begun.elapsed();
                    match outcome {
                        Ok(result) => {
                            self.accept(worker, fence, &result, hidden, round.layer, faults)
                        }
                        Err(error) => self.refused(transport, round, fence, worker, &error, faults),
                    }
                }
                Err(TransportError::Lost { worker, detail }) => {
                    self.lose(transport, worker, &detail, faults)
                }
                Err(TransportError::Timeout) => self.time_out(transport, round, faults),
                Err(TransportError::Closed) => {
                    for worker in 0..self.stats.len() {
                        self.lose(transport, worker, "the transport is closed", faults);
                    }
                }
            }
        }
        self.waits.observe(sent.elapsed());
        self.finish(hidden, out);
    }

    fn send(
        &mut self,
        transport: &mut dyn ExpertTransport,
        round: &LayerRound<'_>,
        base: Fence,
        part: usize,
        faults: &mut RowFaults,
    ) {
        let Fence { epoch, generation, step, layer, .. } = base;
        let worker = self.plan.parts[part].worker;
        let attempt = self.plan.parts[part].attempt;
        let number = u32::try_from(part).expect("parts of a layer are few");
        let fence = Fence { epoch, generation, step, layer, attempt, part: number };
        let deadline_ms = u32::try_from(round.deadline.as_millis()).unwrap_or(u32::MAX);
        let message = self.plan.message(part, fence, round.activations, deadline_ms);
        let first = part == 0 || self.plan.parts[part - 1].worker != worker;
        if let Some(hints) = round.hints.filter(|_| first && attempt == 0) {
            // Right before the work, so that one wake-up and one write carry both.
            hints.send(transport, worker, base);
        }
        if let Err(error) = transport.send(worker, message) {
            let detail = match error {
                TransportError::Lost { detail, .. } => detail,
                other => other.to_string(),
            };
            self.fail_part(transport, part, &detail, faults);
        }
    }

    /// The part that a reply answers, if it is one that is out.
    fn part_of(&mut self, worker: usize, base: Fence, fence: Option<Fence>) -> Option<usize> {
        let found = fence.and_then(|fence| {
            let index = usize::try_from(fence.part).ok()?;
            let part = self.plan.parts.get(index)?;
            let expected = Fence { attempt: part.attempt, part: fence.part, ..base };
            (fence == expected && part.worker == worker && !part.answered).then_some(index)
        });
        if found.is_none() {
            self.dropped += 1;
        }
        found
    }

    fn accept(
        &mut self,
        worker: usize,
        base: Fence,
        result: &ExpertResult,
        hidden: usize,
        layer: u32,
        faults: &mut RowFaults,
    ) {
        let Some(part) = self.part_of(worker, base, result.fence) else { return };
        self.plan.parts[part].answered = true;
        let stats = &mut self.stats[worker];
        stats.results += 1;
        stats.expert_rows += self.plan.entries(part).len() as u64;
        stats.compute += Duration::from_micros(u64::from(result.compute_us));
        let (rows, entries) = (self.plan.rows(part), self.plan.entries(part));
        let fits = match &result.payload {
            Some(Payload::Accumulators(bytes))
                if bytes.len() == rows.len() * hidden * size_of::<i64>() =>
            {
                add_sums(&mut self.sums, rows, hidden, bytes);
                true
            }
            Some(Payload::Outputs(bytes))
                if bytes.len() == entries.len() * hidden * size_of::<f32>() =>
            {
                let mut output = vec![0.0_f32; hidden];
                for (entry, bytes) in
                    entries.iter().zip(bytes.chunks_exact(hidden * size_of::<f32>()))
                {
                    for (value, bytes) in output.iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *value = f32::from_le_bytes(*bytes);
                    }
                    let row = rows[entry.row as usize] as usize;
                    let sums = &mut self.sums[row * hidden..(row + 1) * hidden];
                    if let Err(error) = self.kernels.accumulate(sums, entry.gate, &output) {
                        faults.fail(row, RowFault::Arithmetic { layer, what: error.to_string() });
                    }
                }
                true
            }
            _ => false,
        };
        if !fits {
            let detail = format!("worker {worker} answered with a payload of the wrong size");
            for &row in rows {
                faults.fail(row as usize, RowFault::Unavailable { detail: detail.clone() });
            }
        }
    }

    fn refused(
        &mut self,
        transport: &mut dyn ExpertTransport,
        round: &LayerRound<'_>,
        base: Fence,
        worker: usize,
        error: &WorkerError,
        faults: &mut RowFaults,
    ) {
        let Some(part) = self.part_of(worker, base, error.fence) else { return };
        let again = self.plan.parts[part].attempt + 1 < ATTEMPTS_MAX;
        let gone: &[u32] = match error.code() {
            ErrorCode::Overflow if !error.rows.is_empty() => &error.rows,
            ErrorCode::Checksum if again => &[],
            _ => return self.fail_part(transport, part, &error.detail, faults),
        };
        self.overflow(part, round.layer, gone, &error.detail, faults);
        let before = self.plan.rows(part).len();
        self.plan.without(part, gone);
        let left = self.plan.rows(part).len();
        if left == 0 {
            self.plan.parts[part].answered = true;
        } else if again || left < before {
            self.send(transport, round, base, part, faults);
        } else {
            self.fail_part(transport, part, &error.detail, faults);
        }
    }

    /// Fails the named rows of a part by their own arithmetic.
    fn overflow(
        &mut self,
        part: usize,
        layer: u32,
        gone: &[u32],
        detail: &str,
        faults: &mut RowFaults,
    ) {
        for (index, &row) in (0_u32..).zip(self.plan.rows(part)) {
            if gone.contains(&index) {
                faults.fail(row as usize, RowFault::Arithmetic { layer, what: detail.to_owned() });
            }
        }
    }

    /// Fails all rows of a part because of its worker.
    fn fail_part(
        &mut self,
        transport: &dyn ExpertTransport,
        part: usize,
        detail: &str,
        faults: &mut RowFaults,
    ) {
        let worker = self.plan.parts[part].worker;
        let detail = format!("worker {}: {detail}", transport.workers()[worker].id);
        for &row in self.plan.rows(part) {
            faults.fail(row as usize, RowFault::Unavailable { detail: detail.clone() });
        }
        self.plan.parts[part].answered = true;
    }

    fn lose(
        &mut self,
        transport: &dyn ExpertTransport,
        worker: usize,
        detail: &str,
        faults: &mut RowFaults,
    ) {
        for part in 0..self.plan.parts.len() {
            if self.plan.parts[part].worker == worker && !self.plan.parts[part].answered {
                self.fail_part(transport, part, detail, faults);
            }
        }
    }

    fn time_out(
        &mut self,
        transport: &mut dyn ExpertTransport,
        round: &LayerRound<'_>,
        faults: &mut RowFaults,
    ) {
        let detail =
            format!("no result of layer {} within {} ms", round.layer, round.deadline.as_millis());
        for part in 0..self.plan.parts.len() {
            if !self.plan.parts[part].answered {
                let worker = self.plan.parts[part].worker;
                transport.give_up(worker, &detail);
                self.lose(transport, worker, &detail, faults);
            }
        }
    }

    fn finish(&self, hidden: usize, out: &mut [f32]) {
        if out.len() < PARALLEL_VALUES {
            return self.kernels.finish(&self.sums, out);
        }
        let rows = out.par_chunks_mut(hidden).zip(self.sums.par_chunks(hidden));
        rows.for_each(|(out, sums)| self.kernels.finish(sums, out));
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

/// Adds a worker's sums to those of the batch. Integers: any order gives the same bits.
fn add_sums(sums: &mut [i64], rows: &[u32], hidden: usize, bytes: &[u8]) {
    let add = |sums: &mut [i64], bytes: &[u8]| {
        for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<8>().0) {
            // Terms are below 2^51 each and their number is small; a corrupt frame may wrap but never stops the server.
            *sum = sum.wrapping_add(i64::from_le_bytes(*bytes));
        }
    };
    let width = hidden * size_of::<i64>();
    let whole = rows.len() * hidden == sums.len();
    if whole && sums.len() >= PARALLEL_VALUES {
        sums.par_chunks_mut(hidden)
            .zip(bytes.par_chunks(width))
            .for_each(|(sums, bytes)| add(sums, bytes));
        return;
    }
    for (&row, bytes) in rows.iter().zip(bytes.chunks_exact(width)) {
        add(&mut sums[row as usize * hidden..][..hidden], bytes);
    }
}
