//! Durations in buckets, as exporters show them.

use std::time::Duration;

use serde::Serialize;

/// Upper bounds in microseconds: from what a warm layer takes to the longest wait for one. One more bucket has no bound.
pub const BOUNDS_US: [u64; 16] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 5_000_000, 10_000_000,
];

/// How often a duration fell into each bucket. The last bucket takes what is above all bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Histogram {
    /// By bucket, not added up.
    pub counts: [u64; BOUNDS_US.len() + 1],
    /// All durations together.
    #[serde(rename = "sum_us", serialize_with = "micros")]
    pub sum: Duration,
}

impl Histogram {
    /// Counts a duration.
    #[inline(never)]
    pub fn observe(&mut self, duration: Duration) {
        let us = duration.as_micros();
        let bucket = BOUNDS_US.iter().position(|&bound| us <= u128::from(bound));
        self.counts[bucket.unwrap_or(BOUNDS_US.len())] += 1;
        self.sum += duration;
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// What was counted after an earlier moment of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let counts = std::array::from_fn(|bucket| self.counts[bucket] - earlier.counts[bucket]);
        Self { counts, sum: self.sum.saturating_sub(earlier.sum) }
    }
}

/// Whole microseconds, for a snapshot.
pub(crate) fn micros<S: serde::Serializer>(duration: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_u64(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(us: u64, bucket: usize) {
        let mut histogram = Histogram::default();
        histogram.observe(Duration::from_micros(us));
        assert_eq!(histogram.counts[bucket], 1, "{us}");
        assert_eq!((histogram.count(), histogram.sum), (1, Duration::from_micros(us)));
    }

    #[test]
    fn bounds_belong_to_their_bucket() {
        check(0, 0);
        check(100, 0);
        check(101, 1);
        check(10_000_000, 15);
        check(10_000_001, 16);
        assert!(BOUNDS_US.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn differences_are_what_was_counted_between() {
        let mut histogram = Histogram::default();
        histogram.observe(Duration::from_millis(2));
        let before = histogram;
        histogram.observe(Duration::from_millis(3));
        let between = histogram.since(&before);
        assert_eq!((between.count(), between.sum), (1, Duration::from_millis(3)));
    }
}
