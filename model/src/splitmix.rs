//! splitmix64: a counter-based pseudo-random sequence in a few lines of any language.

/// The output of number `index` of the sequence that starts at `seed`.
pub(crate) fn output(seed: u64, index: u64) -> u64 {
    let mut x = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The same as a number in [-1, 1): a multiple of 2^-23, exact also in f32.
pub(crate) fn unit(seed: u64, index: u64) -> f64 {
    let bits = u32::try_from(output(seed, index) >> 40).expect("24 bits remain");
    f64::from(bits) / 8_388_608.0 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_published_sequence() {
        // First outputs of the reference implementation for seed 1234567.
        let found: Vec<u64> = (0..3).map(|index| output(1_234_567, index)).collect();
        assert_eq!(
            found,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
