//! A model coordinator: the real cores of leadership, membership, switching and dispatch, told what happens by the world.

mod check;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_coordinator::{
    dispatch::{Exchange, FaultCounts, FaultPolicy, LayerRound, Reach, Standing},
    fence::Verdict,
    gating::{Choices, RowFaults},
    membership::{
        decided::Decided,
        leader::{Duty, Leader, LeaderConfig, Timings},
        switch::{Numbered, Switch, SwitchAction},
        view::{Greeting, LinkFacts, View},
    },
    placement::{Candidate, PlacedLayer},
};
use shimmer_kernels::{
    ActivationFormat, ActivationRows, Kernels,
    gating::{GatingRule, Score},
};
use shimmer_proto::{
    expert::v1::{ExpertResult, ExpertWork, WorkerError, expert_result::Payload},
    membership::{
        MembershipStore as _, Snapshot,
        memory::{MemoryCluster, MemoryStore},
        records::{LEADER, PLACEMENT, PlacementRecord, WORKERS},
    },
};
use shimmer_worker::generations::Stamp;
use tokio::sync::watch;

use super::{
    DIGEST, EXPERTS, LAYERS, Mutation,
    arithmetic::HIDDEN,
    oracle::Oracle,
    transport::ModelTransport,
    worker::{ModelWorker, Order, Owned},
};
use crate::dice::Dice;

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
    placed: u64,
    pub(super) step: Option<Step>,
    steps: u64,
    pub(super) rounds: u64,
    pub(super) done: u64,
    pub(super) failed: u64,
    pub(super) last_done: Duration,
    /// A worker computes other bytes.
    pub(super) lied_to: bool,
}

/// The step under way.
#[derive(Debug)]
pub(super) struct Step {
    layer: u32,
    rows: Vec<f32>,
    activations: ActivationRows,
    choices: Choices,
    faults: RowFaults,
    /// Rows that had failed before this layer.
    failed: Vec<bool>,
    pub(super) round: u64,
    pub(super) begun: Instant,
    pub(super) due: Option<Instant>,
    /// Workers that something happened to since the layer began.
    pub(super) disturbed: Vec<bool>,
    /// What went to whom in this layer.
    sent: Vec<(usize, ExpertWork)>,
    /// What a planted bug adds.
    extra: Vec<i64>,
    /// What was counted when the layer began.
    counts: FaultCounts,
    /// Some worker computed other bytes during the layer.
    lied_to: bool,
}

