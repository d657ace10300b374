//! Which copy of a slab is read: by weight, the same one each time, and another one when it fails.
//!
//! Decides without files or a clock. Nothing here changes a byte of what is read, only where it comes from.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// A copy that failed this often in a row is set aside: the next slabs go to the others at once.
pub(super) const FAILURES_MAX: u32 = 8;

/// Of the slabs that a copy set aside would have given, every one of this number is asked of it again: a drive that
/// comes back is used again, and one that does not costs one failed read in this many.
pub(super) const TRIAL_EVERY: u64 = 64;

/// Orders copies, given with their weights, for one slab: the first is drawn by weight, the next by weight among the
/// rest, and so on. The draw depends on the slab alone.
pub(super) fn order(mut copies: Vec<(usize, u32)>, layer: u32, expert: u32) -> Vec<usize> {
    let mut order = Vec::with_capacity(copies.len());
    let key = u64::from(layer) << 32 | u64::from(expert);
    while copies.len() > 1 {
        let total: u64 = copies.iter().map(|(_, weight)| u64::from(*weight)).sum();
        let mut left = below(mix(key, order.len() as u64), total);
        let drawn = copies.iter().position(|(_, weight)| {
            let hit = left < u64::from(*weight);
            left = left.saturating_sub(u64::from(*weight));
            hit
        });
        order.push(copies.remove(drawn.expect("the draw is below the sum of the weights")).0);
    }
    order.extend(copies.first().map(|(copy, _)| *copy));
    order
}

/// A number below `limit`, as often each as 64 bits allow.
fn below(random: u64, limit: u64) -> u64 {
    u64::try_from((u128::from(random) * u128::from(limit)) >> 64)
        .expect("a product below 2^64 * limit")
}

/// Number `index` of the splitmix64 sequence that starts at `seed`.
fn mix(seed: u64, index: u64) -> u64 {
    let mut x = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// How a copy has been doing. Threads that race here may ask it once more or less than they should.
#[derive(Debug, Default)]
pub(super) struct Health {
    failures: AtomicU32,
    passed_over: AtomicU64,
}

impl Health {
    /// Whether the copy is asked in its turn; else it comes last.
    pub(super) fn admits(&self) -> bool {
        self.failures.load(Relaxed) < FAILURES_MAX
            || self.passed_over.fetch_add(1, Relaxed) % TRIAL_EVERY == TRIAL_EVERY - 1
    }

    /// It gave a slab. True if it had been set aside.
    pub(super) fn succeeded(&self) -> bool {
        // Nearly always zero: then the line stays shared between the processors.
        self.failures.load(Relaxed) > 0 && self.failures.swap(0, Relaxed) >= FAILURES_MAX
    }

    /// It did not give a slab. True if it is set aside with that.
    pub(super) fn failed(&self) -> bool {
        let add = |failures: u32| (failures < FAILURES_MAX).then_some(failures + 1);
        self.failures.fetch_update(Relaxed, Relaxed, add) == Ok(FAILURES_MAX - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slabs of 64 layers with 64 experts each, by the copy that comes first.
    fn check(weights: &[u32], shares: &[f64]) {
        let copies: Vec<_> = weights.iter().copied().enumerate().collect();
        let mut counts = vec![0u32; weights.len()];
        for slab in 0..64 * 64 {
            let order = order(copies.clone(), slab / 64, slab % 64);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..weights.len()), "each copy once: {order:?}");
            counts[order[0]] += 1;
        }
        for (count, share) in counts.iter().zip(shares) {
            let found = f64::from(*count) / 4096.0;
            assert!((found - share).abs() < 0.02, "{counts:?} for weights {weights:?}");
        }
    }

    #[test]
    fn slabs_are_shared_out_by_weight() {
        check(&[1], &[1.0]);
        check(&[1, 1], &[0.5, 0.5]);
        check(&[1, 3], &[0.25, 0.75]);
        check(&[2, 1, 1], &[0.5, 0.25, 0.25]);
        assert!(order(Vec::new(), 0, 0).is_empty());
    }

    #[test]
    fn the_slabs_of_a_failed_copy_are_shared_out_by_weight_too() {
        let seconds = |copy: usize| {
            let orders = (0..4096).map(|expert| order(vec![(0, 1), (1, 1), (2, 2)], 3, expert));
            orders.filter(|order| order[0] == 0 && order[1] == copy).count()
        };
        let (one, two) = (seconds(1), seconds(2));
        assert!((300..400).contains(&one) && (600..740).contains(&two), "{one} {two}");
    }

    #[test]
    fn a_copy_that_keeps_failing_is_set_aside_and_tried_again() {
        let health = Health::default();
        for _ in 1..FAILURES_MAX {
            assert!(!health.failed() && health.admits());
        }
        // One success between failures, and it begins to count again.
        assert!(!health.succeeded());
        for number in 1..=FAILURES_MAX {
            assert_eq!(health.failed(), number == FAILURES_MAX, "said once");
        }
        assert!(!health.failed());
        let admitted = (0..4 * TRIAL_EVERY).filter(|_| health.admits()).count();
        assert_eq!(admitted, 4);
        assert!(health.succeeded() && !health.succeeded());
        assert!(health.admits() && health.admits());
    }
}
