//! Watches that what was promised still fits: if something outside grew, the cache of experts shrinks before the kernel
//! ends the process, and it grows back, slowly, once the memory is there again.
//!
//! [`Guard`] decides, [`Probe`] measures, [`MemoryGuard`] joins them for all workers of a process. It is asked at safe
//! points, between works; nothing here evicts.

mod decision;

use std::{
    fmt,
    path::Path,
    sync::{Mutex, PoisonError},
};

pub use decision::{CacheBytes, Decision, Guard, Reading};

use crate::budget::{Available, Budget, anonymous_bytes};

/// Measures the memory of this process.
pub trait Probe: Send + Sync + fmt::Debug {
    /// What it holds and what it can still have.
    fn read(&self) -> Reading;
}

/// The kernel's figures. Page cache counts as free, since it is given up when memory is asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemProbe;

impl Probe for SystemProbe {
    fn read(&self) -> Reading {
        let headroom = Available::read(Path::new("/")).smallest().map(|(bytes, _)| bytes);
        Reading { anonymous: anonymous_bytes(), headroom }
    }
}

/// One guard for a process, whatever the number of its workers: each would else take the same shortage off its own cache.
#[derive(Debug)]
pub struct MemoryGuard {
    probe: Box<dyn Probe>,
    guard: Mutex<Guard>,
}

impl MemoryGuard {
    /// A guard of a process with this budget, before any expert is in memory.
    pub fn new(budget: &Budget, probe: Box<dyn Probe>) -> Self {
        Self::with(Guard::new(budget.peak(0), budget.kept_free()), probe)
    }

    /// A guard that decides like `guard`.
    pub fn with(guard: Guard, probe: Box<dyn Probe>) -> Self {
        Self { probe, guard: Mutex::new(guard) }
    }

    /// A store plans to hold `now` bytes of experts, where it planned `before`.
    pub fn promised(&self, before: u64, now: u64) {
        self.lock().promised(before, now);
    }

    /// Measures, and says what a store should do with its cache. What it did is told with [`Self::promised`].
    pub fn check(&self, cache: CacheBytes) -> Decision {
        let reading = self.probe.read();
        self.lock().decide(reading, cache)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
