//! Threads that follow hints.

use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use super::ring::Ring;
use crate::{store::StoreError, tier_counters::TierCounters};

/// Hints that wait at most: what a pilot gets through while a few layers are computed. Later ones are dropped, because they
/// would be too late anyway.
const HINTS_MAX: u64 = 256;

/// Threads that read experts before work wants them.
#[derive(Debug)]
pub(crate) struct Pilots {
    hints: Arc<Hints>,
    threads: Vec<JoinHandle<()>>,
}

/// Hints that wait for a pilot.
#[derive(Debug)]
struct Hints {
    ring: Ring,
    closed: AtomicBool,
    /// Pilots that found the ring empty and are about to sleep, or asleep.
    idle: AtomicU64,
    lock: Mutex<()>,
    more: Condvar,
}

impl Pilots {
    /// Starts threads that follow hints one after another. They end when this is dropped.
    pub(crate) fn start(
        workers: u8,
        follow: impl Fn(Hint) + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let follow = Arc::new(follow);
        let hints = Arc::new(Hints {
            ring: Ring::new(HINTS_MAX),
            closed: AtomicBool::new(false),
            idle: AtomicU64::new(0),
            lock: Mutex::new(()),
            more: Condvar::new(),
        });
        let mut pilots = Self { hints, threads: Vec::with_capacity(workers.into()) };
        for number in 0..workers {
            let (hints, follow) = (Arc::clone(&pilots.hints), Arc::clone(&follow));
            let run = move || {
                while let Some(hint) = hints.next() {
                    follow(hint);
                }
            };
            let thread = thread::Builder::new().name(format!("shimmer-pilot-{number}")).spawn(run);
            let failed = |source| StoreError::Pilots { threads: workers, source };
            pilots.threads.push(thread.map_err(failed)?);
        }
        Ok(pilots)
    }

    /// Queues hints for a layer, seen at `time` of it.
    pub(crate) fn hint(&self, counters: &TierCounters, layer: u32, time: u64, experts: &[u32]) {
        let mut put = 0;
        for &expert in experts {
            if !self.hints.ring.push(pack(Hint { layer, expert, time })) {
                let dropped = experts.len() as u64 - put;
                counters.prefetch_dropped_ring_full.fetch_add(dropped, Ordering::Relaxed);
                break;
            }
            put += 1;
        }
        self.hints.wake(put);
    }
}

impl Drop for Pilots {
    fn drop(&mut self) {
        self.hints.close();
        for thread in self.threads.drain(..) {
            thread.join().expect("a pilot does not panic");
        }
    }
}

/// A guess that an expert will be wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hint {
    pub(crate) layer: u32,
    pub(crate) expert: u32,
    /// Time of the layer when the hint came: work that has begun since has come before it.
    pub(crate) time: u64,
}

fn pack(hint: Hint) -> [u64; 2] {
    [u64::from(hint.layer) << 32 | u64::from(hint.expert), hint.time]
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
fn unpack([names, time]: [u64; 2]) -> Hint {
    Hint { layer: (names >> 32) as u32, expert: names as u32, time }
}

impl Hints {
    /// The next hint; sleeps until there is one. None when the pilots end.
    fn next(&self) -> Option<Hint> {
        loop {
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            if let Some(item) = self.ring.pop() {
                return Some(unpack(item));
            }
            // Said before the second look: who puts an item after that look sees it, and who puts one before is seen.
            let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.idle.fetch_add(1, Ordering::SeqCst);
            std::sync::atomic::fence(Ordering::SeqCst);
            let item = self.ring.pop();
            if item.is_none() && !self.closed.load(Ordering::Acquire) {
                drop(self.more.wait(guard).unwrap_or_else(PoisonError::into_inner));
            }
            self.idle.fetch_sub(1, Ordering::SeqCst);
            if let Some(item) = item {
                return Some(unpack(item));
            }
        }
    }

    /// Wakes as many pilots as there are new hints.
    fn wake(&self, hints: u64) {
        std::sync::atomic::fence(Ordering::SeqCst);
        let idle = self.idle.load(Ordering::SeqCst);
        if hints == 0 || idle == 0 {
            return;
        }
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if hints >= idle {
            self.more.notify_all();
        } else {
            (0..hints).for_each(|_| self.more.notify_one());
        }
    }

    fn close(&self) {
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Release);
        self.more.notify_all();
    }
}

#[cfg(test)]
mod tests;
