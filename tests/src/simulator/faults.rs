//! What goes wrong, and how it is undone.

use std::time::Duration;

use shimmer_coordinator::dispatch::Pace;
use shimmer_proto::membership::{memory::WriteFault, records::LEADER};

use super::{events::Event, world::World};

/// Something that goes wrong. Workers and coordinators are named by their index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A worker's process dies, and is started again when the fault ends.
    Crash { worker: usize },
    /// A worker's process stands still.
    Pause { worker: usize },
    /// A worker takes twenty times as long, and coordinators have found out or have not.
    Slow { worker: usize },
    /// Nothing passes between two hosts, in one direction or both.
    Cut { coordinator: usize, worker: usize, to: bool, from: bool },
    /// A connection is reset.
    Reset { coordinator: usize, worker: usize },
    /// A coordinator's process is started again, with another epoch.
    Restart { coordinator: usize },
    /// A coordinator does not reach the store.
    StoreCut { coordinator: usize },
    /// A coordinator reaches the store, but hears of no change.
    Blind { coordinator: usize },
    /// A coordinator's lease ends.
    LeaseLost { coordinator: usize },
    /// Whoever leads loses its lease and does not hear of it.
    Deposed,
    /// A worker's lease ends.
    WorkerLeaseLost { worker: usize },
    /// The store answers nobody.
    StoreStopped,
    /// The store loses everything, as if it had been set up again.
    StoreWiped,
    /// The store is restored from a backup, if there is one.
    StoreRestored,
    /// A write of a coordinator is lost, its answer is, or it comes late.
    WriteLost { coordinator: usize, kind: usize },
    /// A coordinator's clock goes ahead.
    ClockJump { coordinator: usize, ms: u64 },
    /// An operator drains a worker.
    Drain { worker: usize },
    /// An operator drains a worker, and stops it when it is said to be drained.
    DrainAndStop { worker: usize },
    /// An operator has the load levelled.
    Rebalance,
    /// A worker computes other bytes until its process is started again and it is readmitted.
    Lies { worker: usize },
}

impl Fault {
    /// What it is counted as.
    fn name(self) -> &'static str {
        match self {
            Self::Crash { .. } => "crashes",
            Self::Pause { .. } => "pauses",
            Self::Slow { .. } => "slow workers",
            Self::Cut { to: true, from: true, .. } => "cuts in both directions",
            Self::Cut { to: true, .. } => "cuts to a worker",
            Self::Cut { .. } => "cuts from a worker",
            Self::Reset { .. } => "resets",
            Self::Restart { .. } => "restarts of a coordinator",
            Self::StoreCut { .. } => "cuts to the store",
            Self::Blind { .. } => "views that stand still",
            Self::LeaseLost { .. } => "leases of coordinators that end",
            Self::Deposed => "leaders deposed",
            Self::WorkerLeaseLost { .. } => "leases of workers that end",
            Self::StoreStopped => "stops of the store",
            Self::StoreWiped => "stores wiped",
            Self::StoreRestored => "stores restored",
            Self::WriteLost { kind: 0, .. } => "writes lost",
            Self::WriteLost { kind: 1, .. } => "answers to writes lost",
            Self::WriteLost { .. } => "writes that are late",
            Self::ClockJump { .. } => "jumps of a clock",
            Self::Drain { .. } => "drains",
            Self::DrainAndStop { .. } => "drains to stop a worker",
            Self::Rebalance => "rebalances asked for",
            Self::Lies { .. } => "liars",
        }
    }
}

impl World {
    /// Draws the faults of the schedule.
    pub(super) fn plan_faults(&mut self, end: Duration) {
        let end = u64::try_from(end.as_millis()).expect("a short time");
        let count = 2 + self.dice.below(9);
        for _ in 0..count {
            let fault = self.draw();
            let at = self.dice.ms(300, end);
            self.at(at, Event::Fault(fault));
        }
        let at = self.dice.ms(1000, end);
        self.at(at, Event::Backup);
        if self.audit_per_10k > 0 && self.workers.len() > 1 {
            let worker = self.dice.below(self.workers.len());
            let at = self.dice.ms(300, end);
            self.at(at, Event::Fault(Fault::Lies { worker }));
        }
    }

