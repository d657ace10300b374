//! Slots of a mapping: owners of disjoint parts of it.

#![expect(unsafe_code, reason = "disjoint slots of one mapping have owners of their own")]

use std::{
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::Arc,
};

use super::{mapping::Mapping, registration::Registered, system};

/// Exclusive owner of one slot: `stride` bytes of a mapping that it shares with its siblings.
#[derive(Debug)]
pub struct SlotMemory {
    // Before the place: a device forgets memory before the memory can go.
    registered: Option<Registered>,
    place: Place,
}

/// A slot whose pages went back to the system. Its address space stays, so that attaching it again maps nothing.
#[derive(Debug)]
pub struct ReleasedSlot {
    place: Place,
}

/// Where a slot lies. Only one exists for each slot of a mapping.
struct Place {
    start: NonNull<u8>,
    len: usize,
    mapping: Arc<Mapping>,
}

// SAFETY: a slot is plain memory, and no two slots overlap.
unsafe impl Send for SlotMemory {}
// SAFETY: shared access only reads.
unsafe impl Sync for SlotMemory {}
// SAFETY: as for the slot that it was; it gives no access.
unsafe impl Send for ReleasedSlot {}
// SAFETY: it gives no access.
unsafe impl Sync for ReleasedSlot {}

/// Cuts a mapping into `count` slots of `len` bytes, `spacing` bytes apart, and makes them known to the device if there is
/// one.
pub(super) fn cut(
    mapping: &Arc<Mapping>,
    len: usize,
    spacing: usize,
    count: usize,
) -> Vec<SlotMemory> {
    assert!(
        len <= spacing
            && spacing.is_multiple_of(system::page_bytes())
            && count.checked_mul(spacing).is_some_and(|bytes| bytes <= mapping.bytes()),
        "slots of whole pages inside their mapping"
    );
    let slot = |index: usize| {
        // SAFETY: `index < count`, so the slot lies within the mapping.
        let start = unsafe { mapping.start().add(index * spacing) };
        SlotMemory { registered: None, place: Place { start, len, mapping: Arc::clone(mapping) } }
    };
    let mut slots: Vec<_> = (0..count).map(slot).collect();
    if !slots.iter_mut().all(SlotMemory::register) {
        slots.iter_mut().for_each(|slot| slot.registered = None);
    }
    slots
}

impl SlotMemory {
    /// Gives the pages back to the system: the resident memory of the process shrinks at once, by whole pages. A huge page
    /// that the slot shares with a neighbour is split, and the neighbour keeps its part.
    pub fn release(mut self) -> ReleasedSlot {
        self.registered = None;
        let Self { place, .. } = self;
        // SAFETY: the slot's pages lie in a private anonymous mapping and are this owner's alone, which ends here.
        unsafe { system::discard(place.start, place.pages()) };
        place.mapping.released();
        ReleasedSlot { place }
    }

    /// Whether a device knows the slot.
    pub fn is_registered(&self) -> bool {
        self.registered.is_some()
    }

    /// Makes the slot known to the device if there is one. False if that was refused.
    fn register(&mut self) -> bool {
        let place = &self.place;
        match place.mapping.register(place.start, place.pages()) {
            Ok(registered) => {
                self.registered = registered;
                true
            }
            Err(_reported) => false,
        }
    }
}

impl ReleasedSlot {
    /// A slot of zeros at the same place. Memory is taken when it is first touched, under the policy of its mapping.
    pub fn attach(self) -> SlotMemory {
        let Self { place } = self;
        place.mapping.attached(place.start, place.pages());
        let mut slot = SlotMemory { registered: None, place };
        slot.register();
        slot
    }
}

impl Place {
    /// Bytes of the slot's pages; no other slot has a part of them.
    fn pages(&self) -> usize {
        self.len.next_multiple_of(system::page_bytes())
    }
}

impl Deref for SlotMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are mapped and initialised as long as the mapping lives, and only this owner can write them.
        unsafe { std::slice::from_raw_parts(self.place.start.as_ptr(), self.place.len) }
    }
}

impl DerefMut for SlotMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.place.start.as_ptr(), self.place.len) }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("len", &self.len)
            .field("mapping", &self.mapping.bytes())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
