//! Waits between attempts: doubling, bounded, jittered, so that many peers do not retry in step. A plain state machine;
//! the seed decides the jitter.

use std::time::Duration;

/// The waits of whoever retries.
#[derive(Debug, Clone)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    failures: u32,
    seed: u64,
}

impl Backoff {
    /// Waits that begin at `min` and never exceed `max`.
    pub fn new(min: Duration, max: Duration, seed: u64) -> Self {
        Self { min, max: max.max(min), failures: 0, seed }
    }

    /// The wait after one more failure: between half and all of the doubled time.
    pub fn fail(&mut self) -> Duration {
        let doubled = self.min.saturating_mul(1 << self.failures.min(20)).min(self.max);
        self.failures = self.failures.saturating_add(1);
        doubled / 2 + doubled.mul_f64(self.uniform() / 2.0)
    }

    /// Something worked: the next wait is short again.
    pub fn succeed(&mut self) {
        self.failures = 0;
    }

    /// A number in [0, 1), by splitmix64.
    fn uniform(&mut self) -> f64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        f64::from(u32::try_from(z >> 32).expect("32 bits are left")) / 4_294_967_296.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_within_bounds_and_jitter() {
        let ms = Duration::from_millis;
        let mut one = Backoff::new(ms(100), ms(5000), 1);
        let mut two = Backoff::new(ms(100), ms(5000), 2);
        let mut differ = false;
        for bound in [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000] {
            let wait = one.fail();
            assert!(wait >= ms(bound) / 2 && wait <= ms(bound), "{wait:?} for {bound}");
            differ |= wait != two.fail();
        }
        assert!(differ);
        one.succeed();
        assert!(one.fail() <= ms(100));
        for _ in 0..100 {
            assert!(two.fail() <= ms(5000));
        }
    }
}
