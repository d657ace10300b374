//! Random choices that follow from a seed.

use std::time::Duration;

/// A splitmix64 stream.
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5eed)
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `count`, which is not 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        let place = (u128::from(self.roll()) * count as u128) >> 64;
        usize::try_from(place).expect("below a usize")
    }

    /// True in `percent` of 100 cases.
    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// Between two numbers of milliseconds.
    pub(crate) fn ms(&mut self, from: u64, to: u64) -> Duration {
        let span = usize::try_from((to - from) * 1000).expect("a short time");
        Duration::from_millis(from) + Duration::from_micros(self.below(span.max(1)) as u64)
    }
}

/// Spreads a number over all bits.
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