    fn draw(&mut self) -> Fault {
        let worker = self.dice.below(self.workers.len());
        let coordinator = self.dice.below(self.coordinators.len());
        match self.dice.below(24) {
            0..=2 => Fault::Crash { worker },
            3 => Fault::Pause { worker },
            4 => Fault::Slow { worker },
            5 | 6 => {
                let directions = self.dice.below(3);
                Fault::Cut { coordinator, worker, to: directions != 0, from: directions != 1 }
            }
            7 => Fault::Reset { coordinator, worker },
            8 | 9 => Fault::Restart { coordinator },
            10 => Fault::StoreCut { coordinator },
            11 => Fault::Blind { coordinator },
            12 => Fault::LeaseLost { coordinator },
            13 => Fault::WorkerLeaseLost { worker },
            14 => Fault::StoreStopped,
            15 => Fault::WriteLost { coordinator, kind: self.dice.below(3) },
            16 => {
                let ms = 100 + self.dice.below(8000) as u64;
                Fault::ClockJump { coordinator, ms }
            }
            17 | 18 => Fault::Deposed,
            19 => Fault::Drain { worker },
            20 => Fault::DrainAndStop { worker },
            21 => Fault::Rebalance,
            22 => Fault::StoreWiped,
            _ => Fault::StoreRestored,
        }
    }

    pub(super) fn begin(&mut self, fault: Fault) -> Result<(), String> {
        self.tally.count("faults", 1);
        self.tally.count(fault.name(), 1);
        self.note(|| format!("fault {fault:?}"));
        match fault {
            Fault::Crash { worker } => {
                self.workers[worker].store = None;
                self.workers[worker].sessions.clear();
                self.trouble(None, worker);
            }
            Fault::Pause { worker } => {
                self.workers[worker].paused = true;
                self.trouble(None, worker);
            }
            Fault::Slow { worker } => {
                self.workers[worker].slow = true;
                self.trouble(None, worker);
                let pace = [Pace::Usual, Pace::Slow, Pace::Costly][self.dice.below(3)];
                self.pace(worker, pace);
            }
            Fault::Cut { coordinator, worker, to, from } => {
                let cut = &mut self.cut[coordinator][worker];
                *cut = [cut[0] || to, cut[1] || from];
                self.trouble(Some(coordinator), worker);
            }
            Fault::Reset { coordinator, worker } => self.lose(coordinator, worker)?,
            Fault::Restart { coordinator } => self.restart(coordinator),
            Fault::StoreCut { coordinator } => self.coordinators[coordinator].store.disconnect(),
            Fault::Blind { coordinator } => self.coordinators[coordinator].store.hold_view(),
            Fault::LeaseLost { coordinator } => self.coordinators[coordinator].store.expire_lease(),
            Fault::Deposed => {
                let leader = self.cluster.snapshot().entries.get(LEADER).map(|e| e.value.clone());
                let leader = self.coordinators.iter().find(|c| Some(&c.id) == leader.as_ref());
                if let Some(leader) = leader {
                    leader.store.hold_view();
                    leader.store.expire_lease();
                }
            }
            Fault::WorkerLeaseLost { worker } => {
                if let Some(store) = &self.workers[worker].store {
                    store.expire_lease();
                }
            }
            Fault::StoreStopped => self.cluster.stop(),
            Fault::StoreWiped => {
                self.oracle.store_lost();
                self.cluster.wipe();
            }
            Fault::StoreRestored => {
                if let Some(backup) = &self.backup {
                    self.oracle.store_lost();
                    self.cluster.restore(backup);
                    self.restored = Some(self.now);
                    self.tally.count("backups restored", 1);
                }
            }
            Fault::WriteLost { coordinator, kind } => {
                let kinds = [WriteFault::LoseRequest, WriteFault::LoseAnswer, WriteFault::Late];
                self.coordinators[coordinator].store.fault_writes([kinds[kind]]);
            }
            Fault::ClockJump { coordinator, ms } => {
                self.coordinators[coordinator].ahead += Duration::from_millis(ms);
                (0..self.workers.len()).for_each(|w| self.coordinators[coordinator].disturb(w));
            }
            Fault::Drain { worker } => self.drain(worker, true),
            Fault::DrainAndStop { worker } => {
                self.drain(worker, true);
                self.waited.insert(worker);
            }
            Fault::Rebalance => self.rebalance()?,
            Fault::Lies { worker } => {
                self.workers[worker].lies = true;
                self.liar = Some(worker);
                self.coordinators.iter_mut().for_each(|coordinator| coordinator.distrust(worker));
            }
        }
        let lasts = self.dice.ms(20, 3500);
        self.after(lasts, Event::Heal(fault));
        Ok(())
    }

