//! Memory that slabs lie in: one mapping per call, cut into slots of one size before anything is loaded.
//!
//! * A [`SlotMemory`] owns its part of the mapping alone, so writing needs `&mut` and reading a lease on a shared one: the
//!   types rule out that a slot is computed on while it is loaded. The mapping goes when its last slot goes.
//! * [`SlotMemory::release`] gives the pages of one slot back to the system; what is left, a [`ReleasedSlot`], has no bytes
//!   until it is attached again.
//! * What a slot may be besides memory (locked, known to a device) is optional, counted, and undone in the reverse order on
//!   every path, because the owners undo it when they are dropped. Releasing, attaching and dropping slots call into the
//!   kernel and into device drivers: never under a lock.

mod allocator;
mod library;
mod mapping;
mod placement;
mod registration;
mod slots;
mod survey;
mod system;
mod threads;
mod topology;

use crate::tier_options::TierOptions;

#[cfg(test)]
pub(crate) use allocator::tests::{Granted, map_granted, with_refusing_device};
pub use allocator::{MemoryOptions, MemorySnapshot, SlotAllocator, map_slots};
pub use library::library_loads;
pub use placement::{MemoryPlacement, NodeSet, PlacementError};
pub use registration::{DeviceRange, DeviceRegistration, RegistrationError};
pub use slots::{ReleasedSlot, SlotMemory};
pub use survey::Survey;
pub use threads::{ThreadPlacement, default_threads};
pub use topology::{Core, Node, Topology, TopologySource};

/// Decides for this machine, once per worker, where its memory and its compute threads go.
pub(crate) fn place(
    options: &TierOptions,
    threads: usize,
) -> Result<(SlotAllocator, ThreadPlacement), PlacementError> {
    let topology = Topology::detect();
    let placement = MemoryPlacement::decide(options.numa, &topology)?;
    let of_threads = ThreadPlacement::decide(options.numa, &topology, threads);
    if topology.is_numa() {
        let (source, interleaved) = (topology.source(), placement.nodes());
        tracing::info!(%source, nodes = topology.nodes().len(), ?interleaved, numa = %options.numa, "this machine has several nodes");
    }
    let memory = MemoryOptions { placement, lock: options.mlock, device: None };
    Ok((SlotAllocator::new(memory), of_threads))
}
