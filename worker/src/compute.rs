//! HOT PATH: checked work in, payload out. The expert function is `shimmer_kernels::Kernels::expert`, here as in every
//! other tier; this module only decides who computes what, and adds.

use rayon::prelude::*;
use shimmer_kernels::{ActivationRows, Expert, combine::TERM_LIMIT};
use shimmer_proto::expert::v1::{ErrorCode, ExpertWork, WorkerError, expert_result::Payload};

use crate::{
    check::{Checked, refusal},
    expert_core::ExpertCore,
    payload::Buffer,
    store::{ReadyExpert, Round, StoreError},
};

/// Reusable index buffers of one session.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    pub(crate) rows: ActivationRows,
    /// Pairs of each row, row after row.
    pairs_of_rows: Vec<Pair>,
    /// Where the pairs of each row begin; one more than rows.
    row_starts: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Pair {
    /// Place among all (item, row) pairs.
    index: usize,
    item: usize,
}

/// Estimated time of work on one thread, microseconds: reading the slabs once, or the multiplications if they take longer.
/// Only decides which thread computes, never what.
pub(crate) fn estimate_us(core: &ExpertCore, work: &ExpertWork) -> u64 {
    /// What one thread reads, bytes per microsecond.
    const READ: u64 = 12_000;
    /// What one thread multiplies once a slab is in its cache, slab bytes per microsecond and row.
    const MULTIPLY: u64 = 64_000;
    let layer = work.fence.as_ref().and_then(|fence| core.layer(fence.layer));
    let slab = layer.map_or(0, |shape| shape.layout.slab_bytes() as u64);
    let item = |&rows: &u32| (slab / READ).max(slab.saturating_mul(u64::from(rows)) / MULTIPLY);
    work.item_rows.iter().map(item).fold(0, u64::saturating_add)
}

/// Applies the experts of checked work in the order in which they become ready, arithmetic on the current pool or the
/// worker's own. Each output has a place of its own and the sums are exact, so the order does not show.
pub(crate) fn compute(
    core: &ExpertCore,
    checked: Checked,
    work: &ExpertWork,
    space: &mut Workspace,
    round: &mut dyn Round,
) -> Result<Payload, WorkerError> {
    let hidden = core.hidden();
    let mut outputs = core.outputs.take(checked.pairs * hidden);
    apply(core, checked, work, space, round, outputs.as_mut_slice())?;
    core.run(|| {
        if checked.pairs * size_of::<f32>() < checked.rows * size_of::<i64>() {
            check_range(checked, work, outputs.as_slice(), hidden)?;
            return Ok(Payload::Outputs(outputs.into_bytes()));
        }
        let sums = combine(core, checked, work, space, outputs.as_slice())?;
        Ok(Payload::Accumulators(sums.into_bytes()))
    })
}

/// One output row of each (item, row) pair, in the order of the work.
fn apply(
    core: &ExpertCore,
    checked: Checked,
    work: &ExpertWork,
    space: &Workspace,
    round: &mut dyn Round,
    outputs: &mut [f32],
) -> Result<(), WorkerError> {
    let hidden = core.hidden();
    let (mut indices, mut rest) = (&work.row_indices[..], outputs);
    let cut = |&rows: &u32| {
        let (of_item, other) = indices.split_at(rows as usize);
        let (out, after) = std::mem::take(&mut rest).split_at_mut(rows as usize * hidden);
        (indices, rest) = (other, after);
        Some((of_item, out))
    };
    let mut places: Vec<Option<(&[u32], &mut [f32])>> = work.item_rows.iter().map(cut).collect();
    let run = |(ready, indices, out): (ReadyExpert, &[u32], &mut [f32])| {
        let view = Expert::from_slab(&checked.shape.layout, &ready.lease).map_err(|error| {
            let expert = Some(work.experts[ready.item]);
            let detail = error.to_string();
            WorkerError { expert, ..refusal(ErrorCode::Internal, work.fence, detail) }
        })?;
        core.with_scratch(indices.len(), |scratch| {
            core.kernels().expert(&view, &space.rows, indices, out, scratch)
        });
        Ok(())
    };
    let mut ready = Vec::with_capacity(places.len());
    loop {
        round.next(&mut ready).map_err(|error| not_loaded(core, work, &error))?;
        if ready.is_empty() {
            return Ok(());
        }
        let mut items = Vec::with_capacity(ready.len());
        for expert in ready.drain(..) {
            let (indices, out) = places[expert.item].take().expect("each expert is ready once");
            items.push((expert, indices, out));
        }
        core.run(|| {
            if rayon::current_num_threads() == 1 || items.len() == 1 {
                items.into_iter().try_for_each(run)
            } else {
                items.into_par_iter().with_max_len(1).try_for_each(run)
            }
        })?;
    }
}

