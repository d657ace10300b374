//! The step thread's end of the links.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use shimmer_proto::{
    checksum,
    expert::v1::{ExpertWork, Fence, PrefetchHint, SessionRequest, session_request::Body},
    limits,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    ClusterModel, RemoteConfig, RemoteError,
    board::{Board, Plan},
    counters::{RemoteCounters, RemoteObserver},
    latency::LatencyTracker,
    link::{self, Event, Lane, Link, News},
    status::ClusterStatus,
};
use crate::{
    dispatch::{ExpertTransport, PartLimits, Reply, Standing, TransportError, WorkerInfo},
    fence::{Dropped, Ledger, Verdict},
};

/// Events that may wait for the step thread.
const EVENTS: usize = 1 << 14;

/// Workers behind sockets, as the step thread sees them.
pub struct RemoteWorkers {
    infos: Vec<WorkerInfo>,
    model: Arc<ClusterModel>,
    board: Arc<Board>,
    epoch: u64,
    peers: Vec<Peer>,
    events: Receiver<Event>,
    ledger: Ledger,
    /// The ledger's count, for observers.
    dropped: Arc<Mutex<Dropped>>,
    plans: watch::Receiver<Option<Plan>>,
    /// The placement of this step.
    in_force: Option<Plan>,
    shutdown: CancellationToken,
    threads: Vec<JoinHandle<()>>,
}

struct Peer {
    lane: Arc<Lane>,
    latency: LatencyTracker,
    /// Work that is out, oldest first. A worker answers in order.
    out: VecDeque<Out>,
    /// The session that the work went to.
    session: u64,
    /// When the worker last answered: it may take its time for each message, not for the queue before it.
    answered: Instant,
}

struct Out {
    fence: Fence,
    rows: u32,
    sent: Instant,
    limit: Duration,
}

impl Peer {
    /// When the oldest work that is out becomes overdue.
    fn due(&self) -> Option<Instant> {
        let oldest = self.out.front()?;
        Some(oldest.sent.max(self.answered) + oldest.limit)
    }
}

impl RemoteWorkers {
    /// Starts the links and returns at once; [`Self::status`] tells when the cluster is complete.
    pub fn start(config: RemoteConfig, model: ClusterModel) -> Result<Self, RemoteError> {
        if config.addresses.is_empty() {
            return Err(RemoteError::NoWorkers);
        }
        for (index, address) in config.addresses.iter().enumerate() {
            if config.addresses[..index].contains(address) {
                return Err(RemoteError::RepeatedWorker { address: address.clone() });
            }
        }
        // Later than every earlier coordinator of this cluster, as far as clocks go; workers only compare for equality.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let (config, model) = (Arc::new(config), Arc::new(model));
        let board = Arc::new(Board::new(&config.addresses, &model));
        let (sender, events) = crossbeam_channel::bounded(EVENTS);
        let shutdown = CancellationToken::new();
        let mut remote = Self {
            infos: config
                .addresses
                .iter()
                .map(|address| WorkerInfo { id: address.to_string() })
                .collect(),
            plans: board.plan(),
            in_force: None,
            model: Arc::clone(&model),
            board: Arc::clone(&board),
            epoch,
            peers: Vec::new(),
            events,
            ledger: Ledger::new(),
            dropped: Arc::default(),
            shutdown,
            threads: Vec::new(),
        };
        let carriers = config.io_threads.clamp(1, config.addresses.len());
        let mut carried: Vec<Vec<Link>> = (0..carriers).map(|_| Vec::new()).collect();
        for (worker, address) in config.addresses.iter().enumerate() {
            let lane = Arc::<Lane>::default();
            let link = Link {
                worker,
                address: address.clone(),
                epoch,
                config: Arc::clone(&config),
                model: Arc::clone(&model),
                board: Arc::clone(&board),
                lane: Arc::clone(&lane),
                events: sender.clone(),
                shutdown: remote.shutdown.clone(),
            };
            carried[worker % carriers].push(link);
            remote.peers.push(Peer {
                lane,
                latency: LatencyTracker::new(config.layer_floor, config.layer_ceiling),
                out: VecDeque::new(),
                session: 0,
                answered: Instant::now(),
            });
        }
        for (index, links) in carried.into_iter().enumerate() {
            remote.threads.push(link::start(index, links)?);
        }
        Ok(remote)
    }

