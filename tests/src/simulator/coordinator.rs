//! A model coordinator: the real cores of leadership, membership, switching and dispatch, told what happens by the world.

mod check;
mod step;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_coordinator::{
    dispatch::{Exchange, FaultPolicy, Standing},
    membership::{
        decided::Decided,
        followed::Followed,
        leader::{Duty, Leader, LeaderConfig, Timings},
        switch::{Numbered, Switch, SwitchAction},
        view::{Greeting, LinkFacts, View},
    },
    placement::{Candidate, PlacedLayer},
};
use shimmer_kernels::Kernels;
use shimmer_proto::membership::{
    Entry, MembershipStore as _, Snapshot, Written,
    memory::{MemoryCluster, MemoryStore},
    records::{
        COORDINATORS, CoordinatorRecord, HEAT, HeatRecord, LEADER, PLACEMENT, PlacementRecord,
        WORKERS,
    },
};
use shimmer_worker::generations::Stamp;
use tokio::sync::watch;

use super::{
    DIGEST, EXPERTS, LAYERS, Mutation,
    oracle::Oracle,
    tally::Tally,
    transport::ModelTransport,
    worker::{ModelWorker, Order, Owned},
};
use crate::dice::mix;
pub(super) use step::Step;

/// Longest wait for a layer. Enough for two workers, one after the other, to be found silent.
pub(super) const DEADLINE: Duration = Duration::from_secs(6);
/// Workers that are away longer are not waited for when generations change.
const PATIENCE: Duration = Duration::from_secs(1);

/// The link to one worker.
#[derive(Debug)]
pub(super) struct Link {
    /// The session that is up.
    pub(super) session: Option<u64>,
    since: Instant,
    greeted: bool,
    /// Sessions that ended before anything was ready.
    stumbles: u32,
    readied: bool,
}

/// One run of a coordinator's process.
#[derive(Debug)]
pub(super) struct ModelCoordinator {
    pub(super) id: String,
    /// Numbers the runs, and is the epoch of their fences.
    pub(super) epoch: u64,
    pub(super) store: MemoryStore,
    snapshots: watch::Receiver<Snapshot>,
    snapshot: Snapshot,
    /// How far its clock is ahead of the world's.
    pub(super) ahead: Duration,
    leader: Leader,
    switch: Switch,
    exchange: Exchange,
    pub(super) transport: ModelTransport,
    pub(super) links: Vec<Link>,
    hosts: Vec<String>,
    /// Links have changed since the last decision.
    changed: bool,
    wake: Option<Instant>,
    records: BTreeMap<u64, PlacementRecord>,
    /// The entry of the store that was looked at last.
    placed: Option<Entry>,
    followed: Followed,
    /// What others were told last: the generation in force, and the one that is followed.
    told: Option<(u64, u64)>,
    pub(super) step: Option<Step>,
    steps: u64,
    pub(super) rounds: u64,
    pub(super) last_done: Duration,
    /// Share of messages that are to be computed by two workers, in ten thousandths.
    audit_per_10k: u32,
    /// Who computes other bytes.
    pub(super) liar: Option<usize>,
    /// What happened in this run.
    tally: Tally,
}

/// What all coordinators of a cluster have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Of the schedule.
    pub(super) seed: u64,
    pub(super) copies: usize,
    /// Share of messages that are to be computed by two workers, in ten thousandths.
    pub(super) audit_per_10k: u32,
    pub(super) mutation: Option<Mutation>,
}

