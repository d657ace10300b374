//! The network between coordinators and workers: sessions, orders in the order of their stream, replies in any order, and
//! what is left of both when a session ends.

use std::{collections::VecDeque, time::Duration};

use shimmer_proto::expert::v1::{ErrorCode, ExpertWork, WorkerError};

use super::{
    events::Event,
    worker::{Answer, ModelWorker, Order, Owned, refusal},
    world::World,
};

/// A blocked message is tried again.
pub(super) const BLOCKED: Duration = Duration::from_millis(25);

impl World {
    /// Whether a direction between two hosts is blocked: 0 to the worker, 1 from it.
    pub(super) fn is_blocked(&self, coordinator: usize, worker: usize, direction: usize) -> bool {
        let ModelWorker { paused, .. } = self.workers[worker];
        self.cut[coordinator][worker][direction] || paused || !self.workers[worker].is_alive()
    }

    pub(super) fn reaches(&self, coordinator: usize, worker: usize, session: u64) -> bool {
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

    pub(super) fn connect(&mut self, coordinator: usize, worker: usize, epoch: u64) {
        let clock = self.clock(coordinator);
        let of = &mut self.coordinators[coordinator];
        if of.epoch != epoch || of.links[worker].session.is_some() {
            return;
        }
        let blocked =
            self.is_blocked(coordinator, worker, 0) || self.is_blocked(coordinator, worker, 1);
        let of = &self.coordinators[coordinator];
        if blocked || !of.knows(worker) || of.transport.quarantined.contains(&worker) {
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
    pub(super) fn strays(&mut self, coordinator: usize, worker: usize, session: u64) {
        let Some((orders, _)) = self.pipes.remove(&session) else { return };
        for order in orders {
            if matches!(order, Order::Work(_)) && self.dice.chance(50) {
                let wait = self.dice.ms(1, 1500);
                self.after(wait, Event::Stray { coordinator, worker, order });
            }
        }
    }

    pub(super) fn flush(&mut self, coordinator: usize) {
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

    pub(super) fn pump(
        &mut self,
        coordinator: usize,
        worker: usize,
        session: u64,
    ) -> Result<(), String> {
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
    pub(super) fn obey(
        &mut self,
        coordinator: usize,
        worker: usize,
        order: Order,
    ) -> Result<(), String> {
        let lies = self.workers[worker].lies;
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
            Order::Prove if lies => {
                let wait = self.dice.ms(1, 20);
                self.after(wait, Event::Disproved { coordinator, worker, session });
            }
            Order::Prove => {}
            Order::Work(work) => {
                let answer = Box::new(self.answer(coordinator, worker, &work)?);
                self.note(|| {
                    let (rows, experts) = (work.row_count, &work.experts);
                    format!(
                        "c{coordinator} has w{worker} compute {experts:?} of {rows} rows: {answer}"
                    )
                });
                if self.dice.chance(10) {
                    self.tally.count("replies doubled", 1);
                    self.send_back(coordinator, worker, session, answer.clone());
                }
                self.send_back(coordinator, worker, session, answer);
            }
        }
        Ok(())
    }

    /// What a worker says to work: sometimes that it came damaged, and a liar that it overflows.
    fn answer(
        &mut self,
        coordinator: usize,
        worker: usize,
        work: &ExpertWork,
    ) -> Result<Answer, String> {
        let outcome = self.workers[worker].work(coordinator, work, self.mutation)?;
        let mut answer = Answer { lies: self.workers[worker].lies && outcome.is_ok(), outcome };
        if answer.outcome.is_ok() && self.dice.chance(1) {
            self.tally.count("frames damaged", 1);
            let error = refusal(work, ErrorCode::Checksum, "the frame is damaged");
            answer = Answer { outcome: Err(error), lies: false };
            self.coordinators[coordinator].disturb(worker);
        } else if answer.lies && self.dice.chance(10) {
            self.tally.count("overflows that are lies", 1);
            let error = refusal(work, ErrorCode::Overflow, "a lie");
            answer.outcome = Err(WorkerError { rows: vec![0], ..error });
        }
        Ok(answer)
    }

    fn send_back(&mut self, coordinator: usize, worker: usize, session: u64, answer: Box<Answer>) {
        let wait = self.dice.ms(1, 20) * if self.workers[worker].slow { 20 } else { 1 };
        self.after(wait, Event::Reply { coordinator, worker, session, answer });
    }

    /// A worker that had to prove itself could not.
    pub(super) fn disproved(
        &mut self,
        coordinator: usize,
        worker: usize,
        session: u64,
    ) -> Result<(), String> {
        if self.coordinators[coordinator].links[worker].session != Some(session) {
            return Ok(());
        }
        if self.is_blocked(coordinator, worker, 1) {
            self.after(BLOCKED, Event::Disproved { coordinator, worker, session });
            return Ok(());
        }
        self.tally.count("liars found by a proof", 1);
        self.coordinators[coordinator].transport.quarantined.insert(worker);
        self.lose(coordinator, worker)
    }

    pub(super) fn loaded(
        &mut self,
        coordinator: usize,
        worker: usize,
        numbers: [u64; 3],
        owned: Owned,
    ) {
        let [session, number, generation] = numbers;
        let Some(of) = self.workers[worker].sessions.get_mut(&coordinator) else { return };
        if of.number == session && of.generations.ready(number, owned).is_ok() {
            self.readied.insert((session, generation));
            let wait = self.dice.ms(0, 8);
            self.after(wait, Event::Ready { coordinator, worker, session, generation });
        }
    }

    pub(super) fn reply(
        &mut self,
        coordinator: usize,
        worker: usize,
        session: u64,
        answer: Box<Answer>,
    ) -> Result<(), String> {
        if !self.workers[worker].is_alive() {
            return Ok(());
        }
        if self.is_blocked(coordinator, worker, 1) {
            self.after(BLOCKED, Event::Reply { coordinator, worker, session, answer });
            return Ok(());
        }
        // One of a session that has ended is mostly lost, and sometimes comes all the same.
        let present = self.coordinators[coordinator].links[worker].session;
        if present.is_none() || present != Some(session) && self.dice.chance(50) {
            return Ok(());
        }
        self.note(|| format!("c{coordinator} hears w{worker}: {answer}"));
        let clock = self.clock(coordinator);
        self.coordinators[coordinator].reply(worker, *answer, self.mutation, clock);
        self.settle(coordinator)
    }
}
