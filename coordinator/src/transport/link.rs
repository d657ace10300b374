//! The way to one worker: connects, runs a session, and tries again when it ends.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::Duration,
};

use crossbeam_channel::Sender;
use shimmer_proto::{
    address::PeerAddress,
    backoff::Backoff,
    expert::v1::{ExpertResult, WorkerError},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    ClusterModel, RemoteConfig,
    board::{Board, NewSeat, Orders},
    lane::Lane,
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

/// What every link needs.
#[derive(Debug, Clone)]
pub(super) struct Ground {
    pub(super) epoch: u64,
    pub(super) config: Arc<RemoteConfig>,
    pub(super) model: Arc<ClusterModel>,
    pub(super) board: Arc<Board>,
    pub(super) events: Sender<Event>,
    pub(super) shutdown: CancellationToken,
}

/// One link.
pub(super) struct Link {
    pub(super) worker: usize,
    pub(super) epoch: u64,
    pub(super) config: Arc<RemoteConfig>,
    pub(super) model: Arc<ClusterModel>,
    pub(super) board: Arc<Board>,
    pub(super) lane: Arc<Lane>,
    pub(super) events: Sender<Event>,
    shutdown: CancellationToken,
    orders: watch::Receiver<Orders>,
}

/// The threads that carry links. Links share a thread because one wake-up then serves several workers: on a host with few
/// cores that is what a round trip costs.
#[derive(Debug)]
pub(super) struct Carriers {
    ground: Ground,
    queues: Vec<mpsc::UnboundedSender<Link>>,
}

impl Carriers {
    /// Starts the threads; they end at shutdown.
    pub(super) fn start(ground: Ground) -> io::Result<(Self, Vec<JoinHandle<()>>)> {
        let (mut queues, mut threads) = (Vec::new(), Vec::new());
        for index in 0..ground.config.io_threads.max(1) {
            // As many as there are seats, at most.
            let (queue, links) = mpsc::unbounded_channel();
            queues.push(queue);
            let shutdown = ground.shutdown.clone();
            let stage = &ground.config.stage;
            threads.extend(stage.run(format!("links-{index}"), || carry(links, shutdown))?);
        }
        Ok((Self { ground, queues }, threads))
    }

    /// Gives seats their links.
    pub(super) fn take(&self, seats: Vec<NewSeat>) {
        for NewSeat { worker, lane, orders } in seats {
            let Ground { epoch, config, model, board, events, shutdown } = self.ground.clone();
            let link = Link { worker, epoch, config, model, board, lane, events, shutdown, orders };
            if self.queues[worker % self.queues.len()].send(link).is_err() {
                tracing::debug!(worker, "no link any more: shutting down");
            }
        }
    }
}

async fn carry(mut links: mpsc::UnboundedReceiver<Link>, shutdown: CancellationToken) {
    let mut tasks: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            Some(link) = links.recv() => {
                tasks.spawn(link.run());
            }
            Some(ended) = tasks.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a link failed");
                }
            }
            () = shutdown.cancelled() => break,
        }
    }
    // They see the shutdown themselves.
    while tasks.join_next().await.is_some() {}
}

/// Why a connection is given up before it ends by itself.
enum Interrupt {
    Held(LinkState, String),
    Moved(Orders),
    Shutdown,
}

impl Link {
    async fn run(mut self) {
        let Self { worker, ref config, .. } = self;
        let seed = self.epoch ^ (worker as u64).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let mut waits = Backoff::new(config.backoff_min, config.backoff_max, seed);
        let mut refused = Backoff::new(config.refused_retry, config.refused_retry, seed);
        let mut number = 0;
        while let Some((address, orders)) = self.called().await {
            number += 1;
            let mut session = Session::new(&self, &address, number);
            let ending = tokio::select! {
                // Of two reasons that come at once always the same is told.
                biased;
                ending = session.run() => Ok(ending),
                interrupt = interrupted(self.orders.clone(), &orders, &self.shutdown) => Err(interrupt),
            };
            if session.served() {
                waits.succeed();
            }
            drop(session);
            let wait = match ending {
                Ok(ending) => self.ended(number, ending, &mut waits, &mut refused),
                // A worker of a list gives no sign when it is back.
                Err(Interrupt::Held(state @ LinkState::Lost, detail)) => {
                    tracing::info!(name = self.board.name(worker), detail, "worker left");
                    self.over(number, state, &detail);
                    waits.fail()
                }
                Err(Interrupt::Held(state, detail)) => {
                    self.over(number, state, &detail);
                    // Whoever said goodbye is not called back at once.
                    refused.fail()
                }
                Err(Interrupt::Moved(to)) => {
                    let to = to.address.map(|to| to.to_string()).unwrap_or_default();
                    self.lost(number, &format!("the worker has moved to {to}"));
                    Duration::ZERO
                }
                Err(Interrupt::Shutdown) => break,
            };
            let mut follow = self.orders.clone();
            tokio::select! {
                biased;
                () = tokio::time::sleep(wait) => {}
                _ = follow.wait_for(|now| now.is_news(&orders)) => {}
                () = self.shutdown.cancelled() => {}
            }
        }
        self.lane.shut();
    }

