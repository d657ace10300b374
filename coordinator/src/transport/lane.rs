//! What a link and the step thread share about one worker. Neither waits for the other.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use shimmer_proto::expert::v1::SessionRequest;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// Counters of one link.
#[derive(Debug, Default)]
pub(super) struct LinkCounters {
    pub(super) connects: AtomicU64,
    pub(super) losses: AtomicU64,
    pub(super) refusals: AtomicU64,
    pub(super) corrupt_frames: AtomicU64,
    pub(super) unreadable_frames: AtomicU64,
    pub(super) probes: AtomicU64,
    pub(super) failed_probes: AtomicU64,
    pub(super) slowed: AtomicU64,
}

impl LinkCounters {
    pub(super) fn bump(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The step thread's handle to a session that takes work.
#[derive(Debug, Clone)]
pub(super) struct Outlet {
    pub(super) session: u64,
    pub(super) requests: mpsc::Sender<SessionRequest>,
    /// Largest number of rows the worker takes in one message.
    pub(super) max_rows: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Generations whose experts the worker has loaded and proved. A session holds two at most; 0 stands for none.
    ready: [AtomicU64; 2],
    wants_hints: AtomicBool,
    /// Is about to leave: serves, but nothing new is given to it.
    leaving: AtomicBool,
    /// Owes an answer for longer than is usual, until it answers anything.
    suspect: AtomicBool,
    /// Wakes whoever asks the worker by other means whether it is alive.
    doubt: Notify,
    /// How long it usually takes for a row, microseconds; 0 while that is not known.
    usual_us: AtomicU64,
    /// When it last answered that question.
    vouched: Mutex<Option<Instant>>,
    /// Experts that it is to prove, because another worker computed something else.
    contested: Mutex<BTreeSet<(u32, u32)>>,
    outlet: Mutex<Option<Outlet>>,
    /// Set by the step thread to end a session.
    give_up: Mutex<Option<(CancellationToken, Arc<Mutex<String>>)>>,
    pub(super) counters: LinkCounters,
}

impl Lane {
    /// Whether the worker takes work of a generation now.
    pub(super) fn serves(&self, generation: u64) -> bool {
        generation != 0 && self.ready.iter().any(|g| g.load(Ordering::Acquire) == generation)
    }

    /// How long the worker usually takes for a row, as far as that is known.
    pub(super) fn usual(&self) -> Duration {
        Duration::from_micros(self.usual_us.load(Ordering::Relaxed))
    }

    pub(super) fn set_usual(&self, usual: Duration) {
        let us = u64::try_from(usual.as_micros()).unwrap_or(u64::MAX);
        self.usual_us.store(us, Ordering::Relaxed);
    }

    /// Whether the worker takes hints now.
    pub(super) fn wants_hints(&self) -> bool {
        self.wants_hints.load(Ordering::Acquire)
    }

    pub(super) fn set_wants_hints(&self, wants: bool) {
        self.wants_hints.store(wants, Ordering::Release);
    }

    /// Whether the worker is about to leave.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    pub(super) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::Release);
    }

    pub(super) fn outlet(&self) -> Option<Outlet> {
        lock(&self.outlet).clone()
    }

    /// Opens the way to a session for these generations, or changes the generations.
    pub(super) fn open(&self, outlet: &Outlet, ready: [u64; 2]) {
        let mut open = lock(&self.outlet);
        if open.as_ref().is_none_or(|open| open.session != outlet.session) {
            *open = Some(outlet.clone());
        }
        for (slot, generation) in self.ready.iter().zip(ready) {
            slot.store(generation, Ordering::Release);
        }
    }

    /// Lets no more work through.
    pub(super) fn shut(&self) {
        let mut outlet = lock(&self.outlet);
        self.ready.iter().for_each(|slot| slot.store(0, Ordering::Release));
        *outlet = None;
        self.set_wants_hints(false);
        self.suspect.store(false, Ordering::Release);
    }

    /// Ends the current session for a reason; a new one begins.
    pub(super) fn give_up(&self, reason: &str) {
        self.shut();
        if let Some((token, why)) = lock(&self.give_up).take() {
            reason.clone_into(&mut lock(&why));
            token.cancel();
        }
    }

    /// What a new session listens to.
    pub(super) fn arm(&self) -> (CancellationToken, Arc<Mutex<String>>) {
        let fresh = (CancellationToken::new(), Arc::new(Mutex::new(String::new())));
        *lock(&self.give_up) = Some(fresh.clone());
        self.suspect.store(false, Ordering::Release);
        *lock(&self.vouched) = None;
        lock(&self.contested).clear();
        fresh
    }

    /// Another worker computed something else with this expert.
    pub(super) fn contest(&self, layer: u32, expert: u32) {
        lock(&self.contested).insert((layer, expert));
    }

    /// Whether an expert was contested; it is not any more.
    pub(super) fn take_contested(&self, layer: u32, expert: u32) -> bool {
        lock(&self.contested).remove(&(layer, expert))
    }

    /// The worker is late: others are preferred, and it is asked whether it is alive.
    pub(super) fn suspect(&self) {
        self.suspect.store(true, Ordering::Release);
        self.doubt();
    }

    pub(super) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Acquire)
    }

    /// The worker has answered something. Whether it was suspect until now.
    pub(super) fn absolve(&self) -> bool {
        self.suspect.load(Ordering::Acquire) && self.suspect.swap(false, Ordering::AcqRel)
    }

    /// Has the worker asked whether it is alive.
    pub(super) fn doubt(&self) {
        self.doubt.notify_one();
    }

    /// Waits for [`Self::doubt`].
    pub(super) async fn doubted(&self) {
        self.doubt.notified().await;
    }

    /// The worker has answered that it is alive.
    pub(super) fn vouch(&self, now: Instant) {
        *lock(&self.vouched) = Some(now);
    }

    /// When the worker last answered that it is alive, in this session.
    pub(super) fn vouched(&self) -> Option<Instant> {
        *lock(&self.vouched)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
