//! How long compute stood still at a time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Upper bounds in microseconds: from one read of a fast drive to what a client notices. One more bucket has no bound.
pub const WAIT_BOUNDS_US: [u64; 14] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 5_000_000,
];

/// Waits by bucket, not added up. The last bucket takes what is above all bounds.
pub type WaitCounts = [u64; WAIT_BOUNDS_US.len() + 1];

/// Live counts of waits.
#[derive(Debug, Default)]
pub struct Waits([AtomicU64; WAIT_BOUNDS_US.len() + 1]);

impl Waits {
    pub(super) fn observe(&self, us: u64) {
        let bucket = WAIT_BOUNDS_US.iter().position(|&bound| us <= bound);
        self.0[bucket.unwrap_or(WAIT_BOUNDS_US.len())].fetch_add(1, Relaxed);
    }

    pub(super) fn counts(&self) -> WaitCounts {
        std::array::from_fn(|bucket| self.0[bucket].load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_belong_to_their_bucket() {
        let waits = Waits::default();
        for us in [0, 100, 101, 5_000_000, 5_000_001, u64::MAX] {
            waits.observe(us);
        }
        let counts = waits.counts();
        assert_eq!((counts[0], counts[1], counts[13], counts[14]), (2, 1, 1, 2));
        assert!(WAIT_BOUNDS_US.is_sorted_by(|a, b| a < b));
    }
}
