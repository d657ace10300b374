//! Which rows of which sequences the next step computes.
//!
//! A sans-I/O core: sequences come in, steps come out; it owns no clock, no thread and no data but page numbers. Nothing it
//! decides can change a byte of any output, only when it is computed.
//!
//! * A waiting sequence is admitted when a place in the batch and pages for its prompt and all tokens it may generate are
//!   free, strictly in order of arrival: a large one at the head holds back later ones, so it cannot starve.
//! * A step holds first one row of every sequence that is generating, then prompt chunks in order of admission while rows
//!   are left. Since a batch has at least as many rows as sequences, every running sequence advances in every step.

use std::collections::VecDeque;

use crate::kv_cache::{PageAllocator, pages_for};

/// Names a sequence for as long as it waits or runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// Limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Most rows of one step.
    pub max_batch_rows: usize,
    /// Most prompt rows of one sequence in one step.
    pub prefill_chunk: usize,
    /// Most running sequences; at most `max_batch_rows`.
    pub max_running: usize,
}

/// Consecutive rows of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Whose.
    pub id: SequenceId,
    /// Position of the first row.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// The last row is the sequence's last known token: its logits choose the next one.
    pub last: bool,
}

#[derive(Debug)]
struct Waiting {
    id: SequenceId,
    prompt: usize,
    pages: usize,
}

#[derive(Debug)]
struct Running {
    id: SequenceId,
    /// Tokens known: prompt and generated.
    known: usize,
    /// Positions whose keys and values are written.
    computed: usize,
    pages: Vec<u32>,
}

impl Running {
    fn pending(&self) -> usize {
        self.known - self.computed
    }

    fn span(&self, rows: usize) -> Span {
        Span { id: self.id, first: self.computed, rows, last: rows == self.pending() }
    }
}

/// The queue and the batch.
#[derive(Debug)]
pub struct Scheduler {
    limits: StepLimits,
    pages: PageAllocator,
    waiting: VecDeque<Waiting>,
    /// In order of admission.
    running: Vec<Running>,
}

impl Scheduler {
    /// An empty batch over free pages.
    pub fn new(limits: StepLimits, pages: PageAllocator) -> Self {
        assert!(limits.prefill_chunk > 0, "a chunk holds at least one row");
        assert!(
            (1..=limits.max_batch_rows).contains(&limits.max_running),
            "a batch has a row for every running sequence"
        );
        Self { limits, pages, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Queues a sequence that will hold at most `positions` positions. The caller has checked that so many exist.
    pub fn enqueue(&mut self, id: SequenceId, prompt: usize, positions: usize) {
        assert!(
            (1..=positions).contains(&prompt),
            "a prompt of {prompt} tokens in {positions} positions"
        );
        let pages = pages_for(positions);
        assert!(
            pages <= self.pages.total(),
            "{positions} positions never fit {} pages",
            self.pages.total()
        );
        self.waiting.push_back(Waiting { id, prompt, pages });
    }

    /// Admits the head of the queue if it fits.
    pub fn admit(&mut self) -> Option<SequenceId> {
        let head = self.waiting.front()?;
        if self.running.len() == self.limits.max_running {
            return None;
        }
        let pages = self.pages.take(head.pages)?;
        let Waiting { id, prompt, .. } = self.waiting.pop_front()?;
        self.running.push(Running { id, known: prompt, computed: 0, pages });
        Some(id)
    }

    /// The next step's rows; empty when nothing runs.
    pub fn plan(&self, spans: &mut Vec<Span>) {
        spans.clear();
        let mut left = self.limits.max_batch_rows;
        let (generating, prompts): (Vec<&Running>, Vec<&Running>) =
            self.running.iter().partition(|sequence| sequence.pending() == 1);
        spans.extend(generating.iter().map(|sequence| sequence.span(1)));
        left -= spans.len();
        for (index, sequence) in prompts.iter().enumerate() {
            // One row is kept for each prompt behind this one.
            let behind = prompts.len() - index - 1;
            let rows = sequence.pending().min(self.limits.prefill_chunk).min(left - behind);
            spans.push(sequence.span(rows));
            left -= rows;
        }
    }

    /// Notes that a span was computed.
    pub fn advance(&mut self, span: Span) {
        if let Some(sequence) = self.find(span.id) {
            assert_eq!(sequence.computed, span.first, "spans are computed in order");
            sequence.computed += span.rows;
        }
    }

    /// Notes one more known token.
    pub fn extend(&mut self, id: SequenceId) {
        if let Some(sequence) = self.find(id) {
            sequence.known += 1;
            assert!(
                sequence.known <= sequence.pages.len() * shimmer_kernels::PAGE_POSITIONS,
                "the reservation holds"
            );
        }
    }

    /// Takes a sequence out of queue or batch and frees its pages; false when it is in neither.
    pub fn remove(&mut self, id: SequenceId) -> bool {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            self.pages.give(self.running.remove(at).pages);
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|sequence| sequence.id != id);
        self.waiting.len() < before
    }

    /// Pages of a running sequence, in order of position.
    pub fn pages(&self, id: SequenceId) -> &[u32] {
        self.running
            .iter()
            .find(|sequence| sequence.id == id)
            .map_or(&[], |sequence| &sequence.pages)
    }

    /// Sequences in the batch and in the queue.
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// The pages of all sequences.
    pub fn allocator(&self) -> &PageAllocator {
        &self.pages
    }

    /// Nothing waits and nothing runs.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    fn find(&mut self, id: SequenceId) -> Option<&mut Running> {
        self.running.iter_mut().find(|sequence| sequence.id == id)
    }
}

#[cfg(test)]
mod tests;