    /// Follows the state of the workers.
    pub fn status(&self) -> watch::Receiver<ClusterStatus> {
        self.board.status()
    }

    /// What has been counted so far.
    pub fn counters(&self) -> RemoteCounters {
        self.observer().counters()
    }

    /// Reads the counters from elsewhere, also after the step thread has taken this.
    pub fn observer(&self) -> RemoteObserver {
        RemoteObserver {
            lanes: self.peers.iter().map(|peer| Arc::clone(&peer.lane)).collect(),
            dropped: Arc::clone(&self.dropped),
        }
    }

    fn lost(&mut self, worker: usize, detail: String) -> TransportError {
        self.ledger.forget(worker);
        self.peers[worker].out.clear();
        TransportError::Lost { worker, detail }
    }

    /// The first worker whose oldest work is overdue, and when the next one will be.
    fn overdue(&self, now: Instant) -> (Option<usize>, Option<Instant>) {
        let mut next: Option<Instant> = None;
        for (worker, peer) in self.peers.iter().enumerate() {
            match peer.due() {
                Some(due) if due <= now => return (Some(worker), next),
                Some(due) => next = Some(next.map_or(due, |n| n.min(due))),
                None => {}
            }
        }
        (None, next)
    }

    /// What an event means for the step; none if it concerns nothing that is awaited.
    fn take(&mut self, event: Event) -> Option<Result<Reply, TransportError>> {
        let Event { worker, session, news } = event;
        let peer = &mut self.peers[worker];
        let current = session == peer.session && !peer.out.is_empty();
        match news {
            News::Lost(detail) => current.then(|| Err(self.lost(worker, detail))),
            News::Reply(outcome) => {
                let fence = match &*outcome {
                    Ok(result) => result.fence,
                    Err(error) => error.fence,
                };
                if self.ledger.settle(worker, fence.as_ref()) != Verdict::Accept {
                    *self.dropped.lock().unwrap_or_else(PoisonError::into_inner) =
                        self.ledger.dropped();
                    tracing::debug!(worker, ?fence, "dropped a reply that nothing waits for");
                    return None;
                }
                peer.answered = Instant::now();
                if let Some(place) =
                    peer.out.iter().position(|out| Some(out.fence.part) == fence.map(|f| f.part))
                {
                    let out = peer.out.remove(place).expect("the place was found");
                    peer.latency.record(out.rows, out.sent.elapsed());
                }
                Some(Ok(Reply { worker, outcome: *outcome }))
            }
        }
    }
}

impl ExpertTransport for RemoteWorkers {
    fn workers(&self) -> &[WorkerInfo] {
        &self.infos
    }

    fn between_steps(&mut self) {
        if self.in_force.is_none() || self.plans.has_changed().unwrap_or(false) {
            self.in_force.clone_from(&self.plans.borrow_and_update());
        }
    }

    fn copies(&self, layer: u32, expert: u32) -> &[usize] {
        self.in_force.as_ref().map_or(&[], |plan| plan.placement.copies(layer, expert))
    }

    fn standing(&self, worker: usize) -> Standing {
        if self.peers[worker].lane.is_serving() { Standing::Serving } else { Standing::Away }
    }

    fn fence_base(&self) -> (u64, u64) {
        (self.epoch, self.in_force.as_ref().map_or(0, |plan| plan.generation))
    }

