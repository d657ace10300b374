//! What a worker bids for an expert: an exponential variate with its weight as the rate. The smallest wins.

use std::cmp::Ordering;

/// One worker's claim on one expert: the smallest `cost / weight` wins.
pub(super) struct Bid {
    pub(super) candidate: usize,
    /// Minus the binary logarithm of a uniform number in (0, 1], in units of 2^-32.
    cost: u64,
    weight: u64,
}

impl Bid {
    pub(super) fn new(layer: u32, expert: u32, candidate: usize, id: &str, weight: u64) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(b"shimmer placement 1")
            .update(&layer.to_le_bytes())
            .update(&expert.to_le_bytes());
        hash.update(id.as_bytes());
        let mut uniform = [0; 8];
        hash.finalize_xof().fill(&mut uniform);
        Self { candidate, cost: minus_log2(u64::from_le_bytes(uniform)), weight }
    }

    /// Orders bids, those of equal size by the bidders' names.
    pub(super) fn compare<'a>(&self, other: &Self, id: impl Fn(usize) -> &'a str) -> Ordering {
        let left = u128::from(self.cost) * u128::from(other.weight);
        let right = u128::from(other.cost) * u128::from(self.weight);
        left.cmp(&right).then_with(|| id(self.candidate).cmp(id(other.candidate)))
    }
}

/// `-log2(bits / 2^64)` in units of 2^-32, by repeated squaring of the mantissa.
fn minus_log2(bits: u64) -> u64 {
    const FRACTION_BITS: u32 = 32;
    let bits = bits.max(1);
    let shift = bits.leading_zeros();
    // The mantissa in [1, 2) with 63 fraction bits.
    let mut mantissa = u128::from(bits << shift);
    let mut log = u64::from(63 - shift);
    for _ in 0..FRACTION_BITS {
        mantissa = (mantissa * mantissa) >> 63;
        log <<= 1;
        if mantissa >> 64 != 0 {
            mantissa >>= 1;
            log |= 1;
        }
    }
    (64 << FRACTION_BITS) - log
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_exact_at_powers_of_two_and_monotone() {
        for power in 0..64u64 {
            assert_eq!(minus_log2(1 << power), (64 - power) << 32);
        }
        assert_eq!(minus_log2(0), 64 << 32);
        assert!(minus_log2(u64::MAX) >= 1);
        let mut last = u64::MAX;
        for step in 1..1000u64 {
            let cost = minus_log2(step * (u64::MAX / 1000));
            assert!(cost < last);
            last = cost;
        }
        // -log2(3/4) = 0.41503749927884...
        let quarter = minus_log2(3 << 62) as f64 / 4_294_967_296.0;
        assert!((quarter - 0.415_037_499_278_84).abs() < 1e-9, "{quarter}");
    }
}
