//! The cluster in virtual time: who there is, and what happens when.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque},
    time::{Duration, Instant},
};

use shimmer_proto::membership::{
    MembershipStore as _,
    memory::{Backup, MemoryCluster, MemoryStore},
    records::{PLACEMENT, PlacementRecord, WORKERS, WorkerRecord},
};

use super::{
    DIGEST, Mutation, Tally,
    coordinator::{DEADLINE, ModelCoordinator, Shape},
    events::{Event, Scheduled},
    network::BLOCKED,
    oracle::Oracle,
    worker::{ModelWorker, Order},
};
use crate::dice::Dice;

/// Faults begin before this.
const FAULTS_UNTIL: Duration = Duration::from_secs(8);
/// Everything is whole again.
const HEALED_AT: Duration = Duration::from_secs(10);
/// By then requests complete again.
const END: Duration = Duration::from_secs(18);
/// Leases end so long after the last contact.
pub(super) const TTL: Duration = Duration::from_secs(2);
/// How often coordinators look at what nobody told them.
const TICK: Duration = Duration::from_millis(100);
/// How often the store's clock is told the time.
pub(super) const STORE_TICK: Duration = Duration::from_millis(250);
/// The cluster and everything around it.
pub(super) struct World {
    pub(super) dice: Dice,
    pub(super) mutation: Option<Mutation>,
    pub(super) now: Duration,
    origin: Instant,
    queue: BinaryHeap<Reverse<Scheduled>>,
    scheduled: u64,
    pub(super) cluster: MemoryCluster,
    pub(super) operator: MemoryStore,
    pub(super) workers: Vec<ModelWorker>,
    pub(super) coordinators: Vec<ModelCoordinator>,
    /// By coordinator and worker: blocked towards the worker, blocked from it.
    pub(super) cut: Vec<Vec<[bool; 2]>>,
    /// Orders on their way, by session.
    pub(super) pipes: BTreeMap<u64, (VecDeque<Order>, Duration)>,
    /// Sessions and the generations that were ready in them.
    pub(super) readied: BTreeSet<(u64, u64)>,
    pub(super) sessions: u64,
    epochs: u64,
    seed: u64,
    copies: usize,
    /// Share of messages that are computed by two workers where there are two, in ten thousandths.
    pub(super) audit_per_10k: u32,
    /// What the store held at some time.
    pub(super) backup: Option<Backup>,
    /// When the store was restored last.
    pub(super) restored: Option<Duration>,
    /// Workers that are to be stopped once they are drained.
    pub(super) waited: BTreeSet<usize>,
    /// The worker that computed other bytes, since it did.
    pub(super) liar: Option<usize>,
    pub(super) oracle: Oracle,
    pub(super) tally: Tally,
    trace: Option<Vec<String>>,
}

impl World {
    pub(super) fn new(seed: u64, mutation: Option<Mutation>, trace: bool) -> Self {
        let mut dice = Dice::new(seed);
        let cluster = MemoryCluster::new(TTL);
        let hosts = 1 + dice.below(4);
        let workers = (0..1 + dice.below(6)).map(|index| ModelWorker {
            id: format!("w{index}"),
            host: format!("h{}", index % hosts),
            incarnation: 0,
            store: None,
            paused: false,
            slow: false,
            max_rows: 1 + dice.below(3),
            lies: false,
            sessions: BTreeMap::new(),
            refused: 0,
        });
        let workers: Vec<ModelWorker> = workers.collect();
        let count = 1 + dice.below(3);
        let mut world = Self {
            mutation,
            now: Duration::ZERO,
            origin: Instant::now(),
            queue: BinaryHeap::new(),
            scheduled: 0,
            operator: cluster.member(),
            cut: vec![vec![[false; 2]; workers.len()]; count],
            workers,
            coordinators: Vec::new(),
            pipes: BTreeMap::new(),
            readied: BTreeSet::new(),
            sessions: 0,
            epochs: 0,
            seed,
            copies: 1 + dice.below(3),
            audit_per_10k: share_of(seed),
            backup: None,
            restored: None,
            waited: BTreeSet::new(),
            liar: None,
            oracle: Oracle::default(),
            tally: Tally::default(),
            trace: trace.then(Vec::new),
            cluster,
            dice,
        };
        world.tally.count("schedules", 1);
        world.tally.count(share_name(world.audit_per_10k), 1);
        (0..world.workers.len()).for_each(|worker| world.start(worker));
        for index in 0..count {
            let coordinator = world.process(index);
            world.coordinators.push(coordinator);
            world.launch(index);
        }
        world.at(TICK, Event::Tick);
        world.at(HEALED_AT, Event::HealAll);
        world.plan_faults(FAULTS_UNTIL);
        world
    }

