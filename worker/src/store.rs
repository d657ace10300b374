//! Where experts live. Compute opens a round for the experts of a work message and takes them in the order in which they can
//! be had; it does not know what is behind that.
//!
//! [`TieredStore`] is memory with a drive behind it. Start reading at [`Round`] for what compute sees, at [`tiered`] for
//! what happens when an expert is not there, and at [`residency`](crate::residency) for which one goes then.

mod ahead;
mod claim;
mod error;
#[cfg(test)]
mod faults;
mod history;
mod layer;
mod lease;
mod round;
#[cfg(test)]
pub(crate) mod testing;
pub mod tiered;
mod upkeep;

use std::fmt;

use tokio::sync::watch;

pub use error::StoreError;
pub use lease::Lease;
pub use tiered::{OpenReader, TierSetup, TieredStore};

use crate::tier_counters::TierSnapshot;

/// Experts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedLayer {
    /// Layer in the model.
    pub layer: u32,
    /// Experts, ascending, each once.
    pub experts: Vec<u32>,
}

/// Where a load has got to. Called from several threads.
pub trait LoadProgress: Sync {
    /// One more expert is in memory.
    fn loaded(&self, bytes: u64);

    /// Whether nobody waits for the load any more.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Progress that nobody looks at.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl LoadProgress for NoProgress {
    fn loaded(&self, _bytes: u64) {}
}

/// A set of experts that can be computed until the claim is dropped.
pub trait Claim: Send + Sync + fmt::Debug {}

/// The tier seam.
///
/// A tier on a device is a store of its own in front of another one. It claims for its device what fits there, and of the
/// store behind it the rest, so that what lies on the device takes no memory on the host. Its rounds open a round of the
/// store behind them for what the device lacks, first yield what the device has, as another variant of what
/// [`ReadyExpert`] carries, and then pass on what the inner round yields. The other calls it answers by adding its own
/// figures to those of the store behind it.
pub trait ExpertStore: Send + Sync + fmt::Debug {
    /// Makes experts available and keeps them so while the claim lives. Reads what is to stay in memory; the rest is read
    /// when it is wanted. After an error there is no claim; what was read stays until its room is needed.
    fn claim(
        &self,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<Box<dyn Claim>, StoreError>;

    /// Makes experts available that are read when they are wanted, and keeps them so while the claim lives. Waits for
    /// nobody, reads nothing and takes no memory that others count on. After an error there is no claim.
    fn adopt(&self, wanted: &WantedLayer) -> Result<Box<dyn Claim>, StoreError>;

    /// Begins work on claimed experts of a layer, each named once. Reads of what is not there begin at once, as far as
    /// there is room.
    ///
    /// # Panics
    /// The layer has no experts.
    fn round<'a>(&'a self, layer: u32, experts: &'a [u32]) -> Box<dyn Round + 'a>;

    /// As [`Self::round`] if all experts are in memory, so that the round never waits; else nothing has happened.
    fn ready_round<'a>(&'a self, layer: u32, experts: &'a [u32]) -> Option<Box<dyn Round + 'a>>;

    /// Whether all these experts are in memory now; those that the layer does not have count as if.
    fn is_ready(&self, layer: u32, experts: &[u32]) -> bool;

    /// Whether somebody reads ahead, so that hints are worth sending. It may change with every claim that is made or
    /// dropped.
    fn wants_hints(&self) -> watch::Receiver<bool>;

    /// Takes note of claimed experts that a later layer will probably need, most likely first. Returns at once and changes
    /// nothing that can be seen but speed.
    fn hint(&self, layer: u32, experts: &[u32]);

    /// Gives memory of the cache back to the system, up to this many bytes. The bytes given back or about to be.
    fn shrink(&self, bytes: u64) -> u64;

    /// Writes down how often experts were used, if that is to be remembered.
    fn save_usage(&self);

    /// Bytes of experts that are in memory now.
    fn resident_bytes(&self) -> u64;

    /// Counters and gauges of the tiers.
    fn snapshot(&self) -> TierSnapshot;
}

/// The experts of one work message, as they become ready.
///
/// Dropping a round ends the work: reads under way end beside it and leave their experts in the cache.
pub trait Round: fmt::Debug {
    /// Adds experts that can be computed now, those in memory first, the others as their reads end; waits until there is
    /// at least one. Adds none when all have been given out.
    ///
    /// Leases that were given out before must be gone, or other works of the layer could wait for each other's slots.
    ///
    /// # Errors
    /// An expert could not be read. The round is over.
    fn next(&mut self, ready: &mut Vec<ReadyExpert>) -> Result<(), StoreError>;

    /// Experts that were not in memory when the round opened.
    fn missed(&self) -> usize;
}

/// An expert that can be computed now.
#[derive(Debug)]
pub struct ReadyExpert {
    /// Its place among the experts of the round.
    pub item: usize,
    /// Its slab.
    pub lease: Lease,
}
