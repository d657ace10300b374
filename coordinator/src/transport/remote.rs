//! The step thread's end of the links.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use shimmer_proto::{
    checksum,
    expert::v1::{
        Adopt, ErrorCode, ExpertResult, ExpertWork, LayerExperts, PrefetchHint, SelfTest,
        SessionRequest, WorkerError, session_request::Body,
    },
    limits,
    membership::{MembershipStore, records::HeatRecord},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    ClusterModel, OwnExperts, RemoteConfig, RemoteError,
    board::{Board, Member},
    control,
    counters::{RemoteCounters, RemoteObserver},
    handle::ClusterHandle,
    heat::HeatKeeper,
    lane::LinkCounters,
    link::{Carriers, Event, Ground, News},
    pace::usual_among,
    peer::{Due, Out, Peer},
    plans::{Plan, Plans},
    status::ClusterStatus,
};
use crate::{
    dispatch::{ExpertTransport, Pace, PartLimits, Reply, Standing, TransportError, WorkerInfo},
    fence::{Dropped, Ledger, Verdict},
};

/// Events that may wait for the step thread.
const EVENTS: usize = 1 << 14;

/// Workers behind sockets, as the step thread sees them.
pub struct RemoteWorkers {
    infos: Vec<WorkerInfo>,
    config: Arc<RemoteConfig>,
    model: Arc<ClusterModel>,
    board: Arc<Board>,
    own: Option<Box<dyn OwnExperts>>,
    /// Layers of the own copy.
    own_layers: Vec<u32>,
    epoch: u64,
    peers: Vec<Peer>,
    /// Places that were given to another worker, and that nobody was told of yet.
    reseated: Vec<usize>,
    events: Receiver<Event>,
    ledger: Ledger,
    /// The ledger's count, for observers.
    dropped: Arc<Mutex<Dropped>>,
    plans: watch::Receiver<Plans>,
    roster: watch::Receiver<Vec<Member>>,
    /// The placement of this step.
    in_force: Option<Plan>,
    /// Whether requests are under way, as the board was told.
    running: bool,
    heat: HeatKeeper,
    handle: ClusterHandle,
    shutdown: CancellationToken,
    threads: Vec<JoinHandle<()>>,
}

impl RemoteWorkers {
    /// Starts the links to the workers of a membership store and returns at once; [`Self::status`] tells when every expert
    /// can be computed.
    pub fn start(
        config: RemoteConfig,
        model: ClusterModel,
        store: Arc<dyn MembershipStore>,
        own: Option<Box<dyn OwnExperts>>,
    ) -> Result<Self, RemoteError> {
        // Later than every earlier coordinator of this cluster, as far as clocks go; workers only compare for equality.
        let epoch = u64::try_from(config.stage.unix_time().as_nanos()).unwrap_or(u64::MAX);
        let (config, model) = (Arc::new(config), Arc::new(model));
        let own_layers = own.as_ref().map(|own| own.layers()).unwrap_or_default();
        let is_fixed = store.kind() == "static";
        let seats_kept = config.timings.replace_after;
        let board = Board::new(&model, &own_layers, is_fixed, seats_kept, config.stage.clone());
        let board = Arc::new(board);
        let (sender, events) = crossbeam_channel::bounded(EVENTS);
        let (heat, heated) = watch::channel(HeatRecord { layers: Vec::new() });
        let shutdown = CancellationToken::new();
        let ground = Ground {
            epoch,
            config: Arc::clone(&config),
            model: Arc::clone(&model),
            board: Arc::clone(&board),
            events: sender,
            shutdown: shutdown.clone(),
        };
        let (carriers, threads) = Carriers::start(ground.clone())?;
        let (handle, orders) = ClusterHandle::new(Arc::clone(&board), Arc::clone(&store));
        let mut remote = Self {
            handle,
            infos: Vec::new(),
            plans: board.plans(),
            roster: board.roster(),
            in_force: None,
            running: true,
            heat: HeatKeeper::new(&model, heat, config.stage.now()),
            config,
            model,
            board,
            own,
            own_layers,
            epoch,
            peers: Vec::new(),
            reseated: Vec::new(),
            events,
            ledger: Ledger::new(),
            dropped: Arc::default(),
            shutdown,
            threads,
        };
        // The seats of a static list are there from the start.
        carriers.take(remote.board.follow(&store.watch().borrow_and_update().clone()));
        remote.threads.extend(control::start(ground, store, carriers, heated, orders)?);
        remote.grow();
        Ok(remote)
    }

    /// Follows the state of the workers.
    pub fn status(&self) -> watch::Receiver<ClusterStatus> {
        self.board.status()
    }