    pub(super) fn into_trace(self) -> Vec<String> {
        self.trace.unwrap_or_default()
    }

    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:9.3} {}", self.now.as_secs_f64(), text()));
        }
    }

    pub(super) fn at(&mut self, at: Duration, event: Event) {
        self.scheduled += 1;
        self.queue.push(Reverse(Scheduled { at, number: self.scheduled, event }));
    }

    pub(super) fn after(&mut self, wait: Duration, event: Event) {
        self.at(self.now + wait, event);
    }

    /// The time by a coordinator's clock.
    pub(super) fn clock(&self, coordinator: usize) -> Instant {
        self.origin + self.now + self.coordinators[coordinator].ahead
    }

    pub(super) fn run(&mut self) -> Result<Tally, String> {
        let mut events = 0;
        while let Some(Reverse(Scheduled { at, event, .. })) = self.queue.pop() {
            if at > END {
                break;
            }
            self.now = at;
            events += 1;
            // Each time costs a look at every member; leases last long enough for that.
            let behind = at.saturating_sub(self.cluster.now());
            let touches_store =
                matches!(event, Event::Fault(_) | Event::Heal(_) | Event::HealAll | Event::Backup);
            if touches_store || behind >= STORE_TICK {
                self.cluster.advance(behind);
            }
            self.happen(event)?;
        }
        self.check_healed()?;
        (0..self.coordinators.len()).for_each(|coordinator| self.count(coordinator));
        let refused = self.workers.iter().map(|worker| worker.refused).sum();
        for (what, times) in [
            ("events", events),
            ("orders refused as stale", refused),
            ("placements", self.oracle.written()),
        ] {
            self.tally.count(what, times);
        }
        Ok(self.tally.clone())
    }

    /// Adds what one run of a coordinator did.
    fn count(&mut self, coordinator: usize) {
        let run = self.coordinators[coordinator].tally();
        self.tally.add(&run);
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Tick => self.tick(),
            Event::Fault(fault) => self.begin(fault),
            Event::Heal(fault) => self.heal(fault),
            Event::HealAll => self.heal_all(),
            Event::Backup => {
                self.backup = Some(self.cluster.backup());
                Ok(())
            }
            Event::Connect { coordinator, worker, epoch } => {
                self.connect(coordinator, worker, epoch);
                Ok(())
            }
            Event::Pump { coordinator, worker, session } => self.pump(coordinator, worker, session),
            Event::Stray { coordinator, worker, order } => {
                let blocked = self.is_blocked(coordinator, worker, 0);
                if blocked || !self.workers[worker].sessions.contains_key(&coordinator) {
                    return Ok(());
                }
                self.tally.count("stray orders", 1);
                self.note(|| format!("a stray order from c{coordinator} reaches w{worker}"));
                self.obey(coordinator, worker, order)
            }
            Event::Loaded { coordinator, worker, session, number, generation, owned } => {
                self.loaded(coordinator, worker, [session, number, generation], owned);
                Ok(())
            }
            Event::Ready { coordinator, worker, session, generation } => {
                if self.coordinators[coordinator].links[worker].session != Some(session) {
                    return Ok(());
                }
                if self.is_blocked(coordinator, worker, 1) {
                    let again = Event::Ready { coordinator, worker, session, generation };
                    self.after(BLOCKED, again);
                    return Ok(());
                }
                self.coordinators[coordinator].ready(worker, generation);
                Ok(())
            }
            Event::Reply { coordinator, worker, session, answer } => {
                self.reply(coordinator, worker, session, answer)
            }
            Event::Disproved { coordinator, worker, session } => {
                self.disproved(coordinator, worker, session)
            }
            Event::Probe { coordinator, worker, session } => {
                let up = self.coordinators[coordinator].links[worker].session == Some(session);
                if up && !self.reaches(coordinator, worker, session) {
                    self.lose(coordinator, worker)?;
                }
                Ok(())
            }
            Event::Due { coordinator, round } => {
                let of = &self.coordinators[coordinator];
                if of.step.as_ref().is_some_and(|step| step.round == round) {
                    let clock = self.clock(coordinator);
                    self.coordinators[coordinator].tick(clock);
                    return self.settle(coordinator);
                }
                Ok(())
            }
            Event::NextStep { coordinator, epoch } => self.next_step(coordinator, epoch),
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        self.after(TICK, Event::Tick);
        for coordinator in 0..self.coordinators.len() {
            let clock = self.clock(coordinator);
            let of = &mut self.coordinators[coordinator];
            of.control(&self.cluster, &mut self.oracle, self.mutation, clock)?;
            // Its clock may have jumped.
            of.tick(clock);
            self.settle(coordinator)?;
            let of = &self.coordinators[coordinator];
            if let Some(step) = &of.step
                && clock > step.begun + DEADLINE + Duration::from_secs(1)
            {
                return Err(format!("{}: a layer hangs", of.id));
            }
            self.boundary(coordinator)?;
            self.settle(coordinator)?;
        }
        self.stop_drained()
    }

    fn boundary(&mut self, coordinator: usize) -> Result<(), String> {
        let clock = self.clock(coordinator);
        let of = &mut self.coordinators[coordinator];
        if of.step.is_none() {
            let readied = |session, generation| self.readied.contains(&(session, generation));
            if let Some(generation) = of.boundary(&self.oracle, readied, clock)? {
                self.note(|| format!("c{coordinator} serves by generation {generation}"));
            }
        }
        Ok(())
    }

    /// Starts a worker's process, unless it runs.
    pub(super) fn start(&mut self, worker: usize) {
        if self.workers[worker].is_alive() {
            return;
        }
        let of = &mut self.workers[worker];
        of.incarnation += 1;
        let record = WorkerRecord {
            address: format!("{}:1", of.id),
            host: of.host.clone(),
            weight: 1.0,
            ram_budget_bytes: 0,
            absent_layers: Vec::new(),
            container_digest: DIGEST.to_owned(),
            incarnation: of.incarnation,
            draining: false,
        };
        let store = self.cluster.member();
        let value = serde_json::to_string(&record).expect("a record is plain data");
        store.announce(&format!("{WORKERS}{}", of.id), value);
        of.store = Some(store);
    }

    fn process(&mut self, index: usize) -> ModelCoordinator {
        self.epochs += 1;
        let now = self.origin + self.now;
        let Self { seed, copies, audit_per_10k, mutation, .. } = *self;
        let shape = Shape { seed, copies, audit_per_10k, mutation };
        ModelCoordinator::new(index, self.epochs, &self.workers, &self.cluster, shape, now)
    }

    fn launch(&mut self, coordinator: usize) {
        let epoch = self.coordinators[coordinator].epoch;
        for worker in 0..self.workers.len() {
            let wait = self.dice.ms(1, 200);
            self.after(wait, Event::Connect { coordinator, worker, epoch });
        }
        let wait = self.dice.ms(1, 400);
        self.after(wait, Event::NextStep { coordinator, epoch });
    }

    /// A coordinator's process ends and another one begins. What was out stays out, with the epoch of before.
    pub(super) fn restart(&mut self, coordinator: usize) {
        for worker in 0..self.workers.len() {
            if let Some(session) = self.coordinators[coordinator].links[worker].session {
                self.strays(coordinator, worker, session);
            }
        }
        self.count(coordinator);
        let mut fresh = self.process(coordinator);
        let before = &mut self.coordinators[coordinator];
        fresh.last_done = before.last_done;
        // Written into the store in a real cluster.
        fresh.transport.quarantined = std::mem::take(&mut before.transport.quarantined);
        fresh.liar = before.liar;
        self.coordinators[coordinator] = fresh;
        self.launch(coordinator);
    }

    /// Carries out what a coordinator wants, and goes on with its step.
    pub(super) fn settle(&mut self, coordinator: usize) -> Result<(), String> {
        loop {
            self.check_quarantines(coordinator)?;
            self.flush(coordinator);
            let clock = self.clock(coordinator);
            let round = self.coordinators[coordinator].rounds;
            let of = &mut self.coordinators[coordinator];
            let ended = of
                .advance(&mut self.dice, self.now, clock)
                .inspect_err(|_| self.flush_trace(coordinator))?;
            let of = &self.coordinators[coordinator];
            if ended {
                let epoch = of.epoch;
                let wait = self.dice.ms(100, 900);
                self.after(wait, Event::NextStep { coordinator, epoch });
            } else if let Some(due) = of.step.as_ref().and_then(|step| step.due) {
                let round = of.rounds;
                let at = (due - of.ahead).saturating_duration_since(self.origin).max(self.now);
                self.at(at, Event::Due { coordinator, round });
            }
            if self.coordinators[coordinator].rounds == round {
                return Ok(());
            }
        }
    }

    /// Who computes what everybody computes is never taken out of service. What a worker said before it was mended may come
    /// out afterwards; then it is readmitted once more.
    fn check_quarantines(&mut self, coordinator: usize) -> Result<(), String> {
        let quarantined = &mut self.coordinators[coordinator].transport.quarantined;
        if let Some(&worker) = quarantined.iter().find(|&&worker| self.liar != Some(worker)) {
            return Err(format!("c{coordinator} quarantines w{worker}, which is honest"));
        }
        let workers = &self.workers;
        quarantined.retain(|&worker| workers[worker].lies);
        Ok(())
    }

    fn flush_trace(&mut self, coordinator: usize) {
        self.note(|| format!("c{coordinator} breaks a rule"));
    }

    fn next_step(&mut self, coordinator: usize, epoch: u64) -> Result<(), String> {
        if self.coordinators[coordinator].epoch != epoch {
            return Ok(());
        }
        self.boundary(coordinator)?;
        self.flush(coordinator);
        if !self.coordinators[coordinator].is_complete() {
            // Not admitted.
            let wait = self.dice.ms(50, 150);
            self.after(wait, Event::NextStep { coordinator, epoch });
            return Ok(());
        }
        let clock = self.clock(coordinator);
        let dice = &mut self.dice;
        self.coordinators[coordinator].begin_step(dice, clock);
        for worker in 0..self.workers.len() {
            let of = &self.workers[worker];
            let link = &self.coordinators[coordinator].links[worker];
            let whole = link.session.is_some_and(|session| {
                self.reaches(coordinator, worker, session)
                    && of.is_ready(coordinator, self.coordinators[coordinator].generation())
            });
            if !whole || of.slow {
                self.coordinators[coordinator].disturb(worker);
            }
        }
        self.settle(coordinator)
    }

    /// Long after the last fault everything works again.
    fn check_healed(&self) -> Result<(), String> {
        let all: Vec<String> = self.workers.iter().map(|worker| worker.id.clone()).collect();
        let placement = self.cluster.snapshot().entries.get(PLACEMENT).cloned();
        let placement =
            placement.map(|entry| serde_json::from_str::<PlacementRecord>(&entry.value));
        let placement = placement.and_then(Result::ok).map(|record| record.generation);
        for coordinator in &self.coordinators {
            let id = &coordinator.id;
            if coordinator.last_done < END - Duration::from_secs(3) {
                let last = coordinator.last_done.as_secs_f64();
                let state = coordinator.state();
                return Err(format!(
                    "{id}: the last step that completed ended at {last:.3} s; {state}"
                ));
            }
            // Also where the store went back: whoever had followed a later placement has got a newer one.
            if placement != Some(coordinator.generation()) {
                let state = coordinator.state();
                return Err(format!(
                    "{id} does not serve by the placement in the store, generation {placement:?}: {state}"
                ));
            }
            let placed = coordinator.placed_on();
            if placed != all {
                return Err(format!("{id}: the placement is on {placed:?}, expected {all:?}"));
            }
        }
        Ok(())
    }
}

/// The share of messages that is compared in a schedule, in ten thousandths.
fn share_of(seed: u64) -> u32 {
    match Dice::new(!seed).below(100) {
        0..70 => 0,
        70..75 => 100,
        75..80 => 500,
        80..86 => 5_000,
        _ => 10_000,
    }
}

fn share_name(per_10k: u32) -> &'static str {
    match per_10k {
        0 => "schedules without comparisons",
        100 => "schedules that compare one in a hundred",
        500 => "schedules that compare one in twenty",
        5_000 => "schedules that compare one in two",
        _ => "schedules that compare all",
    }
}
