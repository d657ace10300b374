//! Plans that do not fit.

use crate::budget::{BudgetTerm, Size};

/// Why a worker cannot hold its experts as the settings say. Every text names the limit that binds and what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// `--ram all`.
    #[error(
        "--ram all wants {experts} experts of {} in memory, but {term} leaves {}: give --ram auto to read the rest from \
         the drive, or this worker a smaller share",
        Size(*.needed), Size(*.room)
    )]
    All {
        /// Experts.
        experts: u64,
        /// Their bytes.
        needed: u64,
        /// Bytes for experts.
        room: u64,
        /// Which limit says so.
        term: BudgetTerm,
    },
    /// `--cap`, with what is pinned beside it.
    #[error(
        "--cap {cap} takes {} in {layers} layers beside {} pinned, but {term} leaves {}: --cap {fits} fits",
        Size(*.needed), Size(*.pinned), Size(*.room)
    )]
    Cap {
        /// Slots of each layer.
        cap: u32,
        /// Layers with slots.
        layers: usize,
        /// Bytes of the slots.
        needed: u64,
        /// Bytes pinned beside them.
        pinned: u64,
        /// Bytes for experts.
        room: u64,
        /// Which limit says so.
        term: BudgetTerm,
        /// The largest number that would fit.
        fits: u32,
    },
    /// `--pin SIZE` leaves too little beside it.
    #[error(
        "pinning {} beside {} of cache does not fit: {term} leaves {}, so that --pin can be at most {}",
        Size(*.pinned), Size(*.cache), Size(*.room), Size(.room - .cache)
    )]
    Pins {
        /// Bytes that were to be pinned.
        pinned: u64,
        /// Bytes that the cache takes at least.
        cache: u64,
        /// Bytes for experts.
        room: u64,
        /// Which limit says so.
        term: BudgetTerm,
    },
    /// Not even one slot for each layer.
    #[error(
        "one expert of each of {layers} layers takes {}, but {term} leaves {}: raise it, or give this worker a smaller share",
        Size(*.needed), Size(*.room)
    )]
    Minimum {
        /// Layers.
        layers: usize,
        /// Bytes of one slot each.
        needed: u64,
        /// Bytes for experts.
        room: u64,
        /// Which limit says so.
        term: BudgetTerm,
    },
}
