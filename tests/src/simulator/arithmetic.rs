//! What an expert of the model computes: a number that no other (row, layer, expert, gate, column) gives, so that a sum shows
//! every term that is missing, doubled or of another place.

use std::collections::BTreeSet;

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

/// The second value of a row whose arithmetic leaves the range of numbers in some experts.
pub(super) const LARGE: f32 = 0.75;

/// Whether an expert's output for a row leaves the range of numbers: the same for whoever computes it.
pub(super) fn overflows(row: &[f32], expert: u32) -> bool {
    row[1].to_bits() == LARGE.to_bits() && expert % 2 == 1
}

/// Rows of work whose arithmetic leaves the range of numbers, ascending.
pub(super) fn overflowing(work: &ExpertWork) -> Vec<u32> {
    let values = values(work);
    let items = work.experts.iter().zip(&work.item_rows);
    let experts = items.flat_map(|(&expert, &rows)| std::iter::repeat_n(expert, rows as usize));
    let overflows = |&(expert, row): &(u32, u32)| {
        let at = row as usize * HIDDEN;
        overflows(&values[at..at + HIDDEN], expert)
    };
    let found = experts.zip(work.row_indices.iter().copied()).filter(overflows);
    let found: BTreeSet<u32> = found.map(|(_, row)| row).collect();
    found.into_iter().collect()
}

/// The values of the rows of work.
pub(super) fn values(work: &ExpertWork) -> Vec<f32> {
    work.rows.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Adds one expert's terms to the sums of a row.
pub(super) fn add(sums: &mut [i64], row: &[f32], layer: u32, expert: u32, gate: f32) {
    for (column, sum) in sums.iter_mut().enumerate() {
        *sum += term(row, layer, expert, gate, column);
    }
}

/// What a flipped bit somewhere makes of a sum.
pub(super) fn flip(sum: i64) -> i64 {
    sum ^ (1 << 17)
}

/// The result of work, as a worker computes it; one with a flipped bit somewhere gives other sums.
pub(super) fn compute(work: &ExpertWork, flipped: bool) -> ExpertResult {
    let layer = work.fence.map_or(0, |fence| fence.layer);
    let values = values(work);
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
    if flipped {
        sums.iter_mut().for_each(|sum| *sum = flip(*sum));
    }
    let payload: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    ExpertResult {
        fence: work.fence,
        row_count: work.row_count,
        payload: Some(Payload::Accumulators(Bytes::from(payload))),
        ..ExpertResult::default()
    }
}
