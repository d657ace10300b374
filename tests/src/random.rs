//! Values that depend on a seed and an index only, so that a failing case can be named and made again.

/// `count` values in [-1, 1), multiples of 2^-23.
pub fn uniform(seed: u64, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(seed, index)).collect()
}

/// `count` token ids below `vocabulary`.
///
/// # Panics
/// The vocabulary is empty.
pub fn tokens(seed: u64, count: usize, vocabulary: u32) -> Vec<u32> {
    let bound = u64::from(vocabulary);
    let draw = |index| {
        u32::try_from(((bits(seed, index) >> 32) * bound) >> 32).expect("below a u32 bound")
    };
    (0..count).map(draw).collect()
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "24 bits are exact in f32 and f64"
)]
fn value(seed: u64, index: usize) -> f32 {
    ((bits(seed, index) >> 40) as f64 / f64::from(1 << 23) - 1.0) as f32
}

/// The splitmix64 stream of a seed.
fn bits(seed: u64, index: usize) -> u64 {
    let step = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(index as u64 + 1);
    let mut z = seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(step);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
