//! A bounded ring between many producers and many consumers: an item is taken exactly once, and a full ring takes none.
//!
//! Each place carries its turn: twice the position that it is empty for, one more when it holds the item of that position,
//! and twice the position of the next lap when the item was taken. A consumer reads the item
//! before it claims the position, and uses it only if the claim succeeds. The place cannot be written between the two:
//! writing waits for the next lap, which begins after the claim.

use crate::sync::{AtomicU64, Ordering, spin_loop};

/// Two words.
pub(super) type Item = [u64; 2];

#[derive(Debug)]
pub(super) struct Ring {
    places: Box<[Place]>,
    /// Position of the next item to take.
    head: AtomicU64,
    /// Position of the next item to put.
    tail: AtomicU64,
}

#[derive(Debug)]
struct Place {
    turn: AtomicU64,
    item: [AtomicU64; 2],
}

impl Ring {
    /// A ring for up to `capacity` items.
    pub(super) fn new(capacity: u64) -> Self {
        assert!(capacity > 0, "a ring has room for an item");
        let place = |position| Place {
            turn: AtomicU64::new(2 * position),
            item: [AtomicU64::new(0), AtomicU64::new(0)],
        };
        let places = (0..capacity).map(place).collect();
        Self { places, head: AtomicU64::new(0), tail: AtomicU64::new(0) }
    }

    fn place(&self, position: u64) -> &Place {
        let index = position % self.lap();
        &self.places[usize::try_from(index).expect("an index of a slice")]
    }

    fn lap(&self) -> u64 {
        self.places.len() as u64
    }

    /// Puts an item; false if the ring is full.
    pub(super) fn push(&self, item: Item) -> bool {
        let mut tail = self.tail.load(Ordering::Relaxed);
        loop {
            let place = self.place(tail);
            let turn = place.turn.load(Ordering::Acquire);
            if turn < 2 * tail {
                // The item of the lap before is still there.
                return false;
            }
            if turn > 2 * tail {
                // Another producer was faster.
                spin_loop();
                tail = self.tail.load(Ordering::Relaxed);
                continue;
            }
            match self.tail.compare_exchange_weak(
                tail,
                tail + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    for (word, value) in place.item.iter().zip(item) {
                        word.store(value, Ordering::Relaxed);
                    }
                    place.turn.store(2 * tail + 1, Ordering::Release);
                    return true;
                }
                Err(now) => tail = now,
            }
        }
    }

    /// Takes the oldest item; none if the ring is empty.
    pub(super) fn pop(&self) -> Option<Item> {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            let place = self.place(head);
            let turn = place.turn.load(Ordering::Acquire);
            if turn <= 2 * head {
                return None;
            }
            if turn > 2 * head + 1 {
                // Another consumer was faster.
                spin_loop();
                head = self.head.load(Ordering::Relaxed);
                continue;
            }
            let item = [0, 1].map(|word: usize| place.item[word].load(Ordering::Relaxed));
            match self.head.compare_exchange_weak(
                head,
                head + 1,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    place.turn.store(2 * (head + self.lap()), Ordering::Release);
                    return Some(item);
                }
                Err(now) => head = now,
            }
        }
    }
}

#[cfg(test)]
mod tests;
