//! What a journal counts.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// Counts since the start, and how things stand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct JournalStats {
    /// Requests whose acceptance is on the drive.
    pub accepted: u64,
    /// Bytes written, those of failed writes left out.
    pub written_bytes: u64,
    /// Requests that could not be written down and went on without.
    pub accept_failures: u64,
    /// Requests whose tokens could not be written further.
    pub append_failures: u64,
    /// Requests whose tokens came faster than they could be written.
    pub overruns: u64,
    /// Files that could not be read, or are damaged.
    pub read_failures: u64,
    /// Rounds of cleaning up that failed.
    pub clean_failures: u64,
    /// Files that were removed because of their age or for room.
    pub removed: u64,
    /// Resumed requests that had ended: given again without a model.
    pub resumed_ended: u64,
    /// Resumed requests that went on behind their known tokens.
    pub resumed_continued: u64,
    /// Resumed requests that were generated again from their prompt.
    pub resumed_again: u64,
    /// Tokens that wait to be written.
    pub pending_tokens: u64,
    /// Requests whose files are open.
    pub open: u64,
    /// Bytes of all files of the directory, as of the last look at it, and of what was written here since.
    pub bytes: u64,
}

/// One count.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn sub(&self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn set(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counts behind [`JournalStats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) accepted: Count,
    pub(super) written_bytes: Count,
    pub(super) accept_failures: Count,
    pub(super) append_failures: Count,
    pub(super) overruns: Count,
    pub(super) read_failures: Count,
    pub(super) clean_failures: Count,
    pub(super) removed: Count,
    pub(super) resumed_ended: Count,
    pub(super) resumed_continued: Count,
    pub(super) resumed_again: Count,
    pub(super) pending_tokens: Count,
    pub(super) bytes: Count,
}

impl Counters {
    pub(super) fn read(&self, open: u64) -> JournalStats {
        JournalStats {
            accepted: self.accepted.get(),
            written_bytes: self.written_bytes.get(),
            accept_failures: self.accept_failures.get(),
            append_failures: self.append_failures.get(),
            overruns: self.overruns.get(),
            read_failures: self.read_failures.get(),
            clean_failures: self.clean_failures.get(),
            removed: self.removed.get(),
            resumed_ended: self.resumed_ended.get(),
            resumed_continued: self.resumed_continued.get(),
            resumed_again: self.resumed_again.get(),
            pending_tokens: self.pending_tokens.get(),
            open,
            bytes: self.bytes.get(),
        }
    }
}
