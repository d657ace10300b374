//! What goes wrong with the network, the processes and the clocks, and how it is undone.

use std::{sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;
use turmoil::Sim;

use super::{
    host::{Shared, Tasks, lock},
    world::{COORDINATOR, LONGEST_LATENCY, WorkerHost},
};
use crate::dice::Dice;

/// What has really been done to a cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Injected {
    /// Partitions in both directions.
    pub partitions: u64,
    /// Partitions in one direction.
    pub one_way: u64,
    /// Of all these, those that cut an open connection.
    pub cut_open: u64,
    /// Times that everything between two hosts was held back, and then came at once.
    pub holds: u64,
    /// Links that became slow.
    pub slow: u64,
    /// Workers whose process died.
    pub crashes: u64,
    /// Workers that were asked to stop, and were started again.
    pub stops: u64,
    /// Open connections that were reset.
    pub resets: u64,
    /// Clocks that jumped.
    pub jumps: u64,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Nothing passes.
    Partition { worker: usize },
    /// Nothing passes in one direction.
    OneWay { worker: usize, to: bool },
    /// What is said comes later, all at once.
    Hold { worker: usize },
    /// Messages take long.
    Slow { worker: usize },
    /// A process dies; silently as with its host, or so that the network tells its peers.
    Crash { worker: usize, silently: bool },
    /// A process is asked to stop.
    Stop { worker: usize },
    /// Connections break.
    Reset { worker: usize },
    /// A clock goes ahead: a worker's, or the coordinator's.
    Jump { worker: Option<usize>, by: Duration },
}

/// The faults of a schedule.
pub(super) struct Faults {
    dice: Dice,
    /// What is still to begin or to end, at which turn.
    due: Vec<(u64, bool, Fault)>,
    pub(super) injected: Injected,
    /// What happened when.
    pub(super) trace: Vec<String>,
}

impl Faults {
    pub(super) fn new(dice: Dice) -> Self {
        Self { dice, due: Vec::new(), injected: Injected::default(), trace: Vec::new() }
    }

    /// Draws what goes wrong from now on.
    pub(super) fn plan(&mut self, now: u64, workers: usize) {
        let mut at = now;
        for _ in 0..4 + self.dice.below(6) {
            at += 10 + self.dice.below(250) as u64;
            let fault = self.draw(workers);
            self.due.push((at, true, fault));
        }
    }

    /// Whether there is nothing left to begin.
    pub(super) fn have_begun(&self) -> bool {
        !self.due.iter().any(|(_, begins, _)| *begins)
    }

    fn draw(&mut self, workers: usize) -> Fault {
        let worker = self.dice.below(workers);
        match self.dice.below(13) {
            0 | 1 => Fault::Partition { worker },
            2 | 3 => Fault::OneWay { worker, to: self.dice.chance(50) },
            4 | 5 => Fault::Hold { worker },
            6 => Fault::Slow { worker },
            7 | 8 => Fault::Crash { worker, silently: self.dice.chance(50) },
            9 => Fault::Stop { worker },
            10 | 11 => Fault::Reset { worker },
            _ => {
                let whose = self.dice.below(workers + 1);
                Fault::Jump {
                    worker: (whose < workers).then_some(whose),
                    by: self.dice.ms(50, 4000),
                }
            }
        }
    }

    /// Begins and ends what is due.
    pub(super) fn act(
        &mut self,
        sim: &mut Sim<'_>,
        now: u64,
        shared: &Shared,
        workers: &[Arc<WorkerHost>],
    ) {
        while let Some(index) = self.due.iter().position(|(at, ..)| *at <= now) {
            let (_, begins, fault) = self.due.remove(index);
            if begins {
                self.trace.push(format!("{now} ms: {fault:?}"));
                self.begin(sim, fault, shared, workers);
                let lasts = self.dice.ms(20, 2500).as_millis();
                self.due.push((now + u64::try_from(lasts).expect("short"), false, fault));
            } else {
                self.trace.push(format!("{now} ms: {fault:?} ends"));
                end(sim, fault, workers);
            }
        }
    }

    /// Ends everything now.
    pub(super) fn heal(&mut self, sim: &mut Sim<'_>, workers: &[Arc<WorkerHost>]) {
        for (_, begins, fault) in std::mem::take(&mut self.due) {
            if !begins {
                end(sim, fault, workers);
            }
        }
    }

    fn begin(
        &mut self,
        sim: &mut Sim<'_>,
        fault: Fault,
        shared: &Shared,
        workers: &[Arc<WorkerHost>],
    ) {
        let injected = &mut self.injected;
        match fault {
            Fault::Partition { worker } => {
                let front = workers[worker].front.as_str();
                injected.partitions += 1;
                injected.cut_open += u64::from(shared.is_connected(front));
                sim.partition(COORDINATOR, front);
            }
            Fault::OneWay { worker, to } => {
                let front = workers[worker].front.as_str();
                injected.one_way += 1;
                injected.cut_open += u64::from(shared.is_connected(front));
                if to {
                    sim.partition_oneway(COORDINATOR, front);
                } else {
                    sim.partition_oneway(front, COORDINATOR);
                }
            }
            Fault::Hold { worker } => {
                injected.holds += 1;
                sim.hold(COORDINATOR, workers[worker].front.as_str());
            }
            Fault::Slow { worker } => {
                injected.slow += 1;
                // The mean is a fifth of it.
                let longest = Duration::from_millis(200 + 100 * self.dice.below(20) as u64);
                let front = workers[worker].front.as_str();
                sim.set_link_max_message_latency(COORDINATOR, front, longest);
            }
            Fault::Crash { worker, silently } => {
                let WorkerHost { name, front, .. } = &*workers[worker];
                injected.crashes += 1;
                if silently {
                    sim.partition(COORDINATOR, front.as_str());
                }
                sim.crash(name.as_str());
            }
            Fault::Stop { worker } => {
                injected.stops += 1;
                lock(&workers[worker].stop).cancel();
            }
            Fault::Reset { worker } => {
                let front = workers[worker].front.as_str();
                injected.resets += u64::from(shared.is_connected(front));
                shared.reset(front);
            }
            Fault::Jump { worker, by } => {
                injected.jumps += 1;
                let tasks: &Tasks = worker.map_or(&shared.tasks, |worker| &workers[worker].tasks);
                tasks.jump(by);
            }
        }
    }
}

fn end(sim: &mut Sim<'_>, fault: Fault, workers: &[Arc<WorkerHost>]) {
    match fault {
        Fault::Partition { worker } | Fault::OneWay { worker, .. } | Fault::Hold { worker } => {
            sim.release(COORDINATOR, workers[worker].front.as_str());
        }
        Fault::Slow { worker } => {
            let front = workers[worker].front.as_str();
            sim.set_link_max_message_latency(COORDINATOR, front, LONGEST_LATENCY);
        }
        Fault::Crash { worker, silently } => {
            restart(sim, &workers[worker]);
            if silently {
                sim.release(COORDINATOR, workers[worker].front.as_str());
            }
        }
        Fault::Stop { worker } => restart(sim, &workers[worker]),
        Fault::Reset { .. } | Fault::Jump { .. } => {}
    }
}

fn restart(sim: &mut Sim<'_>, worker: &WorkerHost) {
    *lock(&worker.stop) = CancellationToken::new();
    sim.bounce(worker.name.as_str());
}
