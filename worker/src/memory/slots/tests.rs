use std::ptr::NonNull;

use super::super::{map_slots, system::page_bytes};
use super::SlotMemory;

/// Pages of a slot that are in memory.
fn resident_pages(slot: &SlotMemory) -> usize {
    let mut pages = vec![0_u8; slot.len().div_ceil(page_bytes())];
    let start = NonNull::from(&slot[0]).as_ptr().cast();
    // SAFETY: the vector has a byte for each page of the slot.
    let result = unsafe { libc::mincore(start, slot.len(), pages.as_mut_ptr()) };
    assert_eq!(result, 0);
    pages.iter().filter(|page| **page & 1 == 1).count()
}

#[test]
fn slots_are_disjoint_and_outlive_their_siblings() {
    for stride in [1, 8192, 5000, 3 << 20] {
        let mut slots = map_slots(stride, 3).unwrap();
        for (fill, slot) in (1..).zip(&mut slots) {
            assert_eq!(slot.len(), stride);
            slot.fill(fill);
        }
        let last = slots.pop().unwrap();
        assert!(slots.iter().zip(1..).all(|(slot, fill)| slot.iter().all(|byte| *byte == fill)));
        drop(slots);
        assert!(last.iter().all(|byte| *byte == 3));
    }
}

#[test]
fn impossible_sizes_are_errors() {
    assert!(map_slots(usize::MAX, 2).is_err());
    assert!(map_slots(usize::MAX, 1).is_err());
    assert!(map_slots(4096, usize::MAX >> 13).is_err());
    assert!(map_slots(4096, 0).unwrap().is_empty());
}

/// Strides below, beside and above a huge page, so that the released slot shares huge pages with both neighbours.
#[test]
fn a_released_slot_gives_its_pages_back_and_leaves_its_neighbours_alone() {
    for stride in [page_bytes(), 300 << 10, (2 << 20) + page_bytes(), 5 << 20] {
        let mut slots = map_slots(stride, 3).unwrap();
        for (fill, slot) in (1..).zip(&mut slots) {
            slot.fill(fill);
        }
        let middle = slots.remove(1);
        assert_eq!(resident_pages(&middle), stride.div_ceil(page_bytes()));
        let mut middle = middle.release().attach();
        assert_eq!(resident_pages(&middle), 0, "stride {stride}");
        for (slot, fill) in slots.iter().zip([1, 3]) {
            assert_eq!(resident_pages(slot), stride.div_ceil(page_bytes()), "stride {stride}");
            assert!(slot.iter().all(|byte| *byte == fill), "stride {stride}");
        }
        assert!(middle.iter().all(|byte| *byte == 0), "stride {stride}");
        middle.fill(9);
        assert!(middle.iter().all(|byte| *byte == 9));
    }
}

#[test]
fn a_released_slot_may_be_dropped_or_outlive_its_siblings() {
    let mut slots = map_slots(8192, 2).unwrap();
    let released = slots.remove(0).release();
    slots[0].fill(7);
    drop(slots);
    assert!(released.attach().iter().all(|byte| *byte == 0));
}
