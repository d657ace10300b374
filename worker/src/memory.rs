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
mod mapping;
mod placement;
mod registration;
mod slots;
mod survey;
mod system;
mod threads;
mod topology;

pub use allocator::{MemoryOptions, MemorySnapshot, SlotAllocator, map_slots};
pub use placement::{MemoryPlacement, NodeSet, PlacementError};
pub use registration::{DeviceRange, DeviceRegistration, RegistrationError};
pub use slots::{ReleasedSlot, SlotMemory};
pub use survey::Survey;
pub use threads::ThreadPlacement;
pub use topology::{Core, Node, Topology, TopologySource};