    /// What operators may know and order, also after the step thread has taken this.
    pub fn handle(&self) -> ClusterHandle {
        self.handle.clone()
    }

    /// What has been counted so far.
    pub fn counters(&self) -> RemoteCounters {
        self.observer().counters()
    }

    /// Reads the counters from elsewhere, also after the step thread has taken this.
    pub fn observer(&self) -> RemoteObserver {
        RemoteObserver { roster: self.board.roster(), dropped: Arc::clone(&self.dropped) }
    }

    /// Gives workers that are new their places, and takes what is new about the others.
    fn grow(&mut self) {
        let roster = self.roster.borrow_and_update();
        for (index, member) in roster.iter().enumerate() {
            let info = WorkerInfo { id: member.name.clone() };
            if let (Some(peer), Some(known)) =
                (self.peers.get_mut(index), self.infos.get_mut(index))
            {
                *known = info;
                if peer.holder != member.holder {
                    // What the worker before owed and how fast it was says nothing about this one.
                    self.ledger.forget(index);
                    self.reseated.push(index);
                    *peer = Peer::new(member, &self.config);
                }
                peer.absent_layers = Arc::clone(&member.absent_layers);
                peer.weight = member.weight;
            } else {
                self.infos.push(info);
                self.peers.push(Peer::new(member, &self.config));
            }
        }
    }

    fn generation(&self) -> u64 {
        self.in_force.as_ref().map_or(0, |plan| plan.generation)
    }

    fn lost(&mut self, worker: usize, detail: String) -> TransportError {
        self.ledger.forget(worker);
        self.peers[worker].forget_work();
        TransportError::Lost { worker, detail }
    }

    /// What an event means for the step; none if it concerns nothing that is awaited.
    fn take(&mut self, event: Event) -> Option<Result<Reply, TransportError>> {
        let Event { worker, session, news } = event;
        // A worker that has no place yet owes nothing.
        let peer = self.peers.get_mut(worker)?;
        match news {
            News::Lost(detail) => peer.awaits(session).then(|| Err(self.lost(worker, detail))),
            News::Reply(outcome) => {
                // Also an answer that comes too late.
                peer.lane.absolve();
                let fence = match &*outcome {
                    Ok(result) => result.fence,
                    Err(error) => error.fence,
                };
                if self.ledger.settle(worker, fence.as_ref()) != Verdict::Accept {
                    let out = fence.and_then(|fence| self.peers[worker].stray(&fence));
                    self.observe(worker, out, Instant::now());
                    *self.dropped.lock().unwrap_or_else(PoisonError::into_inner) =
                        self.ledger.dropped();
                    tracing::debug!(worker, ?fence, "dropped a reply that nothing waits for");
                    return None;
                }
                let now = self.now();
                let peer = &mut self.peers[worker];
                if let Some(fence) = fence {
                    let out = peer.settled(fence.part, now);
                    if let Err(error) = &*outcome
                        && matches!(error.code(), ErrorCode::NotOwned | ErrorCode::Load)
                    {
                        // It may have refused what it was to adopt; that is said again the next time.
                        peer.forget_adopted(Some(fence.layer));
                    }
                    self.observe(worker, out, now);
                }
                Some(Ok(Reply { worker, outcome: *outcome }))
            }
        }
    }

    /// Learns from an answer how fast a worker is beside the others.
    fn observe(&mut self, worker: usize, out: Option<Out>, now: Instant) {
        let Some(out) = out else { return };
        let others = self
            .peers
            .iter()
            .enumerate()
            .filter(|(other, peer)| *other != worker && peer.lane.serves(out.fence.generation));
        let others = usual_among(others.map(|(_, peer)| peer.pace.ratio()));
        let peer = &mut self.peers[worker];
        if peer.pace.observe(out.rows, now.saturating_duration_since(out.sent), others) {
            let (id, ratio) = (&self.infos[worker].id, peer.pace.ratio());
            match peer.pace.pace() {
                Pace::Usual => tracing::info!(worker = id, "worker answers as usual again"),
                pace => {
                    LinkCounters::bump(&peer.lane.counters.slowed);
                    tracing::warn!(worker = id, ratio, ?pace, "worker has become slow");
                }
            }
        }
    }

