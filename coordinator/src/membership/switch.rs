//! From one generation to the next at one coordinator, without stopping: the new owners load while the old ones serve, and
//! between two steps the fence changes.
//!
//! No other coordinator is asked, because bytes do not depend on the placement: two coordinators may serve with different
//! generations for a while. A state machine of events and actions; workers are named by their seats.
//!
//! ```text
//! new record --> preparing: Assign to its workers --> all ready, between two steps: Flip, Release
//!                   |  a newer record takes its place
//! ```

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::placement::Placement;

/// A worker that was lost so often without becoming ready is not waited for while it is connected either.
const STUMBLES_MAX: u32 = 3;

/// What the shell must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwitchAction {
    /// Hand a worker its experts of a generation.
    Assign {
        /// Seat of the worker.
        worker: usize,
        /// The generation.
        generation: u64,
        /// Experts by layer, both ascending; may be empty.
        layers: Vec<(u32, Vec<u32>)>,
    },
    /// From the next step on work carries this generation. Precedes the releases that follow from it.
    Flip {
        /// The generation.
        generation: u64,
    },
    /// Let a worker forget every earlier generation.
    Release {
        /// Seat of the worker.
        worker: usize,
        /// The first generation that stays.
        generation: u64,
    },
}

/// A placement with its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbered {
    /// Its generation.
    pub generation: u64,
    /// Who holds what, by seat.
    pub placement: Arc<Placement>,
}

#[derive(Debug, Clone, Copy)]
struct Worker {
    connection: Connection,
    /// Something was ready in the newest session.
    loaded: bool,
    /// Sessions that ended before anything was ready, since one was.
    stumbles: u32,
}

#[derive(Debug, Clone, Copy)]
enum Connection {
    /// Greeted; ready for these generations of those that count.
    Up {
        current: bool,
        next: bool,
    },
    Away {
        since: Instant,
    },
}

/// The switch of one coordinator.
#[derive(Debug, Clone)]
pub struct Switch {
    patience: Duration,
    current: Option<Numbered>,
    next: Option<Numbered>,
    workers: BTreeMap<usize, Worker>,
}

impl Switch {
    /// Nothing is in force yet. Workers that are away longer than `patience` are not waited for.
    pub fn new(patience: Duration) -> Self {
        Self { patience, current: None, next: None, workers: BTreeMap::new() }
    }

    /// The generation in force.
    pub fn current(&self) -> Option<&Numbered> {
        self.current.as_ref()
    }

    /// The generation that is being loaded.
    pub fn next(&self) -> Option<&Numbered> {
        self.next.as_ref()
    }

    /// A placement was decided. One that is not newer than what is in force or being prepared changes nothing.
    pub fn new_record(&mut self, record: Numbered, now: Instant) -> Vec<SwitchAction> {
        let newest = self.next.as_ref().or(self.current.as_ref());
        if newest.is_some_and(|newest| record.generation <= newest.generation) {
            return Vec::new();
        }
        let mut actions = Vec::new();
        for worker in workers_of(&record.placement) {
            self.seat(worker, now);
        }
        for (&worker, state) in &mut self.workers {
            if let Connection::Up { next, .. } = &mut state.connection {
                *next = false;
                actions.extend(assign(worker, &record));
            }
        }
        self.next = Some(record);
        actions
    }

    /// A worker was greeted: it holds nothing yet, whatever it held before.
    pub fn connected(&mut self, worker: usize) -> Vec<SwitchAction> {
        let connection = Connection::Up { current: false, next: false };
        let state =
            self.workers.entry(worker).or_insert(Worker { connection, loaded: false, stumbles: 0 });
        (state.connection, state.loaded) = (connection, false);
        let wanted = self.current.iter().chain(&self.next);
        wanted.filter_map(|numbered| assign(worker, numbered)).collect()
    }

    /// A worker holds everything that it was assigned under a generation.
    pub fn ready(&mut self, worker: usize, generation: u64) {
        let of = |numbered: &Option<Numbered>| {
            numbered.as_ref().is_some_and(|n| n.generation == generation)
        };
        let (is_current, is_next) = (of(&self.current), of(&self.next));
        let Some(state) = self.workers.get_mut(&worker) else { return };
        if let Connection::Up { current, next } = &mut state.connection {
            *current |= is_current;
            *next |= is_next;
            // Also where the generation has been overtaken meanwhile: it can load.
            (state.loaded, state.stumbles) = (true, 0);
        }
    }

