//! Loads of one session's assignments, beside everything else that its stream does.
//!
//! One runs at a time, on a thread of its own. There are never more than the session holds assignments: whatever a
//! coordinator asks for, it costs no second thread.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use shimmer_proto::expert::v1::AssignProgress;
use tokio::{
    sync::oneshot,
    time::{Interval, MissedTickBehavior, interval},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::beside::Beside;
use crate::{
    session::{Loaded, Loading},
    store::LoadProgress,
};

/// How often the progress of a load is told.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// See above.
#[derive(Debug, Default)]
pub(super) struct Loads {
    running: Option<Running>,
    waiting: VecDeque<Loading>,
}

#[derive(Debug)]
struct Running {
    number: u64,
    progress: Arc<Progress>,
    told: u64,
    total: u64,
    tick: Interval,
    done: oneshot::Receiver<Loaded>,
    /// Gives the load up when the stream ends.
    _cancel: DropGuard,
}

#[derive(Debug)]
struct Progress {
    experts: AtomicU64,
    bytes: AtomicU64,
    cancel: CancellationToken,
}

impl LoadProgress for Progress {
    fn loaded(&self, bytes: u64) {
        self.experts.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

/// What has come of a load.
#[derive(Debug)]
pub(super) enum News {
    Progress(AssignProgress),
    Ended(Loaded),
    /// Its thread died.
    Aborted(u64),
}

impl Loads {
    /// Adds a load; it begins when the others have ended.
    pub(super) fn add(&mut self, loading: Loading) {
        self.waiting.push_back(loading);
    }

    /// Gives up what is not held any more. One that runs ends soon, and is heard of before the next one begins.
    pub(super) fn keep(&mut self, held: impl Fn(u64) -> bool) {
        self.waiting.retain(|loading| held(loading.number()));
        if let Some(running) = &self.running
            && !held(running.number)
        {
            running.progress.cancel.cancel();
        }
    }

    /// Begins the next load if none runs.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn start(&mut self, beside: Beside) -> io::Result<()> {
        if self.running.is_some() {
            return Ok(());
        }
        let Some(loading) = self.waiting.pop_front() else { return Ok(()) };
        let cancel = CancellationToken::new();
        let (experts, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let progress = Arc::new(Progress { experts, bytes, cancel: cancel.clone() });
        let (number, total) = (loading.number(), loading.experts());
        let (ended, done) = oneshot::channel();
        let seen = Arc::clone(&progress);
        // The stream may be gone; the experts stay for the next one.
        let load = move || drop(ended.send(loading.run(&*seen)));
        beside.start("load", load)?;
        let mut tick = interval(PROGRESS_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tick.reset();
        let _cancel = cancel.drop_guard();
        self.running = Some(Running { number, progress, told: 0, total, tick, done, _cancel });
        Ok(())
    }

    /// The end of the load that runs, or how far it has got since that was last told. Waits for ever while none runs;
    /// dropping the future loses nothing.
    pub(super) async fn news(&mut self) -> News {
        let Some(running) = &mut self.running else { return std::future::pending().await };
        loop {
            tokio::select! {
                biased;
                ended = &mut running.done => {
                    let number = running.number;
                    self.running = None;
                    return ended.map_or(News::Aborted(number), News::Ended);
                }
                _ = running.tick.tick() => {
                    let loaded_experts = running.progress.experts.load(Relaxed);
                    if loaded_experts != running.told {
                        running.told = loaded_experts;
                        let loaded_bytes = running.progress.bytes.load(Relaxed);
                        let total_experts = running.total;
                        return News::Progress(AssignProgress { loaded_experts, total_experts, loaded_bytes });
                    }
                }
            }
        }
    }
}
