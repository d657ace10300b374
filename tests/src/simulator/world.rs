//! Events in virtual time: the network between coordinators and workers, and what happens when.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque},
    time::{Duration, Instant},
};

use shimmer_proto::{
    expert::v1::{ExpertResult, WorkerError},
    membership::{
        MembershipStore as _,
        memory::{MemoryCluster, MemoryStore},
        records::{WORKERS, WorkerRecord},
    },
};

use super::{
    DIGEST, Mutation, Tally,
    coordinator::{DEADLINE, ModelCoordinator},
    dice::Dice,
    faults::Fault,
    oracle::Oracle,
    worker::{ModelWorker, Order, Owned},
};

/// Faults begin before this.
const FAULTS_UNTIL: Duration = Duration::from_secs(8);
/// Everything is whole again.
const HEALED_AT: Duration = Duration::from_secs(10);
/// By then requests complete again.
const END: Duration = Duration::from_secs(18);
/// Leases end so long after the last contact.
const TTL: Duration = Duration::from_secs(2);
/// How often coordinators look at what nobody told them.
const TICK: Duration = Duration::from_millis(100);
/// How often the store's clock is told the time.
const STORE_TICK: Duration = Duration::from_millis(250);
/// A blocked message is tried again.
const BLOCKED: Duration = Duration::from_millis(25);

/// Something that happens at a time.
#[derive(Debug)]
pub(super) enum Event {
    Tick,
    Fault(Fault),
    Heal(Fault),
    HealAll,
    /// A coordinator tries to connect.
    Connect {
        coordinator: usize,
        worker: usize,
        epoch: u64,
    },
    /// An order arrives, unless it is blocked.
    Pump {
        coordinator: usize,
        worker: usize,
        session: u64,
    },
    /// A message of an ended session arrives in the present one.
    Stray {
        coordinator: usize,
        worker: usize,
        order: Order,
    },
    /// An assignment has been loaded.
    Loaded {
        coordinator: usize,
        worker: usize,
        session: u64,
        number: u64,
        generation: u64,
        owned: Owned,
    },
    Ready {
        coordinator: usize,
        worker: usize,
        session: u64,
        generation: u64,
    },
    Reply {
        coordinator: usize,
        worker: usize,
        session: u64,
        outcome: Box<Result<ExpertResult, WorkerError>>,
    },
    /// A link that may be dead is looked at.
    Probe {
        coordinator: usize,
        worker: usize,
        session: u64,
    },
    /// A layer may be late.
    Due {
        coordinator: usize,
        round: u64,
    },
    NextStep {
        coordinator: usize,
        epoch: u64,
    },
}

struct Scheduled {
    at: Duration,
    number: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// The cluster and everything around it.
pub(super) struct World {
    pub(super) dice: Dice,
    mutation: Option<Mutation>,
    now: Duration,
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
    pipes: BTreeMap<u64, (VecDeque<Order>, Duration)>,
    /// Sessions and the generations that were ready in them.
    readied: BTreeSet<(u64, u64)>,
    sessions: u64,
    epochs: u64,
    copies: usize,
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
            copies: 1 + dice.below(3),
            oracle: Oracle::default(),
            tally: Tally { schedules: 1, ..Tally::default() },
            trace: trace.then(Vec::new),
            cluster,
            dice,
        };
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
    fn clock(&self, coordinator: usize) -> Instant {
        self.origin + self.now + self.coordinators[coordinator].ahead
    }