impl ModelCoordinator {
    pub(super) fn new(
        index: usize,
        epoch: u64,
        workers: &[ModelWorker],
        cluster: &MemoryCluster,
        [copies, audit_per_10k]: [usize; 2],
        now: Instant,
    ) -> Self {
        let id = format!("c{index}");
        let ids: Vec<String> = workers.iter().map(|worker| worker.id.clone()).collect();
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
        let audit_per_10k = u32::try_from(audit_per_10k).expect("at most all");
        let policy = FaultPolicy { hedge_share: 1.0, audit_per_10k, ..FaultPolicy::default() };
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
            transport: ModelTransport::new(&ids, epoch, now),
            links: ids.iter().map(|_| link()).collect(),
            hosts: workers.iter().map(|worker| worker.host.clone()).collect(),
            changed: true,
            wake: None,
            records: BTreeMap::new(),
            placed: 0,
            step: None,
            steps: 0,
            rounds: 0,
            done: 0,
            failed: 0,
            last_done: Duration::ZERO,
            lied_to: false,
        }
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
        self.learn(now, mutation)
    }

    /// Takes up a placement that is new in the store.
    fn learn(&mut self, now: Instant, mutation: Option<Mutation>) -> Result<(), String> {
        let revision = self.snapshot.entries.get(PLACEMENT).map_or(0, |entry| entry.revision);
        if revision == self.placed {
            return Ok(());
        }
        self.placed = revision;
        let decided = Decided::read(&self.snapshot, DIGEST, &layers())
            .map_err(|error| format!("{}: {error}", self.id))?;
        let Some(Decided { record, placement, .. }) = decided else { return Ok(()) };
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
        self.lied_to = true;
        if let Some(step) = &mut self.step {
            step.lied_to = true;
        }
        self.disturb(worker);
    }

    /// Every expert can be asked of somebody.
    pub(super) fn is_complete(&self) -> bool {
        let able = |&worker: &usize| self.transport.standings[worker] != Standing::Away;
        self.generation() > 0
            && self.transport.placement.experts().all(|(_, _, copies)| copies.iter().any(able))
    }

    pub(super) fn begin_step(&mut self, dice: &mut Dice, now: Instant) {
        self.steps += 1;
        let count = 1 + dice.below(3);
        let mut faults = RowFaults::default();
        faults.reset(count);
        self.step = Some(Step {
            layer: 0,
            rows: Vec::new(),
            activations: ActivationRows::new(),
            choices: Choices::default(),
            faults,
            failed: vec![false; count],
            round: 0,
            begun: now,
            due: None,
            disturbed: Vec::new(),
            sent: Vec::new(),
            extra: Vec::new(),
            counts: FaultCounts::default(),
            lied_to: false,
        });
        self.begin_round(count, dice, now);
    }

    fn begin_round(&mut self, count: usize, dice: &mut Dice, now: Instant) {
        self.rounds += 1;
        let (steps, away) = (self.steps, self.away());
        let step = self.step.as_mut().expect("a step is under way");
        let number = |row: usize| u16::try_from(steps * 4 + row as u64).expect("steps are few");
        step.rows = (0..count).flat_map(|row| [f32::from(number(row)), 0.5]).collect();
        let kernels = Kernels::new(None).expect("the best kernels run anywhere");
        step.activations.set(&kernels, ActivationFormat::F32, &step.rows, count, HIDDEN);
        let logits: Vec<f32> = (0..count * EXPERTS as usize)
            .map(|_| f32::from(u8::try_from(dice.below(64)).expect("below 64")))
            .collect();
        let rule = GatingRule {
            score: Score::Sigmoid,
            top_k: 2,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            normalise_eps: 0.0,
            scale: 1.0,
        };
        step.choices.choose(&rule, &logits, EXPERTS as usize, None, step.layer, &mut step.faults);
        step.failed = (0..count).map(|row| step.faults.has(row)).collect();
        (step.round, step.begun, step.due) = (self.rounds, now, None);
        step.disturbed = away;
        step.sent.clear();
        step.extra = vec![0; count * HIDDEN];
        (step.counts, step.lied_to) = (*self.exchange.counts(), self.lied_to);
        self.drive(now, Exchange::begin);
    }

    fn away(&self) -> Vec<bool> {
        self.transport.standings.iter().map(|&standing| standing != Standing::Serving).collect()
    }

    /// Tells the exchange something about the round under way.
    fn drive(&mut self, now: Instant, tell: impl FnOnce(&mut Exchange, &mut Reach<'_>)) {
        let Self { exchange, transport, step, steps, .. } = self;
        let Some(step) = step else { return };
        let round = LayerRound {
            step: *steps,
            layer: step.layer,
            activations: &step.activations,
            choices: &step.choices,
            hints: None,
            deadline: DEADLINE,
        };
        transport.now = now;
        let before = transport.outbox.len();
        let mut reach = Reach { transport, round: &round, faults: &mut step.faults, now };
        tell(exchange, &mut reach);
        let due = exchange.due(&reach);
        step.due = (!exchange.is_done()).then_some(due);
        for (worker, order) in &self.transport.outbox[before..] {
            if let Order::Work(work) = order {
                step.sent.push((*worker, (**work).clone()));
            }
        }
    }

    pub(super) fn tick(&mut self, now: Instant) {
        if self.step.as_ref().is_some_and(|step| step.due.is_some_and(|due| due <= now)) {
            self.drive(now, Exchange::tick);
        }
    }

    /// A reply has arrived.
    pub(super) fn reply(
        &mut self,
        worker: usize,
        mut outcome: Result<ExpertResult, WorkerError>,
        mutation: Option<Mutation>,
        now: Instant,
    ) {
        let fence = match &outcome {
            Ok(result) => result.fence,
            Err(error) => error.fence,
        };
        let mut verdict = self.transport.ledger.settle(worker, fence.as_ref());
        if let (Verdict::Duplicate, Some(Mutation::DuplicateAdded), Ok(result)) =
            (verdict, mutation, &outcome)
        {
            self.add_again(worker, result);
        }
        if let (Some(Mutation::FenceNotChecked), Ok(result), Some(step)) =
            (mutation, &mut outcome, &self.step)
            && verdict != Verdict::Accept
        {
            // Whatever comes answers what is out.
            let mut sent =
                step.sent.iter().filter(|(to, _)| *to == worker).map(|(_, work)| work.fence);
            if let Some(fence) = sent.find(|fence| {
                self.transport.ledger.settle(worker, fence.as_ref()) == Verdict::Accept
            }) {
                (result.fence, verdict) = (fence, Verdict::Accept);
            }
        }
        if verdict != Verdict::Accept {
            return;
        }
        if self.transport.standings[worker] == Standing::Suspect {
            self.transport.standings[worker] = Standing::Serving;
        }
        let reply = shimmer_coordinator::dispatch::Reply { worker, outcome };
        self.drive(now, |exchange, reach| exchange.reply(reach, reply));
    }

    /// The planted bug: a second answer enters the sums as well.
    fn add_again(&mut self, worker: usize, result: &ExpertResult) {
        let Some(step) = &mut self.step else { return };
        let Some(Payload::Accumulators(bytes)) = &result.payload else { return };
        let of = |(to, work): &&(usize, ExpertWork)| *to == worker && work.fence == result.fence;
        let Some((_, work)) = step.sent.iter().find(of) else { return };
        let sums = bytes.as_chunks::<8>().0;
        for (row, values) in work.rows.as_chunks::<4>().0.chunks(HIDDEN).enumerate() {
            let value = f32::from_le_bytes(values[0]);
            let Some(place) =
                step.rows.chunks(HIDDEN).position(|row| row[0].to_bits() == value.to_bits())
            else {
                continue;
            };
            for column in 0..HIDDEN {
                step.extra[place * HIDDEN + column] +=
                    i64::from_le_bytes(sums[row * HIDDEN + column]);
            }
        }
    }

    /// Ends the layer if everything is answered, and begins the next one. True at the end of the step.
    pub(super) fn advance(
        &mut self,
        dice: &mut Dice,
        world: Duration,
        now: Instant,
    ) -> Result<bool, String> {
        if self.step.is_none() || !self.exchange.is_done() {
            return Ok(false);
        }
        self.check_layer()?;
        let step = self.step.as_mut().expect("a step is under way");
        step.layer += 1;
        let count = step.failed.len();
        let alive = (0..count).any(|row| !step.faults.has(row));
        if step.layer < LAYERS && alive {
            self.begin_round(count, dice, now);
            return Ok(false);
        }
        let failed = (0..count).any(|row| step.faults.has(row));
        (self.done, self.failed) =
            (self.done + u64::from(!failed), self.failed + u64::from(failed));
        if !failed {
            self.last_done = world;
        }
        self.step = None;
        Ok(true)
    }
}

pub(super) fn layers() -> Vec<PlacedLayer> {
    (0..LAYERS).map(|layer| PlacedLayer { layer, experts: EXPERTS, slab_bytes: 1 }).collect()
}
