//! What is claimed no longer leaves room to what still is: its plan is made anew, on a thread that lives as long as that
//! takes.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::store::{LoadProgress, StoreError, tiered::Shared};

/// Time in which a coordinator that was cut off comes back: what it claimed before and will claim again should not be given
/// to others meanwhile. Long enough for a new connection, short for somebody who waits for memory.
const SETTLE_TIME: Duration = Duration::from_millis(500);

/// Whether a plan is to be made.
#[derive(Debug, Default)]
pub(in crate::store) struct Replans {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// When claims went last, if no plan has been made since.
    asked: Option<Instant>,
    /// A thread looks after `asked`.
    running: bool,
    closed: bool,
    thread: Option<JoinHandle<()>>,
}

impl Replans {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until claims have been gone for a while; not at all if nobody asks any more or the store is closed.
    fn wait(&self) -> bool {
        let mut state = self.lock();
        loop {
            let Some(asked) = state.asked.filter(|_| !state.closed) else {
                state.running = false;
                return false;
            };
            let left = (asked + SETTLE_TIME).saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.asked = None;
                return true;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the thread, and makes no new one.
    pub(in crate::store) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let thread = state.thread.take();
        drop(state);
        self.changed.notify_all();
        if let Some(thread) = thread {
            thread.join().expect("planning does not panic");
        }
    }
}

/// A plan that nobody waits for is given up when the store goes.
impl LoadProgress for Replans {
    fn loaded(&self, _bytes: u64) {}

    fn cancelled(&self) -> bool {
        self.lock().closed
    }
}

impl Shared {
    /// Has a new plan made soon.
    pub(super) fn replan_soon(self: &Arc<Self>) {
        let mut state = self.replans.lock();
        if state.closed {
            return;
        }
        state.asked = Some(Instant::now());
        if state.running {
            return;
        }
        let shared = Arc::clone(self);
        let run = move || {
            while shared.replans.wait() {
                if let Err(error) = shared.replan() {
                    tracing::warn!(%error, "giving experts the memory that others have left");
                }
            }
        };
        match thread::Builder::new().name("shimmer-replan".to_owned()).spawn(run) {
            Ok(thread) => {
                state.running = true;
                // An earlier one has ended.
                state.thread = Some(thread);
            }
            Err(error) => tracing::warn!(%error, "starting a thread that plans anew"),
        }
    }

    /// Plans for what is claimed now, unless that is what it was planned for.
    fn replan(self: &Arc<Self>) -> Result<(), StoreError> {
        let _one_at_a_time = self.claiming.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = self.plan(&[])?;
        // A coordinator that comes back finds everything as it was.
        if plan.layers.is_empty() || self.shape().plan.as_ref() == Some(&plan) {
            return Ok(());
        }
        self.apply_again(&self.replans)?;
        self.follow_plan()
    }
}