    /// Waits until there is to be a connection; where to. None at shutdown.
    async fn called(&mut self) -> Option<(PeerAddress, Orders)> {
        let wanted = |orders: &Orders| orders.address.is_some() && orders.hold.is_none();
        // Not borrowed while the board is told: it may have other orders for this seat.
        let hold = self.orders.borrow().hold.clone();
        if let Some((state, detail)) = hold {
            self.board.tell(self.worker, state, detail);
        }
        let orders = tokio::select! {
            biased;
            // The seat lives as long as the board, which this holds.
            orders = self.orders.wait_for(wanted) => orders.ok()?.clone(),
            () = self.shutdown.cancelled() => return None,
        };
        (!self.shutdown.is_cancelled()).then(|| Some((orders.address.clone()?, orders)))?
    }

    /// Tells everybody how a session ended; the wait before the next one.
    fn ended(
        &self,
        session: u64,
        ending: Ending,
        waits: &mut Backoff,
        refused: &mut Backoff,
    ) -> Duration {
        match ending {
            Ending::Unreachable(detail) => {
                tracing::debug!(name = self.board.name(self.worker), detail, "not reachable");
                let (state, _) = self.board.told(self.worker);
                let state = if state == LinkState::Lost { state } else { LinkState::Connecting };
                self.over(session, state, &detail);
                waits.fail()
            }
            Ending::Lost(detail) => {
                self.lost(session, &detail);
                waits.fail()
            }
            Ending::Refused(detail) => {
                self.lane.counters.refusals.fetch_add(1, Ordering::Relaxed);
                tracing::error!(name = self.board.name(self.worker), detail, "worker refused");
                self.over(session, LinkState::Refused, &detail);
                refused.fail()
            }
        }
    }

    fn lost(&self, session: u64, detail: &str) {
        self.lane.counters.losses.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(name = self.board.name(self.worker), detail, "worker lost");
        self.over(session, LinkState::Lost, detail);
    }

    fn over(&self, session: u64, state: LinkState, detail: &str) {
        self.lane.shut();
        let (worker, name) = (self.worker, self.board.name(self.worker));
        self.board.tell_ended(worker, state, detail);
        // The step thread may be gone, or so far behind that it will time out by itself.
        let news = News::Lost(format!("{name}: {detail}"));
        if self.events.try_send(Event { worker, session, news }).is_err() {
            tracing::debug!(name, "nobody waits for this worker");
        }
    }
}

/// Waits for a reason to end a connection that was made by these orders.
async fn interrupted(
    mut orders: watch::Receiver<Orders>,
    from: &Orders,
    shutdown: &CancellationToken,
) -> Interrupt {
    let ends = |now: &Orders| now.hold.is_some() || now.address != from.address;
    tokio::select! {
        biased;
        changed = orders.wait_for(ends) => match changed.map(|now| now.clone()) {
            Ok(Orders { hold: Some((state, detail)), .. }) => Interrupt::Held(state, detail),
            Ok(now) => Interrupt::Moved(now),
            Err(_) => Interrupt::Shutdown,
        },
        () = shutdown.cancelled() => Interrupt::Shutdown,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shimmer_proto::{
        expert::v1::Identity,
        membership::{
            Entry, Snapshot,
            records::{WORKERS, WorkerRecord},
        },
    };

    use super::*;
    use crate::transport::stage::Stage;

    /// A link to a worker that the membership store names.
    fn link() -> Link {
        let model = Arc::new(ClusterModel {
            identity: Identity::default(),
            row_bytes: 1,
            hidden: 1,
            layers: Vec::new(),
        });
        let board = Arc::new(Board::new(&model, &[], false, Duration::ZERO, Stage::default()));
        let record = WorkerRecord {
            address: "a:1".to_owned(),
            host: String::new(),
            weight: 1.0,
            ram_budget_bytes: 0,
            absent_layers: Vec::new(),
            container_digest: String::new(),
            incarnation: 1,
            draining: false,
        };
        let value = serde_json::to_string(&record).unwrap();
        let entry = Entry { value, ..Entry::default() };
        let entries = BTreeMap::from([(format!("{WORKERS}a"), entry)]);
        let NewSeat { worker, lane, orders } =
            board.follow(&Snapshot { entries, ..Snapshot::default() }).pop().unwrap();
        Link {
            worker,
            epoch: 1,
            config: Arc::default(),
            model,
            board,
            lane,
            events: crossbeam_channel::bounded(1).0,
            shutdown: CancellationToken::new(),
            orders,
        }
    }

    #[test]
    fn a_link_that_is_held_says_so_and_keeps_nobody_waiting() {
        let mut link = link();
        let board = Arc::clone(&link.board);
        board.quarantine(link.worker, "it lied");
        let (said, told) = std::sync::mpsc::channel();
        // On a thread of its own: one that holds what it waits for would stand still for ever.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = link.called() => panic!("it is held"),
                    () = std::future::ready(()) => {}
                }
            });
            said.send(link.board.told(link.worker)).unwrap();
        });
        let told = told.recv_timeout(Duration::from_secs(60)).expect("the link waits for itself");
        assert_eq!(told, (LinkState::Quarantined, "it lied".to_owned()));
    }
}
