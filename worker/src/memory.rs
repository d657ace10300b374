//! Memory that slabs lie in: one mapping per call, cut into slots of one size before anything is loaded.
//!
//! A [`SlotMemory`] owns its part of the mapping alone, so writing needs `&mut` and reading a lease on a shared one: the
//! types rule out that a slot is computed on while it is loaded. The mapping goes when its last slot goes.

mod slots;

pub use slots::{SlotMemory, map_slots};
