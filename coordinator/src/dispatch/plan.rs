//! HOT PATH. Cuts one layer's rows into work messages: by recipient, then by rows so that neither a message nor its result
//! exceeds the cap; and cuts what a recipient did not answer again, for others. A sans-I/O core.

use std::ops::Range;
use std::time::Instant;

use shimmer_kernels::{ActivationFormat, ActivationRows};
use shimmer_proto::expert::v1::{self, ExpertResult, ExpertWork, Fence};

use super::ExpertTransport;
use super::recipients::{Except, Recipient, Recipients};
use crate::gating::{Choices, RowFault, RowFaults};

/// Most rows that the coordinator's own copy computes at once; every worker takes as many.
const OWN_ROWS: usize = 256;

/// One expert of one row.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    to: Recipient,
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

/// What has become of a part.
#[derive(Debug)]
pub(super) enum State {
    /// Sent, not answered.
    Out,
    /// Its result, until it is combined; none once it is.
    Answered(Option<Box<ExpertResult>>),
    /// Will not be answered, and why.
    Gone(String),
}

/// One message: some rows of one recipient.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) to: Recipient,
    pub(super) attempt: u32,
    rows: Range<usize>,
    entries: Range<usize>,
    pub(super) state: State,
    /// The part in whose place, or beside which, this one was sent.
    pub(super) parent: Option<usize>,
    /// Parts that together hold what this one holds.
    pub(super) children: Vec<usize>,
    /// When others are asked as well; none once that is decided.
    pub(super) late_at: Option<Instant>,
    /// Is compared with another part, and adds nothing itself.
    pub(super) check: bool,
    /// Its worker says that the arithmetic overflowed, and others are asked whether that is so.
    pub(super) doubted: bool,
    /// Entered the sums, or failed its rows.
    pub(super) combined: bool,
}

impl Part {
    fn new(to: Recipient, rows: Range<usize>, entries: Range<usize>) -> Self {
        Self {
            to,
            attempt: 0,
            rows,
            entries,
            state: State::Out,
            parent: None,
            children: Vec::new(),
            late_at: None,
            check: false,
            doubted: false,
            combined: false,
        }
    }

    /// A planned part of the same entries for another recipient.
    pub(super) fn same(&self, to: Recipient) -> Self {
        Self::new(to, self.rows.clone(), self.entries.clone())
    }

    pub(super) fn is_out(&self) -> bool {
        matches!(self.state, State::Out)
    }
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
    /// The most that a row takes in either direction, bytes.
    row_bytes: usize,
}

impl Plan {
    /// Cuts the rows that have not failed. A row that needs an expert that nobody can compute fails.
    pub(super) fn build(
        &mut self,
        transport: &dyn ExpertTransport,
        recipients: &mut Recipients,
        layer: u32,
        choices: &Choices,
        [row_bytes, rows]: [usize; 2],
        faults: &mut RowFaults,
    ) {
        self.parts.clear();
        self.rows.clear();
        self.entries.clear();
        self.wanted.clear();
        self.row_bytes = row_bytes.max(1);
        for row in 0..rows {
            if !faults.has(row) {
                self.want(transport, recipients, layer, choices, row, faults);
            }
        }
        self.cut_all(transport, None);
    }

    fn want(
        &mut self,
        transport: &dyn ExpertTransport,
        recipients: &mut Recipients,
        layer: u32,
        choices: &Choices,
        row: usize,
        faults: &mut RowFaults,
    ) {
        let begin = self.wanted.len();
        for selected in choices.of(row) {
            let expert = selected.expert;
            let to = recipients.first(transport, layer, expert);
            if to == Recipient::Nobody {
                self.wanted.truncate(begin);
                let detail = format!("expert {expert} of layer {layer} has no serving worker");
                return faults.fail(row, RowFault::Unavailable { detail });
            }
            self.wanted.push(Wanted { to, row: index(row), expert, gate: selected.weight });
        }
    }

    /// Cuts everything wanted into parts; the places of the first and the one after the last.
    fn cut_all(&mut self, transport: &dyn ExpertTransport, parent: Option<usize>) -> Range<usize> {
        let first = self.parts.len();
        self.wanted.sort_unstable_by_key(|wanted| (wanted.to, wanted.row, wanted.expert));
        let mut at = 0;
        while at < self.wanted.len() {
            let to = self.wanted[at].to;
            let most = match to {
                Recipient::Worker(worker) => {
                    let limits = transport.limits(worker);
                    limits.max_rows.min(limits.max_bytes / self.row_bytes).max(1)
                }
                Recipient::Own => OWN_ROWS,
                Recipient::Nobody => usize::MAX,
            };
            at = self.cut(at, to, most, parent);
        }
        first..self.parts.len()
    }

    /// Makes a part of one recipient's next rows, at most `most`; returns where the next part begins.
    fn cut(&mut self, begin: usize, to: Recipient, most: usize, parent: Option<usize>) -> usize {
        let (first_row, first_entry) = (self.rows.len(), self.entries.len());
        let mut end = begin;
        for wanted in &self.wanted[begin..] {
            let new = self.rows[first_row..].last() != Some(&wanted.row);
            if wanted.to != to || (new && self.rows.len() - first_row == most) {
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
        self.parts.push(Part { parent, ..Part::new(to, rows, entries) });
        end
    }

    /// Cuts a part again for other recipients: parts of the same entries, in its place or beside it. None, and nothing is
    /// changed, if `whole` is asked for and some entry has no other recipient.
    pub(super) fn again(
        &mut self,
        transport: &dyn ExpertTransport,
        recipients: &mut Recipients,
        [part, layer]: [usize; 2],
        except: Except<'_>,
        whole: bool,
    ) -> Option<Range<usize>> {
        self.wanted.clear();
        let layer = index(layer);
        let mut last: Option<(u32, Recipient)> = None;
        for at in self.parts[part].entries.clone() {
            let Entry { row, expert, gate } = self.entries[at];
            let to = match last {
                Some((of, to)) if of == expert => to,
                _ => recipients.choose(transport, layer, expert, except),
            };
            last = Some((expert, to));
            if whole && to == Recipient::Nobody {
                return None;
            }
            let row = self.rows(part)[row as usize];
            self.wanted.push(Wanted { to, row, expert, gate });
        }
        Some(self.cut_all(transport, Some(part)))
    }

    /// Workers that were asked for a part: its own and those in whose place it was sent.
    pub(super) fn tried(&self, part: usize) -> Vec<usize> {
        let mut tried = Vec::new();
        let mut at = Some(part);
        while let Some(part) = at {
            if let Recipient::Worker(worker) = self.parts[part].to {
                tried.push(worker);
            }
            at = self.parts[part].parent;
        }
        tried
    }

    /// The batch rows of a part.
    pub(super) fn rows(&self, part: usize) -> &[u32] {
        &self.rows[self.parts[part].rows.clone()]
    }

    /// Experts and rows of a part, in the order of its result.
    pub(super) fn entries(&self, part: usize) -> &[Entry] {
        &self.entries[self.parts[part].entries.clone()]
    }

    /// Experts of a part, ascending, each once.
    pub(super) fn experts(&self, part: usize) -> Vec<u32> {
        let mut experts: Vec<u32> = self.entries(part).iter().map(|entry| entry.expert).collect();
        experts.dedup();
        experts
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
            trace: None,
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
