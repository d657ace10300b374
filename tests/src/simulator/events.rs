//! What happens, and in which order.

use std::{cmp::Ordering, time::Duration};

use super::{
    faults::Fault,
    worker::{Answer, Order, Owned},
};

/// Something that happens at a time.
#[derive(Debug)]
pub(super) enum Event {
    Tick,
    Fault(Fault),
    Heal(Fault),
    HealAll,
    /// Somebody keeps a copy of what the store holds.
    Backup,
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
        answer: Box<Answer>,
    },
    /// A worker could not prove itself.
    Disproved {
        coordinator: usize,
        worker: usize,
        session: u64,
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

/// An event and its place: by time, then by when it was planned.
pub(super) struct Scheduled {
    pub(super) at: Duration,
    pub(super) number: u64,
    pub(super) event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}