impl ModelCoordinator {
    pub(super) fn new(
        index: usize,
        epoch: u64,
        workers: &[ModelWorker],
        cluster: &MemoryCluster,
        shape: Shape,
        now: Instant,
    ) -> Self {
        let Shape { seed, copies, audit_per_10k, mutation } = shape;
        let id = format!("c{index}");
        let store = cluster.member();
        let ms = Duration::from_millis;
        let config = LeaderConfig {
            id: id.clone(),
            container_digest: DIGEST.to_owned(),
            layers: layers(),
            copies,
            listed: None,
            timings: Timings {
                placement_wait: ms(1000),
                settle: ms(300),
                debounce: ms(200),
                replace_after: ms(1500),
            },
        };
        let link =
            || Link { session: None, since: now, greeted: false, stumbles: 0, readied: false };
        // A burst of late workers is no reason to stop asking others: the pause would hide what hedges do wrong.
        let policy = FaultPolicy {
            hedge_share: 1.0,
            // A planted bug: nothing is compared, though it was asked for.
            audit_per_10k: if mutation == Some(Mutation::AuditsLeftOut) {
                0
            } else {
                audit_per_10k
            },
            ..FaultPolicy::default()
        };
        let kernels = Kernels::new(None).expect("the best kernels run anywhere");
        Self {
            id,
            epoch,
            snapshots: store.watch(),
            store,
            snapshot: Snapshot::default(),
            ahead: Duration::ZERO,
            leader: Leader::new(config),
            switch: Switch::new(PATIENCE),
            exchange: Exchange::new(kernels, policy),
            transport: ModelTransport::new(workers, epoch, mutation, now),
            links: workers.iter().map(|_| link()).collect(),
            hosts: workers.iter().map(|worker| worker.host.clone()).collect(),
            changed: true,
            wake: None,
            records: BTreeMap::new(),
            placed: None,
            followed: Followed::default(),
            told: None,
            step: None,
            // Which messages are compared follows from the number of the step, too.
            steps: mix(epoch.wrapping_add(seed)) >> 24,
            rounds: 0,
            last_done: Duration::ZERO,
            audit_per_10k,
            liar: None,
            tally: Tally::default(),
        }
    }

    /// What happened in this run so far.
    pub(super) fn tally(&self) -> Tally {
        let mut tally = self.tally.clone();
        tally.dispatch(self.exchange.counts());
        let dropped = self.transport.ledger.dropped();
        tally.count("results dropped as doubled", dropped.duplicate);
        tally.count("results dropped as stale", dropped.stale);
        tally.count("results dropped as unknown", dropped.unknown);
        tally
    }

    /// What it is at, for a trace.
    pub(super) fn state(&self) -> String {
        let Snapshot { lease, revision, disconnected, entries, .. } = &self.snapshot;
        let of =
            |key: &str| entries.get(key).map(|entry| (&entry.value, entry.revision, entry.lease));
        format!(
            "lease {lease}, revision {revision}, away {disconnected:?}, leader {:?}, placed {:?}, generation {}, {:?}, wake {:?}, {:?}",
            of(LEADER),
            of(PLACEMENT),
            self.generation(),
            self.transport.standings,
            self.wake,
            self.switch
        )
    }

    /// Whether it has heard of a worker.
    pub(super) fn knows(&self, worker: usize) -> bool {
        self.links[worker].greeted
            || self.snapshot.entries.contains_key(&format!("{WORKERS}w{worker}"))
    }

    pub(super) fn generation(&self) -> u64 {
        self.transport.stamp.generation
    }

    /// Ids of the newest placement that it knows.
    pub(super) fn placed_on(&self) -> Vec<String> {
        self.records.values().next_back().map_or_else(Vec::new, |record| record.workers.clone())
    }

    /// Decides what there is to decide about the cluster, if anything has changed.
    pub(super) fn control(
        &mut self,
        cluster: &MemoryCluster,
        oracle: &mut Oracle,
        mutation: Option<Mutation>,
        now: Instant,
    ) -> Result<(), String> {
        let news = self.snapshots.has_changed().unwrap_or(false);
        if !news && !self.changed && self.wake.is_none_or(|wake| wake > now) {
            return Ok(());
        }
        self.changed = false;
        self.snapshot.clone_from(&self.snapshots.borrow_and_update());
        let links: Vec<LinkFacts> = (0..self.links.len()).filter_map(|w| self.facts(w)).collect();
        let view = View::new(&self.snapshot, &links, DIGEST);
        let decision = self.leader.decide(&view, &self.snapshot, now);
        self.wake = decision.wake;
        if let Some(duty) = decision.duty {
            let (Duty::Campaign(mut write) | Duty::Propose { mut write, .. }) = duty;
            if mutation == Some(Mutation::LeaderNotChecked) {
                write.conditions.retain(|condition| condition.key != LEADER);
            }
            let before = cluster.snapshot();
            let outcome = self.store.write_now(&write.conditions, write.writes);
            oracle.check(&before, &cluster.snapshot())?;
            self.leader.settled(&outcome, now);
            self.changed = true;
        }
        self.learn(now, mutation)?;
        self.introduce(mutation);
        Ok(())
    }

