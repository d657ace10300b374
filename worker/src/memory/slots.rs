//! A mapping cut into slots.

#![expect(unsafe_code, reason = "disjoint slots of one mapping have owners of their own")]

use std::{
    fmt, io,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::Arc,
};

use shimmer_kernels::Arena;

/// Exclusive owner of one slot: `stride` bytes of a mapping that it shares with its siblings.
pub struct SlotMemory {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the mapping.
    arena: Arc<Arena>,
}

// SAFETY: a slot is plain memory, and no two slots overlap.
unsafe impl Send for SlotMemory {}
// SAFETY: shared access only reads.
unsafe impl Sync for SlotMemory {}

/// Maps `count` slots of `stride` bytes each, zeroed. Memory is taken when it is first touched.
pub fn map_slots(stride: usize, count: usize) -> io::Result<Vec<SlotMemory>> {
    let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
    let bytes = stride.checked_mul(count).ok_or_else(too_large)?;
    let mut arena = Arena::new(bytes)?;
    let start = NonNull::from(arena.as_mut_slice()).cast::<u8>();
    let arena = Arc::new(arena);
    let slot = |index: usize| {
        // SAFETY: `index < count`, so the slot lies within the `stride * count` bytes of the arena.
        let start = unsafe { start.add(index * stride) };
        SlotMemory { start, len: stride, arena: Arc::clone(&arena) }
    };
    Ok((0..count).map(slot).collect())
}

impl Deref for SlotMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are mapped and initialised as long as the arena lives, and only this owner can write them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for SlotMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for SlotMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotMemory")
            .field("len", &self.len)
            .field("mapping", &self.arena.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_disjoint_and_outlive_their_siblings() {
        let mut slots = map_slots(8192, 3).unwrap();
        for (fill, slot) in (1..).zip(&mut slots) {
            assert_eq!(slot.len(), 8192);
            slot.fill(fill);
        }
        let last = slots.pop().unwrap();
        assert!(slots.iter().zip(1..).all(|(slot, fill)| slot.iter().all(|byte| *byte == fill)));
        drop(slots);
        assert!(last.iter().all(|byte| *byte == 3));
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(map_slots(usize::MAX, 2).is_err());
        assert!(map_slots(4096, usize::MAX >> 13).is_err());
    }
}