    /// Asks workers that are late whether they are alive. The first worker that is overdue, or until when there is nothing
    /// to do.
    fn watch(&mut self, now: Instant) -> Result<Option<Instant>, (usize, Out)> {
        let mut next: Option<Instant> = None;
        for (worker, peer) in self.peers.iter_mut().enumerate() {
            let at = match peer.due(now, &self.config) {
                None => continue,
                Some(Due::Overdue(out)) => return Err((worker, out)),
                Some(Due::Doubt) => {
                    peer.doubt(now);
                    now + self.config.probe_interval
                }
                Some(Due::At(at)) => at,
            };
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        Ok(next)
    }

    fn overdue(&mut self, worker: usize, out: Out) -> TransportError {
        let waited = self.now().saturating_duration_since(out.sent).as_millis();
        let (layer, step) = (out.fence.layer, out.fence.step);
        let what = format!("no answer for layer {layer} of step {step} within {waited} ms");
        let detail = format!("{}: {what}", self.board.name(worker));
        self.peers[worker].lane.give_up(&what);
        self.lost(worker, detail)
    }

    /// Queues a message; the session that it went to.
    fn queue(&mut self, worker: usize, body: Body) -> Result<u64, TransportError> {
        let lane = Arc::clone(&self.peers[worker].lane);
        let Some(outlet) = lane.outlet().filter(|_| lane.serves(self.generation())) else {
            let (state, detail) = self.board.told(worker);
            let detail = format!("{} is {}: {detail}", self.board.name(worker), state.name());
            return Err(self.lost(worker, detail));
        };
        if outlet.requests.try_send(SessionRequest { body: Some(body) }).is_err() {
            let what = "the connection does not take more work";
            let detail = format!("{}: {what}", self.board.name(worker));
            lane.give_up(what);
            return Err(self.lost(worker, detail));
        }
        Ok(outlet.session)
    }
}

impl ExpertTransport for RemoteWorkers {
    fn workers(&self) -> &[WorkerInfo] {
        &self.infos
    }

    fn now(&self) -> Instant {
        self.config.stage.now()
    }

    fn between_steps(&mut self) {
        self.heat.publish(self.now());
        if self.roster.has_changed().unwrap_or(false) {
            self.grow();
        }
        if self.plans.has_changed().unwrap_or(false) {
            let offered = self.plans.borrow_and_update().offered;
            if offered && self.board.plan(Plans::flip) {
                self.in_force.clone_from(&self.plans.borrow_and_update().in_force);
                self.peers.iter_mut().for_each(|peer| peer.forget_adopted(None));
                // Seats that the placement names may be newer than the roster above.
                self.grow();
                tracing::info!(generation = self.generation(), "placement in force");
            }
        }
    }

    fn running(&mut self, any: bool) {
        if std::mem::replace(&mut self.running, any) != any {
            self.board.set_running(any);
        }
    }

    fn take_reseated(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.reseated)
    }

    fn copies(&self, layer: u32, expert: u32) -> &[usize] {
        self.in_force.as_ref().map_or(&[], |plan| plan.placement.copies(layer, expert))
    }

    fn standing(&self, worker: usize) -> Standing {
        let Some(peer) = self.peers.get(worker) else { return Standing::Away };
        if !peer.lane.serves(self.generation()) {
            Standing::Away
        } else if peer.lane.is_suspect() {
            Standing::Suspect
        } else {
            Standing::Serving
        }
    }

    fn stand_ins(&self, layer: u32) -> Vec<usize> {
        let able = |&worker: &usize| {
            self.standing(worker) == Standing::Serving
                && !self.peers[worker].absent_layers.contains(&layer)
        };
        let mut able: Vec<usize> = (0..self.peers.len()).filter(able).collect();
        // Who has least to do for its weight; whoever leaves comes last.
        let load = |worker: usize| {
            let peer = &self.peers[worker];
            let share = self.in_force.as_ref().map_or(0, |plan| plan.share(worker));
            #[expect(clippy::cast_precision_loss, reason = "a model has fewer than 2^52 experts")]
            let experts = (share + peer.adopted_count()) as f64;
            (peer.lane.is_leaving(), experts / peer.weight)
        };
        able.sort_by(|&a, &b| {
            let ((a_leaves, a), (b_leaves, b)) = (load(a), load(b));
            a_leaves.cmp(&b_leaves).then(a.total_cmp(&b))
        });
        able
    }

    fn adopt(
        &mut self,
        worker: usize,
        layer: u32,
        experts: &[u32],
    ) -> Result<usize, TransportError> {
        let placed = |&expert: &u32| self.copies(layer, expert).contains(&worker);
        let wanted: Vec<u32> = experts.iter().copied().filter(|e| !placed(e)).collect();
        let session = self.peers[worker].lane.outlet().map_or(0, |outlet| outlet.session);
        let fresh = self.peers[worker].unadopted(session, layer, &wanted);
        if fresh.is_empty() {
            return Ok(0);
        }
        let layers = vec![LayerExperts { layer, experts: fresh.clone() }];
        let (epoch, generation) = self.fence_base();
        let queued = self.queue(worker, Body::Adopt(Adopt { epoch, generation, layers }))?;
        if queued == session {
            self.peers[worker].adopted(layer, &fresh);
        }
        tracing::info!(worker = self.infos[worker].id, layer, experts = ?fresh, "worker stands in");
        Ok(fresh.len())
    }