    /// Tells others by which placement it works and which one it follows, if that has changed.
    fn introduce(&mut self, mutation: Option<Mutation>) {
        let told = (self.generation(), self.followed.follows());
        if self.told.replace(told) == Some(told) {
            return;
        }
        let (in_force, mut follows) = told;
        if mutation == Some(Mutation::FollowsNotTold) {
            follows = 0;
        }
        let record = CoordinatorRecord {
            address: String::new(),
            admin_address: String::new(),
            container_digest: DIGEST.to_owned(),
            incarnation: self.epoch,
            in_force,
            follows,
        };
        let value = serde_json::to_string(&record).expect("a record is plain data");
        self.store.announce(&format!("{COORDINATORS}{}", self.id), value);
    }

    /// An operator asks it to level the load; whether it wrote a placement for that.
    pub(super) fn rebalance(
        &mut self,
        cluster: &MemoryCluster,
        oracle: &mut Oracle,
        heat: HeatRecord,
    ) -> Result<bool, String> {
        let value = serde_json::to_string(&heat).expect("a record is plain data");
        self.store.announce(&format!("{HEAT}{}", self.id), value);
        let snapshot = self.store.watch().borrow().clone();
        let links: Vec<LinkFacts> = (0..self.links.len()).filter_map(|w| self.facts(w)).collect();
        let view = View::new(&snapshot, &links, DIGEST);
        let Ok(plan) = self.leader.rebalance(&view, &snapshot, 4) else { return Ok(false) };
        if plan.rebalance.moves.is_empty() {
            return Ok(false);
        }
        let before = cluster.snapshot();
        let outcome = self.store.write_now(&plan.write.conditions, plan.write.writes);
        oracle.check(&before, &cluster.snapshot())?;
        Ok(matches!(outcome, Ok(Written::Done(_))))
    }

    /// Whether the placement in force names a worker.
    pub(super) fn counts_on(&self, worker: usize) -> bool {
        self.transport.placement.shares().get(worker).is_some_and(|&share| share > 0)
    }

    /// Takes up a placement that is new in the store.
    fn learn(&mut self, now: Instant, mutation: Option<Mutation>) -> Result<(), String> {
        let entry = self.snapshot.entries.get(PLACEMENT);
        if entry == self.placed.as_ref() {
            return Ok(());
        }
        self.placed = entry.cloned();
        let decided = Decided::read(&self.snapshot, DIGEST, &layers())
            .map_err(|error| format!("{}: {error}", self.id))?;
        let Some(decided) = self.followed.news(decided) else { return Ok(()) };
        self.followed.took(decided.record.clone());
        let Decided { record, placement, .. } = decided;
        let seat = |id: &String| id[1..].parse::<usize>().expect("ids are w0, w1, ...");
        let seats: Vec<usize> = record.workers.iter().map(seat).collect();
        let placement = Arc::new(placement.reseated(&seats, self.links.len()));
        let numbered = Numbered { generation: record.generation, placement };
        self.records.insert(record.generation, record);
        let actions = self.switch.new_record(numbered, now);
        self.carry_out(actions, mutation);
        Ok(())
    }

    fn facts(&self, worker: usize) -> Option<LinkFacts> {
        let link = &self.links[worker];
        let candidate = Candidate {
            id: format!("w{worker}"),
            weight: 1.0,
            host: self.hosts[worker].clone(),
            ..Candidate::default()
        };
        link.greeted.then(|| LinkFacts {
            address: format!("w{worker}:1"),
            greeting: Some(Greeting { candidate, draining: false }),
            up: link.session.is_some(),
            since: link.since,
            refused: self.transport.quarantined.contains(&worker).then(|| "quarantined".to_owned()),
        })
    }

