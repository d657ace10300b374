//! HOT PATH. Cuts one layer's rows into work messages: by owner, then by rows so that neither a message nor its result
//! exceeds the cap. A sans-I/O core.

use std::ops::Range;

use shimmer_kernels::{ActivationFormat, ActivationRows};
use shimmer_proto::expert::v1::{self, ExpertWork, Fence};

use super::ExpertTransport;
use crate::gating::{Choices, RowFault, RowFaults};

/// One expert of one row.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    worker: u32,
    row: u32,
    expert: u32,
    gate: f32,
}

/// One expert applied to one row of a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// Index among the rows of the part.
    pub(super) row: u32,
    pub(super) expert: u32,
    pub(super) gate: f32,
}

/// One message: some rows of one worker.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) worker: usize,
    pub(super) attempt: u32,
    rows: Range<usize>,
    entries: Range<usize>,
    pub(super) answered: bool,
}

/// All parts of one layer. Buffers keep their size from layer to layer.
#[derive(Debug, Default)]
pub(super) struct Plan {
    wanted: Vec<Wanted>,
    pub(super) parts: Vec<Part>,
    /// Rows of the batch, part by part.
    rows: Vec<u32>,
    /// By expert, then by row, part by part.
    entries: Vec<Entry>,
}

impl Plan {
    /// Cuts the rows that have not failed. A row that needs an expert without an owner fails.
    pub(super) fn build(
        &mut self,
        transport: &dyn ExpertTransport,
        layer: u32,
        choices: &Choices,
        row_bytes: usize,
        rows: usize,
        faults: &mut RowFaults,
    ) {
        self.parts.clear();
        self.rows.clear();
        self.entries.clear();
        self.wanted.clear();
        for row in 0..rows {
            if !faults.has(row) {
                self.want(transport, layer, choices, row, faults);
            }
        }
        self.wanted.sort_unstable_by_key(|wanted| (wanted.worker, wanted.row, wanted.expert));
        let mut at = 0;
        while at < self.wanted.len() {
            let worker = self.wanted[at].worker as usize;
            let limits = transport.limits(worker);
            let most = limits.max_rows.min(limits.max_bytes / row_bytes.max(1)).max(1);
            at = self.cut(at, worker, most);
        }
    }

    fn want(
        &mut self,
        transport: &dyn ExpertTransport,
        layer: u32,
        choices: &Choices,
        row: usize,
        faults: &mut RowFaults,
    ) {
        let begin = self.wanted.len();
        for selected in choices.of(row) {
            let expert = selected.expert;
            let Some(worker) = transport.owner(layer, expert) else {
                self.wanted.truncate(begin);
                let detail = format!("expert {expert} of layer {layer} has no serving worker");
                return faults.fail(row, RowFault::Unavailable { detail });
            };
            self.wanted.push(Wanted {
                worker: index(worker),
                row: index(row),
                expert,
                gate: selected.weight,
            });
        }
    }

    /// Makes a part of one worker's next rows, at most `most`; returns where the next part begins.
    fn cut(&mut self, begin: usize, worker: usize, most: usize) -> usize {
        let (first_row, first_entry) = (self.rows.len(), self.entries.len());
        let mut end = begin;
        for wanted in &self.wanted[begin..] {
            let new = self.rows[first_row..].last() != Some(&wanted.row);
            if wanted.worker as usize != worker || (new && self.rows.len() - first_row == most) {
                break;
            }
            if new {
                self.rows.push(wanted.row);
            }
            let row = index(self.rows.len() - first_row - 1);
            self.entries.push(Entry { row, expert: wanted.expert, gate: wanted.gate });
            end += 1;
        }
        self.entries[first_entry..].sort_unstable_by_key(|entry| (entry.expert, entry.row));
        let (rows, entries) = (first_row..self.rows.len(), first_entry..self.entries.len());
        self.parts.push(Part { worker, attempt: 0, rows, entries, answered: false });
        end
    }

    /// The batch rows of a part.
    pub(super) fn rows(&self, part: usize) -> &[u32] {
        &self.rows[self.parts[part].rows.clone()]
    }

    /// Experts and rows of a part, in the order of its result.
    pub(super) fn entries(&self, part: usize) -> &[Entry] {
        &self.entries[self.parts[part].entries.clone()]
    }

    /// Takes rows out of a part that will be sent again.
    pub(super) fn without(&mut self, part: usize, gone: &[u32]) {
        let kept: Vec<u32> =
            (0..index(self.rows(part).len())).filter(|row| !gone.contains(row)).collect();
        let entries: Vec<Entry> = self
            .entries(part)
            .iter()
            .filter_map(|entry| {
                let row = kept.binary_search(&entry.row).ok()?;
                Some(Entry { row: index(row), ..*entry })
            })
            .collect();
        let rows: Vec<u32> = kept.iter().map(|&row| self.rows(part)[row as usize]).collect();
        let (first_row, first_entry) = (self.rows.len(), self.entries.len());
        self.rows.extend(rows);
        self.entries.extend(entries);
        let (row_end, entry_end) = (self.rows.len(), self.entries.len());
        let changed = &mut self.parts[part];
        changed.rows = first_row..row_end;
        changed.entries = first_entry..entry_end;
        changed.attempt += 1;
    }

    /// The message of a part. The transport seals it.
    pub(super) fn message(
        &self,
        part: usize,
        fence: Fence,
        activations: &ActivationRows,
        deadline_ms: u32,
    ) -> ExpertWork {
        let picked = self.rows(part);
        let entries = self.entries(part);
        let bytes =
            ActivationRows::wire_bytes(activations.format(), picked.len(), activations.cols());
        let mut rows = Vec::with_capacity(bytes.unwrap_or_default());
        activations.write_wire_rows(picked, &mut rows);
        let (mut experts, mut item_rows) = (Vec::new(), Vec::new());
        for entry in entries {
            if experts.last() == Some(&entry.expert) {
                *item_rows.last_mut().expect("one count per expert") += 1;
            } else {
                experts.push(entry.expert);
                item_rows.push(1);
            }
        }
        ExpertWork {
            fence: Some(fence),
            format: wire_format(activations.format()).into(),
            row_count: index(picked.len()),
            rows: rows.into(),
            experts,
            item_rows,
            row_indices: entries.iter().map(|entry| entry.row).collect(),
            gates: entries.iter().map(|entry| entry.gate).collect(),
            deadline_ms,
            checksum: 0,
        }
    }
}

fn wire_format(format: ActivationFormat) -> v1::ActivationFormat {
    match format {
        ActivationFormat::A8G64 => v1::ActivationFormat::A8g64,
        ActivationFormat::F32 => v1::ActivationFormat::F32,
        ActivationFormat::A16G64 => v1::ActivationFormat::Unspecified,
    }
}

/// Rows, workers and entries of a step are counted in thousands.
fn index(value: usize) -> u32 {
    u32::try_from(value).expect("a step has fewer than 2^32 rows")
}

#[cfg(test)]
mod tests;
