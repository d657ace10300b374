//! The way to one worker: connects, runs a session, and tries again when it ends.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use crossbeam_channel::Sender;
use shimmer_proto::{
    address::PeerAddress,
    backoff::Backoff,
    expert::v1::{ExpertResult, SessionRequest, WorkerError},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    ClusterModel, RemoteConfig,
    board::Board,
    session::{Ending, Session},
    status::LinkState,
};

/// Messages that may wait for a connection; more means that it does not drain.
pub(super) const QUEUE: usize = 1024;

/// What a link tells the step thread.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) worker: usize,
    /// Which session of the worker this is about.
    pub(super) session: u64,
    pub(super) news: News,
}

/// See [`Event`].
#[derive(Debug)]
pub(super) enum News {
    /// An answer to work; its checksum has been checked.
    Reply(Box<Result<ExpertResult, WorkerError>>),
    /// The session has ended, with everything that was out.
    Lost(String),
}

/// Counters of one link.
#[derive(Debug, Default)]
pub(super) struct LinkCounters {
    pub(super) connects: AtomicU64,
    pub(super) losses: AtomicU64,
    pub(super) refusals: AtomicU64,
    pub(super) corrupt_frames: AtomicU64,
    pub(super) unreadable_frames: AtomicU64,
}

/// The step thread's handle to a session that takes work.
#[derive(Debug, Clone)]
pub(super) struct Outlet {
    pub(super) session: u64,
    pub(super) requests: mpsc::Sender<SessionRequest>,
    /// Largest number of rows the worker takes in one message.
    pub(super) max_rows: u32,
    /// Whether the worker takes hints.
    pub(super) wants_hints: bool,
}

/// What a link and the step thread share.
#[derive(Debug, Default)]
pub(super) struct Lane {
    serving: AtomicBool,
    wants_hints: AtomicBool,
    outlet: Mutex<Option<Outlet>>,
    /// Set by the step thread to end a session that missed a deadline.
    give_up: Mutex<Option<(CancellationToken, Arc<Mutex<String>>)>>,
    pub(super) counters: LinkCounters,
}

impl Lane {
    /// Whether the worker takes work now.
    pub(super) fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Acquire)
    }

    /// Whether the worker takes work now, and hints.
    pub(super) fn wants_hints(&self) -> bool {
        self.wants_hints.load(Ordering::Acquire)
    }

    pub(super) fn outlet(&self) -> Option<Outlet> {
        self.outlet.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn open(&self, outlet: Outlet) {
        self.wants_hints.store(outlet.wants_hints, Ordering::Release);
        *self.outlet.lock().unwrap_or_else(PoisonError::into_inner) = Some(outlet);
        self.serving.store(true, Ordering::Release);
    }

    pub(super) fn shut(&self) {
        self.serving.store(false, Ordering::Release);
        self.wants_hints.store(false, Ordering::Release);
        *self.outlet.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Ends the current session for a reason; a new one begins.
    pub(super) fn give_up(&self, reason: &str) {
        self.shut();
        if let Some((token, why)) =
            self.give_up.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            reason.clone_into(&mut why.lock().unwrap_or_else(PoisonError::into_inner));
            token.cancel();
        }
    }

    /// What a new session listens to.
    pub(super) fn arm(&self) -> (CancellationToken, Arc<Mutex<String>>) {
        let fresh = (CancellationToken::new(), Arc::new(Mutex::new(String::new())));
        *self.give_up.lock().unwrap_or_else(PoisonError::into_inner) = Some(fresh.clone());
        fresh
    }
}

/// What one link needs.
pub(super) struct Link {
    pub(super) worker: usize,
    pub(super) address: PeerAddress,
    pub(super) epoch: u64,
    pub(super) config: Arc<RemoteConfig>,
    pub(super) model: Arc<ClusterModel>,
    pub(super) board: Arc<Board>,
    pub(super) lane: Arc<Lane>,
    pub(super) events: Sender<Event>,
    pub(super) shutdown: CancellationToken,
}

/// Starts a thread that carries some links. They share a thread because one wake-up then serves several workers: on a
/// host with few cores that is what a round trip costs.
pub(super) fn start(index: usize, links: Vec<Link>) -> std::io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let carry = async move {
        let mut tasks: JoinSet<()> = links.into_iter().map(Link::run).collect();
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a link failed");
            }
        }
    };
    std::thread::Builder::new()
        .name(format!("links-{index}"))
        .spawn(move || runtime.block_on(carry))
}

impl Link {
    async fn run(self) {
        let Self { worker, ref config, .. } = self;
        let seed = self.epoch ^ (worker as u64).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let mut waits = Backoff::new(config.backoff_min, config.backoff_max, seed);
        let mut refused = Backoff::new(config.refused_retry, config.refused_retry, seed);
        let mut number = 0;
        while !self.shutdown.is_cancelled() {
            number += 1;
            let mut session = Session::new(&self, number);
            let ending = tokio::select! {
                ending = session.run() => ending,
                () = self.shutdown.cancelled() => break,
            };
            if session.served() {
                waits.succeed();
            }
            drop(session);
            let wait = self.ended(number, ending, &mut waits, &mut refused);
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.shutdown.cancelled() => {}
            }
        }
        self.lane.shut();
    }

    /// Tells everybody how a session ended; the wait before the next one.
    fn ended(
        &self,
        session: u64,
        ending: Ending,
        waits: &mut Backoff,
        refused: &mut Backoff,
    ) -> Duration {
        self.lane.shut();
        let worker = self.worker;
        let name = self.board.name(worker);
        let (state, detail, wait) = match ending {
            Ending::Unreachable(detail) => {
                tracing::debug!(name, detail, "not reachable");
                let (state, _) = self.board.told(worker);
                let state = if state == LinkState::Lost { state } else { LinkState::Connecting };
                (state, detail, waits.fail())
            }
            Ending::Lost(detail) => {
                self.lane.counters.losses.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(name, detail, "worker lost");
                (LinkState::Lost, detail, waits.fail())
            }
            Ending::Refused(detail) => {
                self.lane.counters.refusals.fetch_add(1, Ordering::Relaxed);
                tracing::error!(name, detail, "worker refused");
                (LinkState::Refused, detail, refused.fail())
            }
        };
        self.board.tell(worker, state, detail.clone());
        self.board.tell_resident(worker, 0, 0);
        // The step thread may be gone, or so far behind that it will time out by itself.
        let news = News::Lost(format!("{name}: {detail}"));
        if self.events.try_send(Event { worker, session, news }).is_err() {
            tracing::debug!(name, "nobody waits for this worker");
        }
        wait
    }

    /// Follows the placement.
    pub(super) fn plan(&self) -> watch::Receiver<Option<super::board::Plan>> {
        self.board.plan()
    }
}