    fn usual(&self, worker: usize, rows: u32) -> Option<Duration> {
        self.peers[worker].latency.usual(rows)
    }

    fn pace(&self, worker: usize) -> Pace {
        self.peers[worker].pace.pace()
    }

    fn owes_nothing(&self, worker: usize) -> bool {
        self.peers[worker].owes_nothing(Instant::now(), &self.config)
    }

    fn suspect(&mut self, worker: usize) {
        self.peers[worker].lane.suspect();
    }

    fn contest(&mut self, worker: usize, layer: u32, experts: &[u32]) {
        self.peers[worker].prove();
        let lane = &self.peers[worker].lane;
        // Without a session there is nothing to prove: the loss will be heard of.
        let Some(outlet) = lane.outlet() else { return };
        for &expert in experts {
            lane.contest(layer, expert);
            let test = Body::SelfTest(SelfTest { layer, expert });
            drop(outlet.requests.try_send(SessionRequest { body: Some(test) }));
        }
    }

    fn quarantine(&mut self, worker: usize, reason: &str) {
        tracing::error!(worker = self.board.name(worker), reason, "worker quarantined");
        self.board.quarantine(worker, reason);
        self.give_up(worker, reason);
    }

    fn is_quarantined(&self, worker: usize) -> bool {
        self.board.is_quarantined(worker)
    }

    fn own_copy(&mut self, work: &ExpertWork) -> Option<Result<ExpertResult, WorkerError>> {
        let layer = work.fence.as_ref()?.layer;
        if !self.has_own_copy(layer) {
            return None;
        }
        Some(self.own.as_mut()?.compute(work))
    }

    fn has_own_copy(&self, layer: u32) -> bool {
        self.own_layers.contains(&layer)
    }

    fn fence_base(&self) -> (u64, u64) {
        (self.epoch, self.generation())
    }

    fn limits(&self, worker: usize) -> PartLimits {
        let outlet = self.peers[worker].lane.outlet();
        let peer_rows = outlet.map_or(limits::MAX_PART_ROWS, |outlet| outlet.max_rows);
        PartLimits {
            max_rows: limits::part_rows(self.model.row_bytes, self.model.hidden, peer_rows),
            max_bytes: limits::PART_BYTES,
        }
    }

    fn send(&mut self, worker: usize, mut work: ExpertWork) -> Result<(), TransportError> {
        if let Err(error) = self.ledger.expect(worker, work.fence.as_ref()) {
            return Err(self.lost(worker, error.to_string()));
        }
        let fence = work.fence.expect("the ledger took the fence");
        // What an earlier place left behind is not awaited any more.
        self.peers.iter_mut().for_each(|peer| peer.keep_place(&fence));
        let (rows, sent) = (work.row_count, self.now());
        let limit = self.peers[worker].latency.deadline(rows);
        work.deadline_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        checksum::seal_work(&mut work);
        self.heat.count(fence.layer, &work);
        let session = self.queue(worker, Body::Work(work))?;
        self.peers[worker].sent(session, Out { fence, rows, sent, limit });
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
            // What has come counts, however late it is looked at.
            while let Ok(event) = self.events.try_recv() {
                if let Some(outcome) = self.take(event) {
                    return outcome;
                }
            }
            let now = self.now();
            let until = match self.watch(now) {
                Ok(next) => next.map_or(deadline, |next| next.min(deadline)),
                Err((worker, out)) => return Err(self.overdue(worker, out)),
            };
            match self.config.stage.receive(&self.events, until) {
                Ok(event) => {
                    if let Some(outcome) = self.take(event) {
                        return outcome;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(TransportError::Closed),
                Err(RecvTimeoutError::Timeout) => {
                    if self.now() >= deadline {
                        return Err(TransportError::Timeout);
                    }
                }
            }
        }
    }

    fn give_up(&mut self, worker: usize, reason: &str) {
        self.peers[worker].lane.give_up(reason);
        self.ledger.forget(worker);
        self.peers[worker].forget_work();
    }
}

impl Drop for RemoteWorkers {
    fn drop(&mut self) {
        self.shutdown.cancel();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the links panicked");
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
