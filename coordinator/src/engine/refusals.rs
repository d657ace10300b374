//! Requests that were not queued, counted by any number of handles.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::handle::SubmitError;

/// Requests that were not queued, by what was wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RefusedRequests {
    /// A field outside its range.
    pub invalid: u64,
    /// A prompt that leaves no room in the context.
    pub context: u64,
    /// An id that is in use.
    pub duplicate: u64,
    /// A full queue.
    pub queue_full: u64,
    /// An engine that takes nothing more.
    pub shutting_down: u64,
}

impl RefusedRequests {
    /// What happened after an earlier moment of the same engine.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            invalid: self.invalid - earlier.invalid,
            context: self.context - earlier.context,
            duplicate: self.duplicate - earlier.duplicate,
            queue_full: self.queue_full - earlier.queue_full,
            shutting_down: self.shutting_down - earlier.shutting_down,
        }
    }
}

/// The counters themselves.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    invalid: AtomicU64,
    context: AtomicU64,
    duplicate: AtomicU64,
    queue_full: AtomicU64,
    shutting_down: AtomicU64,
}

impl Refusals {
    pub(super) fn count(&self, error: &SubmitError) {
        let counter = match error {
            SubmitError::Invalid(_) => &self.invalid,
            SubmitError::ContextExceeded { .. } => &self.context,
            SubmitError::DuplicateId { .. } => &self.duplicate,
            SubmitError::QueueFull { .. } => &self.queue_full,
            SubmitError::ShuttingDown => &self.shutting_down,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> RefusedRequests {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RefusedRequests {
            invalid: read(&self.invalid),
            context: read(&self.context),
            duplicate: read(&self.duplicate),
            queue_full: read(&self.queue_full),
            shutting_down: read(&self.shutting_down),
        }
    }
}
