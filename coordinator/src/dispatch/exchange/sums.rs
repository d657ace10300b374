//! HOT PATH. Results into exact sums.

use rayon::prelude::*;
use shimmer_proto::expert::v1::{ExpertResult, expert_result::Payload};

use super::{Exchange, Reach};
use crate::dispatch::plan::State;
use crate::gating::RowFault;

/// Values of one combine below which handing them to other threads costs more than it saves.
const PARALLEL_VALUES: usize = 1 << 16;

impl Exchange {
    /// Whether a result has the size that its part asked for.
    pub(super) fn fits(&self, part: usize, hidden: usize, result: &ExpertResult) -> bool {
        let (rows, entries) = (self.plan.rows(part).len(), self.plan.entries(part).len());
        match &result.payload {
            Some(Payload::Accumulators(bytes)) => bytes.len() == rows * hidden * size_of::<i64>(),
            Some(Payload::Outputs(bytes)) => bytes.len() == entries * hidden * size_of::<f32>(),
            None => false,
        }
    }

    /// Adds a result that fits to the sums of the batch's rows.
    pub(super) fn add(
        &self,
        reach: &mut Reach<'_>,
        part: usize,
        result: &ExpertResult,
        sums: &mut [i64],
    ) {
        let hidden = reach.round.activations.cols();
        let (rows, entries) = (self.plan.rows(part), self.plan.entries(part));
        match &result.payload {
            Some(Payload::Accumulators(bytes)) => add_sums(sums, rows, hidden, bytes),
            Some(Payload::Outputs(bytes)) => {
                let mut output = vec![0.0_f32; hidden];
                let outputs = bytes.chunks_exact(hidden * size_of::<f32>());
                for (entry, bytes) in entries.iter().zip(outputs) {
                    for (value, bytes) in output.iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *value = f32::from_le_bytes(*bytes);
                    }
                    let row = rows[entry.row as usize] as usize;
                    let sums = &mut sums[row * hidden..(row + 1) * hidden];
                    if let Err(error) = self.kernels.accumulate(sums, entry.gate, &output) {
                        let layer = reach.round.layer;
                        let fault = RowFault::Arithmetic { layer, what: error.to_string() };
                        reach.faults.fail(row, fault);
                    }
                }
            }
            None => {}
        }
    }

    /// Adds the results that stand for a part: its own, or those of the parts in its place.
    pub(super) fn gather(&self, reach: &mut Reach<'_>, part: usize, sums: &mut [i64]) {
        match &self.plan.parts[part].state {
            State::Answered(Some(result)) => self.add(reach, part, result, sums),
            State::Answered(None) => {}
            State::Out | State::Gone(_) => {
                for &child in &self.plan.parts[part].children {
                    self.gather(reach, child, sums);
                }
            }
        }
    }

    /// Writes what the sums stand for.
    pub(super) fn finish(&self, hidden: usize, out: &mut [f32]) {
        if out.len() < PARALLEL_VALUES {
            return self.kernels.finish(&self.sums, out);
        }
        let rows = out.par_chunks_mut(hidden).zip(self.sums.par_chunks(hidden));
        rows.for_each(|(out, sums)| self.kernels.finish(sums, out));
    }
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
