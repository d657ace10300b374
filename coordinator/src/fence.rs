//! The ledger of work that is out: which replies may enter a sum.
//!
//! `(epoch, generation, step, layer)` orders everything; the parts of one layer are the only work that is ever out at
//! the same time. A reply enters a sum when it answers a part that is out now and has not been answered; every other
//! reply is dropped and counted. A plain state machine: it owns no socket and reads no clock.

use serde::Serialize;
use shimmer_proto::expert::v1::Fence;

/// What a reply is, against what is being waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The first answer to an attempt that is out.
    Accept,
    /// Work that is out was answered before; dropped.
    Duplicate,
    /// The answer to work of an earlier place or attempt; dropped.
    Stale,
    /// An answer to work that was never sent; dropped.
    Unknown,
}

/// Replies that were dropped since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Dropped {
    /// See [`Verdict::Duplicate`].
    pub duplicate: u64,
    /// See [`Verdict::Stale`].
    pub stale: u64,
    /// See [`Verdict::Unknown`].
    pub unknown: u64,
}

/// Work that would go back in time or was sent twice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FenceError {
    /// The message has no fence.
    #[error("the work has no fence")]
    Missing,
    /// The place is behind work that was already expected.
    #[error(
        "work for step {step}, layer {layer} is behind step {current_step}, layer {current_layer}"
    )]
    Backwards {
        /// Step of the work.
        step: u64,
        /// Layer of the work.
        layer: u32,
        /// Step that is open.
        current_step: u64,
        /// Layer that is open.
        current_layer: u32,
    },
    /// The same part is out on the same worker with this or a later attempt.
    #[error("part {part} of step {step}, layer {layer} is already out with attempt {attempt}")]
    Repeated {
        /// Step of the work.
        step: u64,
        /// Layer of the work.
        layer: u32,
        /// Part of the work.
        part: u32,
        /// Attempt that is out.
        attempt: u32,
    },
}

/// A place in the order of all work.
type Place = (u64, u64, u64, u32);

#[derive(Debug, Clone, Copy)]
struct Entry {
    worker: usize,
    part: u32,
    attempt: u32,
    answered: bool,
}

/// The work that is out at one place.
#[derive(Debug, Default)]
pub struct Ledger {
    place: Place,
    entries: Vec<Entry>,
    dropped: Dropped,
}

impl Ledger {
    /// An empty ledger, before all work.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes that work went out to a worker. The first work of a later place abandons what is still out; a later attempt
    /// of a part takes the place of the earlier one, answered or not.
    pub fn expect(&mut self, worker: usize, fence: Option<&Fence>) -> Result<(), FenceError> {
        let fence = fence.ok_or(FenceError::Missing)?;
        let place = place(fence);
        if place < self.place {
            let (_, _, current_step, current_layer) = self.place;
            return Err(FenceError::Backwards {
                step: fence.step,
                layer: fence.layer,
                current_step,
                current_layer,
            });
        }
        if place > self.place {
            self.place = place;
            self.entries.clear();
        }
        match self.entries.iter_mut().find(|e| e.worker == worker && e.part == fence.part) {
            Some(entry) if entry.attempt >= fence.attempt => Err(FenceError::Repeated {
                step: fence.step,
                layer: fence.layer,
                part: fence.part,
                attempt: entry.attempt,
            }),
            Some(entry) => {
                entry.attempt = fence.attempt;
                entry.answered = false;
                Ok(())
            }
            None => {
                let entry =
                    Entry { worker, part: fence.part, attempt: fence.attempt, answered: false };
                self.entries.push(entry);
                Ok(())
            }
        }
    }

    /// Classifies a reply and settles the work that it answers. Only the newest attempt of a part counts: it may hold fewer
    /// rows than the one before.
    pub fn settle(&mut self, worker: usize, fence: Option<&Fence>) -> Verdict {
        let verdict = self.classify(worker, fence);
        match verdict {
            Verdict::Accept => {}
            Verdict::Duplicate => self.dropped.duplicate += 1,
            Verdict::Stale => self.dropped.stale += 1,
            Verdict::Unknown => self.dropped.unknown += 1,
        }
        verdict
    }

    fn classify(&mut self, worker: usize, fence: Option<&Fence>) -> Verdict {
        let Some(fence) = fence else { return Verdict::Unknown };
        let place = place(fence);
        if place < self.place {
            return Verdict::Stale;
        }
        let mut entries = self.entries.iter_mut();
        match entries.find(|e| place == self.place && e.worker == worker && e.part == fence.part) {
            Some(entry) if fence.attempt > entry.attempt => Verdict::Unknown,
            Some(entry) if fence.attempt < entry.attempt => Verdict::Stale,
            Some(entry) if entry.answered => Verdict::Duplicate,
            Some(entry) => {
                entry.answered = true;
                Verdict::Accept
            }
            None => Verdict::Unknown,
        }
    }

    /// Gives up on everything that is out on a worker; the number of parts.
    pub fn forget(&mut self, worker: usize) -> usize {
        let out = self.outstanding(worker);
        self.entries.retain(|entry| entry.worker != worker);
        out
    }

    /// Parts that are out on a worker.
    pub fn outstanding(&self, worker: usize) -> usize {
        self.entries.iter().filter(|entry| entry.worker == worker && !entry.answered).count()
    }

    /// Workers with work out, each once, in the order of their first part.
    pub fn waiting_for(&self) -> impl Iterator<Item = usize> {
        let first = |index: usize, worker: usize| {
            !self.entries[..index].iter().any(|entry| entry.worker == worker && !entry.answered)
        };
        self.entries
            .iter()
            .enumerate()
            .filter(move |(index, entry)| !entry.answered && first(*index, entry.worker))
            .map(|(_, entry)| entry.worker)
    }

    /// Replies dropped since the start.
    pub fn dropped(&self) -> Dropped {
        self.dropped
    }
}

fn place(fence: &Fence) -> Place {
    (fence.epoch, fence.generation, fence.step, fence.layer)
}

#[cfg(test)]
mod tests;