/// The work is refused; the stream goes on.
pub(crate) fn not_loaded(core: &ExpertCore, work: &ExpertWork, error: &StoreError) -> WorkerError {
    let detail = format!("worker {}: {error}", core.id());
    WorkerError { expert: error.expert(), ..refusal(ErrorCode::Load, work.fence, detail) }
}

/// The exact sum of each row's weighted outputs.
fn combine(
    core: &ExpertCore,
    checked: Checked,
    work: &ExpertWork,
    space: &mut Workspace,
    outputs: &[f32],
) -> Result<Buffer<i64>, WorkerError> {
    let hidden = core.hidden();
    index_rows(checked, work, space);
    let mut sums = core.sums.take(checked.rows * hidden);
    let Workspace { pairs_of_rows, row_starts, .. } = &*space;
    let add_row = |(row, sums): (usize, &mut [i64])| -> Result<(), (usize, usize)> {
        sums.fill(0);
        for pair in &pairs_of_rows[row_starts[row]..row_starts[row + 1]] {
            let output = &outputs[pair.index * hidden..(pair.index + 1) * hidden];
            core.kernels()
                .accumulate(sums, work.gates[pair.index], output)
                .map_err(|_| (row, pair.item))?;
        }
        Ok(())
    };
    let rows = sums.as_mut_slice();
    let serial = rayon::current_num_threads() == 1 || checked.pairs * hidden < 1 << 16;
    let faults: Vec<(usize, usize)> = if serial {
        rows.chunks_exact_mut(hidden).enumerate().filter_map(|row| add_row(row).err()).collect()
    } else {
        rows.par_chunks_exact_mut(hidden).enumerate().filter_map(|row| add_row(row).err()).collect()
    };
    if faults.is_empty() { Ok(sums) } else { Err(overflow(checked, work, &faults)) }
}

/// Groups the pairs by row, each row's in the order of the items.
fn index_rows(checked: Checked, work: &ExpertWork, space: &mut Workspace) {
    let Workspace { pairs_of_rows, row_starts, .. } = space;
    row_starts.clear();
    row_starts.resize(checked.rows + 1, 0);
    for &row in &work.row_indices {
        row_starts[row as usize + 1] += 1;
    }
    for row in 0..checked.rows {
        row_starts[row + 1] += row_starts[row];
    }
    pairs_of_rows.clear();
    pairs_of_rows.resize(checked.pairs, Pair::default());
    let mut index = 0;
    for (item, &rows) in work.item_rows.iter().enumerate() {
        for _ in 0..rows {
            let row = work.row_indices[index] as usize;
            pairs_of_rows[row_starts[row]] = Pair { index, item };
            row_starts[row] += 1;
            index += 1;
        }
    }
    // Each start has moved to the next row's; move them back.
    row_starts.copy_within(0..checked.rows, 1);
    row_starts[0] = 0;
}

/// The range check of the exact sum for outputs that the coordinator will add.
fn check_range(
    checked: Checked,
    work: &ExpertWork,
    outputs: &[f32],
    hidden: usize,
) -> Result<(), WorkerError> {
    let mut faults = Vec::new();
    let mut index = 0;
    for (item, &rows) in work.item_rows.iter().enumerate() {
        for _ in 0..rows {
            let gate = work.gates[index];
            let output = &outputs[index * hidden..(index + 1) * hidden];
            if !output.iter().fold(true, |fits, value| fits & ((gate * value).abs() < TERM_LIMIT)) {
                faults.push((work.row_indices[index] as usize, item));
            }
            index += 1;
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(overflow(checked, work, &faults)) }
}

/// Names the first expert and every row, so that the coordinator can fail those requests alone.
fn overflow(checked: Checked, work: &ExpertWork, faults: &[(usize, usize)]) -> WorkerError {
    let expert = work.experts[faults[0].1];
    let layer = checked.fence.layer;
    let detail = format!(
        "the weighted output of expert {expert} in layer {layer} is not finite or at least 2^21"
    );
    let mut rows: Vec<u32> =
        faults.iter().map(|&(row, _)| u32::try_from(row).unwrap_or(u32::MAX)).collect();
    rows.sort_unstable();
    rows.dedup();
    WorkerError { expert: Some(expert), rows, ..refusal(ErrorCode::Overflow, work.fence, detail) }
}
