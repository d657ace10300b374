//! What an expert of the model computes: a number that no other (row, layer, expert, gate, column) gives, so that a sum shows
//! every term that is missing, doubled or of another place.

use bytes::Bytes;
use shimmer_proto::expert::v1::{ExpertResult, ExpertWork, expert_result::Payload};

use crate::dice::mix;

/// Values of a row.
pub(super) const HIDDEN: usize = 2;

/// One term of a sum.
fn term(row: &[f32], layer: u32, expert: u32, gate: f32, column: usize) -> i64 {
    let mut seed = u64::from(layer) << 40 | u64::from(expert) << 8 | column as u64;
    for value in row {
        seed = mix(seed ^ u64::from(value.to_bits()));
    }
    let spread = mix(seed ^ u64::from(gate.to_bits()) << 16);
    // Far below what a sum of i64 holds.
    i64::from(u32::try_from(spread >> 32).expect("32 bits are left"))
}

/// Adds one expert's terms to the sums of a row.
pub(super) fn add(sums: &mut [i64], row: &[f32], layer: u32, expert: u32, gate: f32) {
    for (column, sum) in sums.iter_mut().enumerate() {
        *sum += term(row, layer, expert, gate, column);
    }
}

/// The result of work, as a worker computes it; one with a flipped bit somewhere gives other sums.
pub(super) fn compute(work: &ExpertWork, flipped: bool) -> ExpertResult {
    let layer = work.fence.map_or(0, |fence| fence.layer);
    let values: Vec<f32> =
        work.rows.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let mut sums = vec![0; work.row_count as usize * HIDDEN];
    let mut at = 0;
    for (&expert, &rows) in work.experts.iter().zip(&work.item_rows) {
        for _ in 0..rows {
            let row = work.row_indices[at] as usize * HIDDEN;
            let (into, values) = (&mut sums[row..row + HIDDEN], &values[row..row + HIDDEN]);
            add(into, values, layer, expert, work.gates[at]);
            at += 1;
        }
    }
    sums.iter_mut().for_each(|sum| *sum ^= i64::from(flipped) << 17);
    let payload: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    ExpertResult {
        fence: work.fence,
        row_count: work.row_count,
        payload: Some(Payload::Accumulators(Bytes::from(payload))),
        ..ExpertResult::default()
    }
}
