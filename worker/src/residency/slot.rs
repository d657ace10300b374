//! One slot and its states.

use std::sync::Arc;

/// Who asked for a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// An assignment, before the layer serves.
    Claim,
    /// Work that waits for it.
    Demand,
    /// A hint.
    Prefetch,
}

/// Names one load: a slot, and the how-manieth use of it. Never repeats within a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

impl Ticket {
    /// The ticket in one word, to travel with a read.
    pub fn to_bits(self) -> u64 {
        u64::from(self.slot) << 32 | u64::from(self.generation)
    }

    /// A ticket that came back.
    #[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
    pub fn from_bits(bits: u64) -> Self {
        Self { slot: (bits >> 32) as u32, generation: bits as u32 }
    }
}

/// What a slot is now.
#[derive(Debug)]
pub(super) enum State<M> {
    /// Its memory was given back to the system.
    Detached,
    Free(M),
    /// Its memory is with the loader.
    Reserved {
        expert: u32,
        origin: Origin,
    },
    Resident(Resident<M>),
}

/// A loaded expert.
#[derive(Debug)]
pub(super) struct Resident<M> {
    pub(super) expert: u32,
    pub(super) memory: Arc<M>,
    pub(super) leases: u32,
    pub(super) pinned: bool,
    /// Prefetched, and not asked for yet.
    pub(super) unused: bool,
    /// Time of the layer when it was loaded or last used.
    pub(super) last_used: u64,
}

/// A slot with the number of its current or last use.
#[derive(Debug)]
pub(super) struct Slot<M> {
    pub(super) state: State<M>,
    pub(super) generation: u32,
}
