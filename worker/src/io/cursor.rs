//! Who takes which job of a batch: one atomic word that holds the batch's generation and how many of its jobs are left.
//!
//! A claim names the generation that it means and exchanges the whole word. A thread that was delayed while its batch
//! ended therefore fails instead of taking a job of the next batch, and no two threads take the same one. Generations
//! never repeat, so that a word never means two things.

use crate::sync::{AtomicU64, Ordering};

/// Most jobs of one batch.
pub(super) const JOBS_MAX: usize = (1 << JOB_BITS) - 1;

/// 48 bits of generation last 89 years at 100,000 batches per second.
const JOB_BITS: u32 = 16;

/// Identifies a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Generation(u64);

/// The word.
#[derive(Debug)]
pub(super) struct Cursor(AtomicU64);

impl Cursor {
    /// A cursor without jobs.
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Begins the next batch. Whatever its jobs need is written before; a thread that has won a claim sees it. One thread
    /// publishes at a time, and only once all jobs of the batch before are claimed.
    pub(super) fn publish(&self, jobs: usize) -> Generation {
        assert!(jobs <= JOBS_MAX, "a batch has at most {JOBS_MAX} jobs");
        let before = self.0.load(Ordering::Relaxed);
        assert_eq!(before & JOBS_MAX as u64, 0, "jobs of the batch before are left");
        let generation = (before >> JOB_BITS) + 1;
        assert!(generation < 1 << (64 - JOB_BITS), "generations never repeat");
        self.0.store(generation << JOB_BITS | jobs as u64, Ordering::Release);
        Generation(generation)
    }

    /// Claims the next job of a batch of `jobs` jobs and returns its index; none when all are claimed or another batch has
    /// begun.
    pub(super) fn claim(&self, generation: Generation, jobs: usize) -> Option<usize> {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let left = usize::try_from(word & JOBS_MAX as u64).expect("few bits");
            if word >> JOB_BITS != generation.0 || left == 0 {
                return None;
            }
            match self.0.compare_exchange_weak(word, word - 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Some(jobs - left),
                Err(now) => word = now,
            }
        }
    }
}

#[cfg(test)]
mod tests;