    pub(super) fn run(&mut self) -> Result<Tally, String> {
        while let Some(Reverse(Scheduled { at, event, .. })) = self.queue.pop() {
            if at > END {
                break;
            }
            self.now = at;
            self.tally.events += 1;
            // Each time costs a look at every member; leases last long enough for that.
            let behind = at.saturating_sub(self.cluster.now());
            let touches_store = matches!(event, Event::Fault(_) | Event::Heal(_) | Event::HealAll);
            if touches_store || behind >= STORE_TICK {
                self.cluster.advance(behind);
            }
            self.happen(event)?;
        }
        self.check_healed()?;
        for coordinator in &self.coordinators {
            self.tally.completed += coordinator.done;
            self.tally.unavailable += coordinator.failed;
            let dropped = coordinator.transport.ledger.dropped();
            self.tally.dropped += dropped.duplicate + dropped.stale + dropped.unknown;
        }
        self.tally.refused = self.workers.iter().map(|worker| worker.refused).sum();
        self.tally.generations = self.oracle.generations() as u64;
        Ok(self.tally)
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Tick => self.tick(),
            Event::Fault(fault) => self.begin(fault),
            Event::Heal(fault) => self.heal(fault),
            Event::HealAll => self.heal_all(),
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
            Event::Reply { coordinator, worker, session, outcome } => {
                self.reply(coordinator, worker, session, outcome)
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
        Ok(())
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

    /// Whether a direction between two hosts is blocked: 0 to the worker, 1 from it.
    fn is_blocked(&self, coordinator: usize, worker: usize, direction: usize) -> bool {
        let ModelWorker { paused, .. } = self.workers[worker];
        self.cut[coordinator][worker][direction] || paused || !self.workers[worker].is_alive()
    }

    fn reaches(&self, coordinator: usize, worker: usize, session: u64) -> bool {
        let of = self.workers[worker].sessions.get(&coordinator);
        of.is_some_and(|of| of.number == session)
            && !self.is_blocked(coordinator, worker, 0)
            && !self.is_blocked(coordinator, worker, 1)
    }

    /// Something happens to a worker, for one coordinator or for all: links find out after a while.
    pub(super) fn trouble(&mut self, only: Option<usize>, worker: usize) {
        for coordinator in 0..self.coordinators.len() {
            if only.is_some_and(|only| only != coordinator) {
                continue;
            }
            self.coordinators[coordinator].disturb(worker);
            if let Some(session) = self.coordinators[coordinator].links[worker].session {
                // A dead process is told by its kernel, mostly; silence is found by keepalive.
                let told = !self.workers[worker].is_alive() && self.dice.chance(70);
                let wait = if told { self.dice.ms(1, 50) } else { self.dice.ms(1000, 1500) };
                self.after(wait, Event::Probe { coordinator, worker, session });
            }
        }
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
        ModelCoordinator::new(index, self.epochs, &self.workers, &self.cluster, self.copies, now)
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
        self.tally.completed += self.coordinators[coordinator].done;
        let mut fresh = self.process(coordinator);
        fresh.last_done = self.coordinators[coordinator].last_done;
        self.coordinators[coordinator] = fresh;
        self.launch(coordinator);
    }

    fn connect(&mut self, coordinator: usize, worker: usize, epoch: u64) {
        let clock = self.clock(coordinator);
        let of = &mut self.coordinators[coordinator];
        if of.epoch != epoch || of.links[worker].session.is_some() {
            return;
        }
        let blocked =
            self.is_blocked(coordinator, worker, 0) || self.is_blocked(coordinator, worker, 1);
        if blocked || !self.coordinators[coordinator].knows(worker) {
            let wait = self.dice.ms(100, 250);
            return self.after(wait, Event::Connect { coordinator, worker, epoch });
        }
        self.sessions += 1;
        let session = self.sessions;
        self.note(|| format!("c{coordinator} connects to w{worker}: session {session}"));
        self.workers[worker].open(coordinator, session, epoch);
        self.pipes.insert(session, (VecDeque::new(), self.now));
        self.coordinators[coordinator].connected(worker, session, self.mutation, clock);
        self.flush(coordinator);
    }

    /// A session ends for its coordinator.
    pub(super) fn lose(&mut self, coordinator: usize, worker: usize) -> Result<(), String> {
        let Some(session) = self.coordinators[coordinator].links[worker].session else {
            return Ok(());
        };
        self.note(|| format!("c{coordinator} loses w{worker}: session {session}"));
        self.strays(coordinator, worker, session);
        let clock = self.clock(coordinator);
        self.coordinators[coordinator].lost(worker, clock);
        self.reconnect(coordinator, worker);
        self.settle(coordinator)
    }

    fn reconnect(&mut self, coordinator: usize, worker: usize) {
        let epoch = self.coordinators[coordinator].epoch;
        let wait = self.dice.ms(50, 250);
        self.after(wait, Event::Connect { coordinator, worker, epoch });
    }

    /// What is on its way when a session ends is lost, or comes when nobody expects it any more.
    fn strays(&mut self, coordinator: usize, worker: usize, session: u64) {
        let Some((orders, _)) = self.pipes.remove(&session) else { return };
        for order in orders {
            if matches!(order, Order::Work(_)) && self.dice.chance(50) {
                let wait = self.dice.ms(1, 1500);
                self.after(wait, Event::Stray { coordinator, worker, order });
            }
        }
    }

    /// Carries out what a coordinator wants, and goes on with its step.
    fn settle(&mut self, coordinator: usize) -> Result<(), String> {
        loop {
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

    fn flush_trace(&mut self, coordinator: usize) {
        self.note(|| format!("c{coordinator} breaks a rule"));
    }

    fn flush(&mut self, coordinator: usize) {
        let transport = &mut self.coordinators[coordinator].transport;
        let (outbox, suspected, given_up) = (
            std::mem::take(&mut transport.outbox),
            std::mem::take(&mut transport.suspected),
            std::mem::take(&mut transport.given_up),
        );
        for (worker, order) in outbox {
            let Some(session) = self.coordinators[coordinator].links[worker].session else {
                continue;
            };
            let delay = self.dice.ms(0, 8);
            let Some((pipe, last)) = self.pipes.get_mut(&session) else { continue };
            pipe.push_back(order);
            // In the order of the stream.
            *last = (self.now + delay).max(*last + Duration::from_micros(1));
            let at = *last;
            self.at(at, Event::Pump { coordinator, worker, session });
        }
        for worker in suspected {
            if let Some(session) = self.coordinators[coordinator].links[worker].session {
                let wait = Duration::from_millis(600);
                self.after(wait, Event::Probe { coordinator, worker, session });
            }
        }
        for worker in given_up {
            if let Some(session) = self.coordinators[coordinator].links[worker].session {
                self.note(|| format!("c{coordinator} gives w{worker} up"));
                self.strays(coordinator, worker, session);
                let clock = self.clock(coordinator);
                self.coordinators[coordinator].lost(worker, clock);
                self.reconnect(coordinator, worker);
            }
        }
    }

    fn pump(&mut self, coordinator: usize, worker: usize, session: u64) -> Result<(), String> {
        if !self.pipes.contains_key(&session) {
            return Ok(());
        }
        let here = self.workers[worker].sessions.get(&coordinator).map(|of| of.number);
        if self.workers[worker].is_alive() && here != Some(session) {
            // The process that had the session is gone: its successor resets the connection.
            return self.lose(coordinator, worker);
        }
        if self.is_blocked(coordinator, worker, 0) {
            self.after(BLOCKED, Event::Pump { coordinator, worker, session });
            return Ok(());
        }
        let order = self.pipes.get_mut(&session).and_then(|(pipe, _)| pipe.pop_front());
        order.map_or(Ok(()), |order| self.obey(coordinator, worker, order))
    }

    /// A worker gets an order.
    fn obey(&mut self, coordinator: usize, worker: usize, order: Order) -> Result<(), String> {
        let of = self.workers[worker].sessions.get_mut(&coordinator).expect("the session is there");
        let session = of.number;
        match order {
            Order::Assign { stamp, owned } => {
                let (number, _) = of.generations.begin(stamp);
                let generation = stamp.generation;
                let wait = self.dice.ms(20, 500);
                let event =
                    Event::Loaded { coordinator, worker, session, number, generation, owned };
                self.after(wait, event);
            }
            Order::Release { stamp } => drop(of.generations.release(stamp)),
            Order::Adopt { stamp, owned } => {
                if let Some(held) = of.generations.admitting_mut(stamp) {
                    held.extend(owned);
                }
            }
            Order::Work(work) => {
                let outcome = self.workers[worker].work(coordinator, &work, self.mutation)?;
                if let Err(error) = &outcome {
                    self.note(|| format!("w{worker} refuses {:?}: {}", work.fence, error.detail));
                }
                let twice = if self.dice.chance(10) { 2 } else { 1 };
                for _ in 0..twice {
                    let wait = self.dice.ms(1, 20) * if self.workers[worker].slow { 20 } else { 1 };
                    let outcome = Box::new(outcome.clone());
                    self.after(wait, Event::Reply { coordinator, worker, session, outcome });
                }
            }
        }
        Ok(())
    }

    fn loaded(&mut self, coordinator: usize, worker: usize, numbers: [u64; 3], owned: Owned) {
        let [session, number, generation] = numbers;
        let Some(of) = self.workers[worker].sessions.get_mut(&coordinator) else { return };
        if of.number == session && of.generations.ready(number, owned).is_ok() {
            self.readied.insert((session, generation));
            let wait = self.dice.ms(0, 8);
            self.after(wait, Event::Ready { coordinator, worker, session, generation });
        }
    }

    fn reply(
        &mut self,
        coordinator: usize,
        worker: usize,
        session: u64,
        outcome: Box<Result<ExpertResult, WorkerError>>,
    ) -> Result<(), String> {
        if !self.workers[worker].is_alive() {
            return Ok(());
        }
        if self.is_blocked(coordinator, worker, 1) {
            self.after(BLOCKED, Event::Reply { coordinator, worker, session, outcome });
            return Ok(());
        }
        // One of a session that has ended is mostly lost, and sometimes comes all the same.
        let present = self.coordinators[coordinator].links[worker].session;
        if present.is_none() || present != Some(session) && self.dice.chance(50) {
            return Ok(());
        }
        let clock = self.clock(coordinator);
        self.coordinators[coordinator].reply(worker, *outcome, self.mutation, clock);
        self.settle(coordinator)
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
        for coordinator in &self.coordinators {
            let id = &coordinator.id;
            if coordinator.last_done < END - Duration::from_secs(3) {
                let last = coordinator.last_done.as_secs_f64();
                return Err(format!("{id}: the last step that completed ended at {last:.3} s"));
            }
            let placed = coordinator.placed_on();
            if placed != all {
                return Err(format!("{id}: the placement is on {placed:?}, expected {all:?}"));
            }
        }
        Ok(())
    }
}
