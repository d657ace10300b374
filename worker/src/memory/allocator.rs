//! Who maps: the settings, what they came to on this machine, and the counts.

use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use super::{
    mapping::{Mapping, Shared},
    placement::MemoryPlacement,
    registration::DeviceRegistration,
    slots::{self, SlotMemory},
    system::{self, Kernel, System},
};

/// What slots should be besides memory. Nothing by default.
#[derive(Debug, Clone, Default)]
pub struct MemoryOptions {
    /// From which nodes pages come.
    pub placement: MemoryPlacement,
    /// Keep what was touched in memory, whatever else the host needs.
    pub lock: bool,
    /// A device that copies from slots.
    pub device: Option<Arc<dyn DeviceRegistration>>,
}

/// Maps slots and counts what is mapped. Clones count together.
#[derive(Debug, Clone)]
pub struct SlotAllocator {
    shared: Arc<Shared>,
}

/// What is mapped now, and what happened to slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemorySnapshot {
    /// Mappings of this process that hold slots.
    pub mappings: u64,
    /// Their address space. Memory is taken when it is first touched.
    pub mapped_bytes: u64,
    /// The part of it that stays in memory once touched.
    pub locked_bytes: u64,
    /// The part of it that a device knows.
    pub registered_bytes: u64,
    /// Nodes that pages come from in turn; 0 where the system decides.
    pub interleaved_nodes: u64,
    /// 1 if pages should come from several nodes, and the system refused that.
    pub placement_refused: u64,
    /// Slots whose pages went back to the system.
    pub slots_released: u64,
    /// Released slots that were taken into use again.
    pub slots_attached: u64,
}

/// Maps slots that are nothing but memory.
///
/// # Errors
/// The system gives no address space.
pub fn map_slots(stride: usize, count: usize) -> io::Result<Vec<SlotMemory>> {
    SlotAllocator::new(MemoryOptions::default()).map_slots(stride, count)
}

impl SlotAllocator {
    /// An allocator without mappings.
    pub fn new(options: MemoryOptions) -> Self {
        Self::with_system(options, Box::new(Kernel))
    }

    pub(super) fn with_system(options: MemoryOptions, system: Box<dyn System>) -> Self {
        Self { shared: Arc::new(Shared::new(options, system)) }
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Maps `count` slots of `stride` bytes each, zeroed, in one mapping. Memory is taken when it is first touched.
    ///
    /// Locks and registrations that are refused are reported once and leave plain memory.
    ///
    /// # Errors
    /// The system gives no address space; then nothing is left behind.
    pub fn map_slots(&self, stride: usize, count: usize) -> io::Result<Vec<SlotMemory>> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let spacing =
            stride.max(1).checked_next_multiple_of(system::page_bytes()).ok_or_else(too_large)?;
        let bytes = spacing.checked_mul(count).ok_or_else(too_large)?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let mapping = Mapping::new(bytes, &self.shared)?;
        Ok(slots::cut(&mapping, stride, spacing, count))
    }

    /// What is mapped now.
    pub fn snapshot(&self) -> MemorySnapshot {
        let totals = &self.shared.totals;
        let placement = &self.shared.options.placement;
        MemorySnapshot {
            interleaved_nodes: placement.nodes().len() as u64,
            placement_refused: u64::from(*placement == MemoryPlacement::Refused),
            mappings: totals.mappings.load(Relaxed),
            mapped_bytes: totals.mapped_bytes.load(Relaxed),
            locked_bytes: totals.locked_bytes.load(Relaxed),
            registered_bytes: totals.registered_bytes.load(Relaxed),
            slots_released: totals.slots_released.load(Relaxed),
            slots_attached: totals.slots_attached.load(Relaxed),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