    fn limits(&self, worker: usize) -> PartLimits {
        let peer_rows = self.peers[worker]
            .lane
            .outlet()
            .map_or(limits::MAX_PART_ROWS, |outlet| outlet.max_rows);
        PartLimits {
            max_rows: limits::part_rows(self.model.row_bytes, self.model.hidden, peer_rows),
            max_bytes: limits::PART_BYTES,
        }
    }

    fn send(&mut self, worker: usize, mut work: ExpertWork) -> Result<(), TransportError> {
        let Some(outlet) = self.peers[worker].lane.outlet() else {
            let (state, detail) = self.board.told(worker);
            let detail = format!("{} is {}: {detail}", self.board.name(worker), state.name());
            return Err(self.lost(worker, detail));
        };
        if let Err(error) = self.ledger.expect(worker, work.fence.as_ref()) {
            return Err(self.lost(worker, error.to_string()));
        }
        let fence = work.fence.expect("the ledger took the fence");
        for peer in &mut self.peers {
            // What an earlier place left behind is not awaited any more.
            let place = (fence.epoch, fence.generation, fence.step, fence.layer);
            peer.out.retain(|out| {
                (out.fence.epoch, out.fence.generation, out.fence.step, out.fence.layer) == place
            });
        }
        let peer = &mut self.peers[worker];
        let (rows, now) = (work.row_count, Instant::now());
        let limit = peer.latency.deadline(rows);
        work.deadline_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        checksum::seal_work(&mut work);
        peer.session = outlet.session;
        peer.out.push_back(Out { fence, rows, sent: now, limit });
        let queued = outlet.requests.try_send(SessionRequest { body: Some(Body::Work(work)) });
        if queued.is_err() {
            let detail =
                format!("{}: the connection does not take more work", self.board.name(worker));
            self.peers[worker].lane.give_up(&detail);
            return Err(self.lost(worker, detail));
        }
        Ok(())
    }

    fn wants_hints(&self, worker: usize) -> bool {
        self.peers[worker].lane.wants_hints()
    }

    fn hint(&mut self, worker: usize, mut hint: PrefetchHint) {
        let Some(outlet) = self.peers[worker].lane.outlet() else { return };
        checksum::seal_hint(&mut hint);
        // A queue that is full will be seen by the work behind it.
        drop(outlet.requests.try_send(SessionRequest { body: Some(Body::Hint(hint)) }));
    }

    fn receive(&mut self, deadline: Instant) -> Result<Reply, TransportError> {
        loop {
            let now = Instant::now();
            let (overdue, next) = self.overdue(now);
            let until = if overdue.is_some() {
                now
            } else {
                next.map_or(deadline, |next| next.min(deadline))
            };
            match self.events.recv_deadline(until) {
                Ok(event) => {
                    if let Some(outcome) = self.take(event) {
                        return outcome;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(TransportError::Closed),
                Err(RecvTimeoutError::Timeout) => {
                    if let (Some(worker), _) = self.overdue(Instant::now()) {
                        let out = self.peers[worker]
                            .out
                            .front()
                            .expect("an overdue worker owes something");
                        let Out { fence, limit, .. } = out;
                        let late = limit.as_millis();
                        let what = format!(
                            "no answer for layer {} of step {} within {late} ms",
                            fence.layer, fence.step
                        );
                        let detail = format!("{}: {what}", self.board.name(worker));
                        self.peers[worker].lane.give_up(&what);
                        return Err(self.lost(worker, detail));
                    }
                    if Instant::now() >= deadline {
                        return Err(TransportError::Timeout);
                    }
                }
            }
        }
    }

    fn give_up(&mut self, worker: usize, reason: &str) {
        self.peers[worker].lane.give_up(reason);
        self.ledger.forget(worker);
        self.peers[worker].out.clear();
    }
}

impl Drop for RemoteWorkers {
    fn drop(&mut self) {
        self.shutdown.cancel();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("the thread of a link panicked");
            }
        }
    }
}

impl fmt::Debug for RemoteWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteWorkers")
            .field("workers", &self.infos)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}
