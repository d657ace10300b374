//! Carries out what the membership cores decide: follows the store, seats workers, leads if nobody else does, and has
//! placements loaded and offered to the step thread.

use std::{
    collections::BTreeMap,
    io,
    pin::Pin,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use shimmer_proto::{
    expert::v1::WorkerHello,
    membership::{
        MembershipStore, Snapshot, StoreError, Write, Written,
        records::{
            COORDINATORS, CoordinatorRecord, HEAT, HeatRecord, QUARANTINES, QuarantineRecord,
            WORKERS,
        },
    },
};

use tokio::sync::{mpsc, watch};

use super::{
    RemoteConfig,
    board::SeatFacts,
    handle::RebalanceOrder,
    link::{Carriers, Ground},
    plans::Plan,
};
use crate::{
    membership::{
        decided::Decided,
        followed::Followed,
        leader::{Duty, Leader, LeaderConfig},
        switch::{Numbered, Switch, SwitchAction},
        view::{Greeting, LinkFacts, View},
    },
    placement::{Candidate, PlacedLayer},
};

/// Wait before a write of a quarantine is tried again.
const QUARANTINE_RETRY: Duration = Duration::from_secs(1);

/// Least time from one look to the next without any news: a core that is never content must not take a whole processor.
const LOOKS_APART: Duration = Duration::from_millis(5);

/// Starts the task; it ends at shutdown. Its thread, if it has one.
pub(super) fn start(
    ground: Ground,
    store: Arc<dyn MembershipStore>,
    carriers: Carriers,
    heat: watch::Receiver<HeatRecord>,
    orders: mpsc::Receiver<RebalanceOrder>,
) -> io::Result<Option<JoinHandle<()>>> {
    let stage = ground.config.stage.clone();
    let control = Control::new(ground, store, carriers);
    stage.run("placement".to_owned(), move || control.run(heat, orders))
}

type Outcome = Result<Written, StoreError>;

/// A write that is out, and what it is about.
type Pending = Pin<Box<dyn Future<Output = (About, Outcome)>>>;

enum About {
    Leading,
    /// The quarantine of a worker.
    Quarantine(String),
}

struct Control {
    ground: Ground,
    store: Arc<dyn MembershipStore>,
    carriers: Carriers,
    digest: String,
    layers: Vec<PlacedLayer>,
    leader: Leader,
    switch: Switch,
    /// The session of each seat that the switch knows of.
    sessions: BTreeMap<usize, u64>,
    /// The placement that was taken up last.
    followed: Followed,
    /// What others were told last: the generation in force, and the one that is followed.
    told: (u64, u64),
    /// What was complained of last, so that it is said once.
    complaints: Vec<String>,
    quarantine_at: Option<Instant>,
}

impl Control {
    fn new(ground: Ground, store: Arc<dyn MembershipStore>, carriers: Carriers) -> Self {
        let layers: Vec<PlacedLayer> = ground
            .model
            .layers
            .iter()
            .map(|l| PlacedLayer {
                layer: l.layer,
                experts: u32::try_from(l.self_tests.len()).unwrap_or(u32::MAX),
                slab_bytes: l.slab_bytes,
            })
            .collect();
        let digest = ground.model.identity.container_digest.clone();
        let is_fixed = store.kind() == "static";
        let listed = || {
            let snapshot = store.watch().borrow().clone();
            snapshot.entries.keys().filter(|key| key.starts_with(WORKERS)).count()
        };
        let leader = Leader::new(LeaderConfig {
            id: ground.config.coordinator_id.clone(),
            container_digest: digest.clone(),
            layers: layers.clone(),
            copies: ground.config.replicas,
            listed: is_fixed.then(listed),
            timings: ground.config.timings,
        });
        let switch = Switch::new(ground.config.switch_patience);
        Self {
            ground,
            store,
            carriers,
            digest,
            layers,
            leader,
            switch,
            sessions: BTreeMap::new(),
            followed: Followed::default(),
            told: (0, 0),
            complaints: Vec::new(),
            quarantine_at: None,
        }
    }

    async fn run(
        mut self,
        mut heat: watch::Receiver<HeatRecord>,
        mut orders: mpsc::Receiver<RebalanceOrder>,
    ) {
        let shutdown = self.ground.shutdown.clone();
        let id = self.ground.config.coordinator_id.clone();
        self.introduce();
        let mut snapshots = self.store.watch();
        let mut facts = self.ground.board.facts();
        let mut plans = self.ground.board.plans();
        let mut leading: Option<Pending> = None;
        let mut quarantine: Option<Pending> = None;
        while !shutdown.is_cancelled() {
            let snapshot = snapshots.borrow_and_update().clone();
            let (offered, in_force) = {
                let plans = plans.borrow_and_update();
                (plans.offered, plans.in_force.as_ref().map_or(0, |plan| plan.generation))
            };
            self.carriers.take(self.ground.board.follow(&snapshot));
            let seats = facts.borrow_and_update().clone();
            let now = self.ground.config.stage.now();
            let (duty, wake) = self.consider(&snapshot, &seats, offered, now);
            if self.told != (in_force, self.followed.follows()) {
                self.told = (in_force, self.followed.follows());
                self.introduce();
            }
            let mut wake = wake.into_iter().chain(self.ground.board.due()).min();
            if let Some(duty) = duty {
                leading = Some(self.write(duty));
            }
            if quarantine.is_none() {
                quarantine = self.write_quarantine(now);
                wake = wake.into_iter().chain(self.quarantine_at).min();
            }
            tokio::select! {
                // What is rare comes first: whatever happens is looked at again anyway.
                biased;
                () = shutdown.cancelled() => {}
                (about, outcome) = ended(&mut leading) => self.settle(about, &outcome),
                (about, outcome) = ended(&mut quarantine) => self.settle(about, &outcome),
                Some(order) = orders.recv() => {
                    let plan = self.leader.rebalance(&self.view(&snapshot, &seats), &snapshot, order.max_moves);
                    // Whoever asked may have gone.
                    drop(order.answer.send(plan));
                }
                Ok(()) = heat.changed() => {
                    self.announce(format!("{HEAT}{id}"), &*heat.borrow_and_update());
                }
                changed = snapshots.changed() => if changed.is_err() { break },
                changed = facts.changed() => if changed.is_err() { break },
                changed = plans.changed() => if changed.is_err() { break },
                () = until(wake) => {}
            }
        }
        self.store.leave().await;
    }

    /// Lets the cores look at everything that is known. A write to make, and when to look again.
    fn consider(
        &mut self,
        snapshot: &Snapshot,
        seats: &[SeatFacts],
        offered: bool,
        now: Instant,
    ) -> (Option<Duty>, Option<Instant>) {
        self.follow_sessions(seats, now);
        // What was offered comes into force before anything newer is loaded.
        if !offered {
            self.follow_placement(snapshot, now);
            self.offer(now);
        }
        let view = self.view(snapshot, seats);
        let decision = self.leader.decide(&view, snapshot, now);
        let mut complaints = view.complaints;
        complaints.extend(decision.hindrance.clone());
        self.complain(complaints);
        let wake = decision.wake.into_iter().chain(self.switch.due()).min();
        (decision.duty, wake.map(|wake| wake.max(now + LOOKS_APART)))
    }

    /// The cluster as the cores see it.
    fn view(&self, snapshot: &Snapshot, seats: &[SeatFacts]) -> View {
        let links: Vec<LinkFacts> = seats.iter().map(link_facts).collect();
        View::new(&self.seen(snapshot), &links, &self.digest)
    }

    /// Tells the switch which sessions came, went, and are ready.
    fn follow_sessions(&mut self, seats: &[SeatFacts], now: Instant) {
        for (seat, facts) in seats.iter().enumerate() {
            let known = self.sessions.get(&seat).copied();
            let session = facts.up.then_some(facts.session);
            if known != session {
                if known.is_some() {
                    self.switch.away(seat, now);
                    self.sessions.remove(&seat);
                }
                if let Some(session) = session {
                    // The session asks for what it needs by itself.
                    drop(self.switch.connected(seat));
                    self.sessions.insert(seat, session);
                }
            }
            for generation in facts.ready.into_iter().filter(|&generation| generation != 0) {
                self.switch.ready(seat, generation);
            }
        }
    }

    /// Has a placement loaded that was written since the last look.
    fn follow_placement(&mut self, snapshot: &Snapshot, now: Instant) {
        // The leader says what is wrong with one that cannot be used.
        let Ok(decided) = Decided::read(snapshot, &self.digest, &self.layers) else { return };
        let Some(decided) = self.followed.news(decided) else { return };
        let generation = decided.record.generation;
        let board = &self.ground.board;
        let Some((seats, made)) = board.seats_of(&decided.record.workers) else { return };
        self.carriers.take(made);
        let count = seats.iter().max().map_or(0, |&last| last + 1);
        let placement = Arc::new(decided.placement.reseated(&seats, count));
        tracing::info!(
            generation,
            reason = decided.record.reason,
            leader = decided.record.leader,
            "placement"
        );
        self.followed.took(decided.record);
        let numbered = Numbered { generation, placement: Arc::clone(&placement) };
        if !self.switch.new_record(numbered, now).is_empty() || self.is_next(generation) {
            board.plan(|plans| plans.prepare(Plan::new(generation, placement)));
        }
    }

    fn is_next(&self, generation: u64) -> bool {
        self.switch.next().is_some_and(|next| next.generation == generation)
    }

    /// Offers the step thread what everybody has loaded.
    fn offer(&mut self, now: Instant) {
        for action in self.switch.step_boundary(now) {
            // Sessions release what is old when the step thread has taken the new one.
            if let SwitchAction::Flip { generation } = action {
                self.ground.board.plan(|plans| plans.offer(generation));
            }
        }
    }

    /// The snapshot as the view wants it: the names of a static list are addresses, and the ids are known by hellos alone.
    fn seen(&self, snapshot: &Snapshot) -> Snapshot {
        let mut seen = snapshot.clone();
        if self.store.kind() == "static" {
            seen.entries.retain(|key, _| !key.starts_with(WORKERS));
        }
        seen
    }

    /// Tells others about this coordinator, if it is one of theirs.
    fn introduce(&self) {
        let RemoteConfig { coordinator_id, announced, .. } = &*self.ground.config;
        if let Some(record) = announced.clone() {
            let (in_force, follows) = self.told;
            let record = CoordinatorRecord { in_force, follows, ..record };
            self.announce(format!("{COORDINATORS}{coordinator_id}"), &record);
        }
    }

    fn announce(&self, key: String, record: &impl serde::Serialize) {
        let value = serde_json::to_string(record).expect("a record is plain data");
        self.store.announce(&key, value);
    }

    fn complain(&mut self, complaints: Vec<String>) {
        for complaint in complaints.iter().filter(|c| !self.complaints.contains(c)) {
            tracing::warn!(complaint, "membership");
        }
        self.complaints = complaints;
    }

    fn write(&self, duty: Duty) -> Pending {
        let write = match duty {
            Duty::Campaign(write) => write,
            Duty::Propose { record, write } => {
                tracing::info!(
                    generation = record.generation,
                    reason = record.reason,
                    "proposing a placement"
                );
                write
            }
        };
        let store = Arc::clone(&self.store);
        Box::pin(async move {
            let outcome = store.write(write.conditions, write.writes).await;
            (About::Leading, outcome)
        })
    }

    /// Writes down the first quarantine that the store does not know of.
    fn write_quarantine(&mut self, now: Instant) -> Option<Pending> {
        let mut wanted = self.ground.board.unwritten_quarantines();
        if wanted.is_empty() {
            self.quarantine_at = None;
            return None;
        }
        if self.quarantine_at.is_some_and(|at| at > now) {
            return None;
        }
        self.quarantine_at = Some(now + QUARANTINE_RETRY);
        let (id, reason) = wanted.swap_remove(0);
        let coordinator = self.ground.config.coordinator_id.clone();
        let record = QuarantineRecord { reason, coordinator };
        let value = serde_json::to_string(&record).expect("a record is plain data");
        let writes = vec![Write::Put { key: format!("{QUARANTINES}{id}"), value }];
        let store = Arc::clone(&self.store);
        Some(Box::pin(async move {
            let outcome = store.write(Vec::new(), writes).await;
            (About::Quarantine(id), outcome)
        }))
    }

    fn settle(&mut self, about: About, outcome: &Outcome) {
        if let Err(error) = outcome {
            tracing::warn!(%error, "a write to the membership store failed; it is tried again");
        }
        match about {
            About::Leading => self.leader.settled(outcome, self.ground.config.stage.now()),
            About::Quarantine(id) => {
                if let Ok(Written::Done(revision)) = outcome {
                    self.quarantine_at = None;
                    self.ground.board.quarantine_written(&id, *revision);
                }
            }
        }
    }
}

/// What the cores want to know of a link.
fn link_facts(seat: &SeatFacts) -> LinkFacts {
    let greeting = |hello: &WorkerHello| Greeting {
        candidate: Candidate {
            id: hello.worker_id.clone(),
            weight: hello.weight,
            absent_layers: hello.absent_layers.clone(),
            host: hello.host.clone(),
            ram_budget_bytes: hello.ram_budget_bytes,
        },
        draining: seat.leaving,
    };
    LinkFacts {
        address: seat.address.clone(),
        greeting: seat.hello.as_ref().map(greeting),
        up: seat.up,
        since: seat.since,
        refused: seat.refused.clone(),
    }
}

/// Waits for a write that is out, for ever if none is.
async fn ended(pending: &mut Option<Pending>) -> (About, Outcome) {
    match pending {
        Some(write) => {
            let ended = write.await;
            *pending = None;
            ended
        }
        None => std::future::pending().await,
    }
}

/// Sleeps until then; for ever without a time.
async fn until(wake: Option<Instant>) {
    match wake {
        Some(wake) => tokio::time::sleep_until(wake.into()).await,
        None => std::future::pending().await,
    }
}
