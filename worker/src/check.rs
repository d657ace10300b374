//! HOT PATH: everything that is checked about work before any arithmetic. Counts, indices and lengths come from the wire
//! and are hostile until they are checked.

use shimmer_kernels::ActivationRows;
use shimmer_proto::{
    checksum,
    expert::v1::{ErrorCode, ExpertWork, Fence, PrefetchHint, WorkerError},
    identity::shown,
    limits,
};

use crate::expert_core::{ExpertCore, LayerShape};

/// Largest memory for the outputs of one work message before they are summed, bytes. A full part of a model with 64
/// experts per token takes half of it.
const OUTPUT_BYTES_MAX: usize = 256 << 20;

/// Sizes of checked work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked {
    pub(crate) fence: Fence,
    pub(crate) shape: LayerShape,
    /// Distinct rows.
    pub(crate) rows: usize,
    /// (item, row) pairs.
    pub(crate) pairs: usize,
}

/// A refusal of work; the stream goes on.
pub(crate) fn refusal(
    code: ErrorCode,
    fence: Option<Fence>,
    detail: impl Into<String>,
) -> WorkerError {
    WorkerError { code: code.into(), detail: detail.into(), fence, ..WorkerError::default() }
}

/// Checks work against what the assignment that admits it owns, by layer and expert. The checksum has been checked before.
pub(crate) fn check(
    core: &ExpertCore,
    owned: &[Vec<bool>],
    work: &ExpertWork,
) -> Result<Checked, WorkerError> {
    let malformed = |detail: String| refusal(ErrorCode::Malformed, work.fence, detail);
    let fence = work.fence.ok_or_else(|| malformed("the work has no fence".to_owned()))?;
    let shape = core
        .layer(fence.layer)
        .ok_or_else(|| malformed(format!("layer {} has no routed experts", fence.layer)))?;
    if work.format() != core.wire_format() {
        let (found, wanted) = (work.format().as_str_name(), core.wire_format().as_str_name());
        return Err(malformed(format!("rows in {}, this container takes {wanted}", shown(found))));
    }
    if !(1..=core.max_rows()).contains(&work.row_count) {
        let (found, most) = (work.row_count, core.max_rows());
        return Err(malformed(format!("{found} rows, expected 1 to {most}")));
    }
    let rows = work.row_count as usize;
    let row_bytes = ActivationRows::wire_bytes(core.format(), rows, core.hidden());
    if row_bytes != Some(work.rows.len()) {
        let found = work.rows.len();
        return Err(malformed(format!(
            "{rows} rows take {} bytes, found {found}",
            row_bytes.unwrap_or(0)
        )));
    }
    let pairs = check_items(core, work, rows, &malformed)?;
    check_owned(owned, work, fence, shape)?;
    Ok(Checked { fence, shape, rows, pairs })
}

/// Why a hint is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HintDrop {
    Corrupt,
    Stale,
    Malformed,
    NotOwned,
}

/// Checks a hint against what the assignment that admits it owns, if there is one. Its length comes first, so that nothing is paid
/// for a hint that is too long.
pub(crate) fn check_hint(
    core: &ExpertCore,
    owned: Option<&[Vec<bool>]>,
    hint: &PrefetchHint,
) -> Result<(), HintDrop> {
    if !(1..=limits::MAX_HINT_EXPERTS).contains(&hint.experts.len()) {
        return Err(HintDrop::Malformed);
    }
    checksum::verify_hint(hint).map_err(|_| HintDrop::Corrupt)?;
    let fence = hint.fence.ok_or(HintDrop::Malformed)?;
    let owned = owned.ok_or(HintDrop::Stale)?;
    let shape = core.layer(hint.layer).ok_or(HintDrop::Malformed)?;
    if hint.layer <= fence.layer || hint.experts.iter().any(|&expert| expert >= shape.experts) {
        return Err(HintDrop::Malformed);
    }
    let of_layer = owned.get(hint.layer as usize).map_or(&[][..], Vec::as_slice);
    let is_owned = |&expert: &u32| of_layer.get(expert as usize).is_some_and(|&owned| owned);
    if hint.experts.iter().all(is_owned) { Ok(()) } else { Err(HintDrop::NotOwned) }
}

fn check_items(
    core: &ExpertCore,
    work: &ExpertWork,
    rows: usize,
    malformed: &dyn Fn(String) -> WorkerError,
) -> Result<usize, WorkerError> {
    let items = work.experts.len();
    if items == 0 || items != work.item_rows.len() {
        return Err(malformed(format!("{items} experts and {} row counts", work.item_rows.len())));
    }
    let pairs = work.row_indices.len();
    let announced: u64 = work.item_rows.iter().map(|&rows| u64::from(rows)).sum();
    if announced != pairs as u64 || pairs != work.gates.len() {
        let gates = work.gates.len();
        return Err(malformed(format!(
            "{announced} pairs announced, {pairs} row indices and {gates} gates"
        )));
    }
    if let Some(&count) = work.item_rows.iter().find(|&&count| count == 0 || count > work.row_count)
    {
        return Err(malformed(format!("an expert for {count} of {rows} rows")));
    }
    if let Some(&index) = work.row_indices.iter().find(|&&index| index >= work.row_count) {
        return Err(malformed(format!("row index {index} in work of {rows} rows")));
    }
    if let Some(gate) = work.gates.iter().find(|gate| !gate.is_finite()) {
        return Err(malformed(format!("a gate of {gate}")));
    }
    let largest = OUTPUT_BYTES_MAX / (core.hidden() * size_of::<f32>()).max(1);
    if pairs > largest {
        return Err(malformed(format!(
            "{pairs} pairs of an expert and a row, at most {largest} in one message"
        )));
    }
    let result = (rows * size_of::<i64>()).min(pairs * size_of::<f32>()) * core.hidden();
    if result > limits::MAX_MESSAGE_BYTES / 2 {
        let cap = limits::MAX_MESSAGE_BYTES / 2;
        return Err(malformed(format!(
            "a result of {result} bytes, at most {cap}; cut the work into parts"
        )));
    }
    Ok(pairs)
}

fn check_owned(
    owned: &[Vec<bool>],
    work: &ExpertWork,
    fence: Fence,
    shape: LayerShape,
) -> Result<(), WorkerError> {
    let empty = Vec::new();
    let of_layer = owned.get(fence.layer as usize).unwrap_or(&empty);
    for (index, &expert) in work.experts.iter().enumerate() {
        let layer = fence.layer;
        let fault = if expert >= shape.experts {
            (
                ErrorCode::Malformed,
                format!("expert {expert} of layer {layer}, which has {}", shape.experts),
            )
        } else if !of_layer.get(expert as usize).is_some_and(|&owned| owned) {
            (
                ErrorCode::NotOwned,
                format!("expert {expert} of layer {layer} is not assigned to this worker"),
            )
        } else if work.experts[..index].contains(&expert) {
            (ErrorCode::Malformed, format!("expert {expert} of layer {layer} twice in one message"))
        } else {
            continue;
        };
        let (code, detail) = fault;
        return Err(WorkerError { expert: Some(expert), ..refusal(code, work.fence, detail) });
    }
    Ok(())
}