    /// A worker's session ended.
    pub fn away(&mut self, worker: usize, now: Instant) {
        let state = self.seat(worker, now);
        if let Connection::Up { .. } = state.connection {
            state.connection = Connection::Away { since: now };
            state.stumbles = state.stumbles.saturating_add(u32::from(!state.loaded));
        }
    }

    /// A worker that nobody has seen yet is away from now on.
    fn seat(&mut self, worker: usize, now: Instant) -> &mut Worker {
        let connection = Connection::Away { since: now };
        self.workers.entry(worker).or_insert(Worker { connection, loaded: false, stumbles: 0 })
    }

    fn connection(&self, worker: usize) -> Option<Connection> {
        self.workers.get(&worker).map(|state| state.connection)
    }

    /// Whether a worker can be sent work of the generation in force.
    pub fn serves(&self, worker: usize) -> bool {
        matches!(self.connection(worker), Some(Connection::Up { current: true, .. }))
    }

    /// Between two steps: brings the prepared generation into force if it can serve.
    pub fn step_boundary(&mut self, now: Instant) -> Vec<SwitchAction> {
        if !self.next.as_ref().is_some_and(|next| self.can_serve(next, now)) {
            return Vec::new();
        }
        let flipped = self.next.take().expect("it can serve");
        let generation = flipped.generation;
        self.current = Some(flipped);
        let mut actions = vec![SwitchAction::Flip { generation }];
        for (&worker, state) in &mut self.workers {
            if let Connection::Up { current, next } = &mut state.connection {
                *current = std::mem::take(next);
                actions.push(SwitchAction::Release { worker, generation });
            }
        }
        actions
    }

    /// When [`Self::step_boundary`] will flip although nothing else happens; none if it waits for an event.
    pub fn due(&self) -> Option<Instant> {
        let workers = workers_of(&self.next.as_ref()?.placement);
        let mut due = None;
        for worker in workers {
            match self.workers.get(&worker)? {
                Worker { connection: Connection::Up { next: true, .. }, .. } => {}
                Worker { connection: Connection::Up { .. }, stumbles, .. } => {
                    if *stumbles < STUMBLES_MAX {
                        return None;
                    }
                }
                Worker { connection: Connection::Away { since }, .. } => {
                    due = due.max(Some(*since + self.patience));
                }
            }
        }
        due
    }

    fn can_serve(&self, next: &Numbered, now: Instant) -> bool {
        let is_ready = |worker: usize| {
            matches!(self.connection(worker), Some(Connection::Up { next: true, .. }))
        };
        let has_copy = |worker: usize| {
            let mut held =
                next.placement.experts().filter(|(_, _, copies)| copies.contains(&worker));
            held.all(|(_, _, copies)| copies.iter().any(|&copy| copy != worker && is_ready(copy)))
        };
        workers_of(&next.placement).into_iter().all(|worker| {
            let Some(Worker { connection, stumbles, .. }) = self.workers.get(&worker) else {
                return false;
            };
            match connection {
                Connection::Up { next, .. } => *next || *stumbles >= STUMBLES_MAX,
                Connection::Away { since } => {
                    now.saturating_duration_since(*since) >= self.patience || has_copy(worker)
                }
            }
        })
    }
}

/// Workers that hold something, ascending.
fn workers_of(placement: &Placement) -> Vec<usize> {
    let shares = placement.shares();
    (0..shares.len()).filter(|&worker| shares[worker] > 0).collect()
}

/// None for a worker that the placement does not know: it was seated later.
fn assign(worker: usize, numbered: &Numbered) -> Option<SwitchAction> {
    let Numbered { generation, placement } = numbered;
    (worker < placement.workers()).then(|| SwitchAction::Assign {
        worker,
        generation: *generation,
        layers: placement.owned_by(worker),
    })
}

#[cfg(test)]
mod tests;