    fn carry_out(&mut self, actions: Vec<SwitchAction>, mutation: Option<Mutation>) {
        for action in actions {
            match action {
                SwitchAction::Assign { worker, generation, layers } => {
                    let stamp = Stamp::new(self.epoch, generation);
                    let pairs = |(layer, experts): (u32, Vec<u32>)| {
                        experts.into_iter().map(move |expert| (layer, expert))
                    };
                    let owned: Owned = layers.into_iter().flat_map(pairs).collect();
                    self.transport.outbox.push((worker, Order::Assign { stamp, owned }));
                    if mutation == Some(Mutation::ReadyNotAwaited) {
                        self.ready(worker, generation);
                    }
                }
                SwitchAction::Release { worker, generation } => {
                    let stamp = Stamp::new(self.epoch, generation);
                    self.transport.outbox.push((worker, Order::Release { stamp }));
                }
                SwitchAction::Flip { generation } => {
                    let current = self.switch.current().expect("it was flipped to");
                    self.transport.flip(generation, Arc::clone(&current.placement));
                }
            }
        }
        self.refresh();
    }

    /// Brings standings up to date. A suspect stays one until it answers.
    fn refresh(&mut self) {
        for worker in 0..self.links.len() {
            let serves = self.links[worker].session.is_some() && self.switch.serves(worker);
            let standing = &mut self.transport.standings[worker];
            if !serves {
                *standing = Standing::Away;
            } else if *standing == Standing::Away {
                *standing = Standing::Serving;
            }
        }
    }

    /// Between two steps: another generation may come into force. Gives it.
    pub(super) fn boundary(
        &mut self,
        oracle: &Oracle,
        readied: impl Fn(u64, u64) -> bool,
        now: Instant,
    ) -> Result<Option<u64>, String> {
        let actions = self.switch.step_boundary(now);
        let Some(SwitchAction::Flip { generation }) = actions.first() else { return Ok(None) };
        let (before, generation) = (self.generation(), *generation);
        if generation <= before {
            return Err(format!("{} went from generation {before} to {generation}", self.id));
        }
        oracle.serves(&self.records[&generation])?;
        self.carry_out(actions, None);
        for (worker, share) in self.transport.placement.shares().into_iter().enumerate() {
            let link = &self.links[worker];
            if let Some(session) = link.session
                && share > 0
                && link.stumbles < 3
                && !readied(session, generation)
            {
                return Err(format!(
                    "{} serves by generation {generation}, which w{worker} has not loaded",
                    self.id
                ));
            }
        }
        Ok(Some(generation))
    }

    pub(super) fn connected(
        &mut self,
        worker: usize,
        session: u64,
        mutation: Option<Mutation>,
        now: Instant,
    ) {
        let link = &mut self.links[worker];
        (link.session, link.since, link.greeted, link.readied) = (Some(session), now, true, false);
        self.changed = true;
        let actions = self.switch.connected(worker);
        self.carry_out(actions, mutation);
    }

    pub(super) fn ready(&mut self, worker: usize, generation: u64) {
        let link = &mut self.links[worker];
        (link.stumbles, link.readied) = (0, true);
        self.switch.ready(worker, generation);
        self.refresh();
    }

    /// A session has ended.
    pub(super) fn lost(&mut self, worker: usize, now: Instant) {
        let link = &mut self.links[worker];
        if link.session.take().is_none() {
            return;
        }
        link.since = now;
        link.stumbles += u32::from(!link.readied);
        self.changed = true;
        self.switch.away(worker, now);
        self.refresh();
        self.transport.forget(worker);
        self.disturb(worker);
        self.drive(now, |exchange, reach| exchange.lost(reach, worker, "the session ended"));
    }

    /// Something happened to a worker: it need not answer what is out.
    pub(super) fn disturb(&mut self, worker: usize) {
        if let Some(step) = &mut self.step {
            step.disturbed[worker] = true;
        }
    }

    /// A worker computes other bytes from now on.
    pub(super) fn distrust(&mut self, worker: usize) {
        self.liar = Some(worker);
        if let Some(step) = &mut self.step {
            step.liar = Some(worker);
        }
        self.disturb(worker);
    }

    /// Every expert can be asked of somebody.
    pub(super) fn is_complete(&self) -> bool {
        let able = |&worker: &usize| self.transport.standings[worker] != Standing::Away;
        self.generation() > 0
            && self.transport.placement.experts().all(|(_, _, copies)| copies.iter().any(able))
    }
}

pub(super) fn layers() -> Vec<PlacedLayer> {
    (0..LAYERS).map(|layer| PlacedLayer { layer, experts: EXPERTS, slab_bytes: 1 }).collect()
}