    pub(super) fn heal(&mut self, fault: Fault) -> Result<(), String> {
        self.note(|| format!("healed {fault:?}"));
        match fault {
            Fault::Crash { worker } => self.start(worker),
            Fault::Pause { worker } => self.workers[worker].paused = false,
            Fault::Slow { worker } => {
                self.workers[worker].slow = false;
                self.pace(worker, Pace::Usual);
            }
            Fault::Cut { coordinator, worker, .. } => self.cut[coordinator][worker] = [false; 2],
            Fault::StoreCut { coordinator } => self.coordinators[coordinator].store.reconnect(),
            Fault::Blind { coordinator } => self.coordinators[coordinator].store.release_view(),
            Fault::Deposed => self.coordinators.iter().for_each(|c| c.store.release_view()),
            Fault::StoreStopped => self.cluster.start(),
            Fault::WriteLost { coordinator, .. } => {
                let before = self.cluster.snapshot();
                self.coordinators[coordinator].store.release_writes();
                self.oracle.check(&before, &self.cluster.snapshot())?;
            }
            Fault::Drain { worker } => self.drain(worker, false),
            Fault::DrainAndStop { worker } => {
                self.waited.remove(&worker);
                self.drain(worker, false);
            }
            Fault::Lies { worker } => return self.readmit(worker),
            Fault::Reset { .. }
            | Fault::Restart { .. }
            | Fault::LeaseLost { .. }
            | Fault::WorkerLeaseLost { .. }
            | Fault::StoreWiped
            | Fault::StoreRestored
            | Fault::Rebalance
            | Fault::ClockJump { .. } => {}
        }
        Ok(())
    }

    /// Every coordinator finds a worker to be so fast.
    fn pace(&mut self, worker: usize, pace: Pace) {
        self.coordinators.iter_mut().for_each(|c| c.transport.paces[worker] = pace);
    }

    /// Everything that still lasts ends.
    pub(super) fn heal_all(&mut self) -> Result<(), String> {
        self.heal(Fault::StoreStopped)?;
        for worker in 0..self.workers.len() {
            self.heal(Fault::Pause { worker })?;
            self.heal(Fault::Slow { worker })?;
            self.heal(Fault::DrainAndStop { worker })?;
            self.heal(Fault::Lies { worker })?;
            self.heal(Fault::Crash { worker })?;
            for coordinator in 0..self.coordinators.len() {
                self.heal(Fault::Cut { coordinator, worker, to: true, from: true })?;
            }
        }
        for coordinator in 0..self.coordinators.len() {
            self.heal(Fault::StoreCut { coordinator })?;
            self.heal(Fault::Blind { coordinator })?;
            self.heal(Fault::WriteLost { coordinator, kind: 0 })?;
        }
        Ok(())
    }
}
