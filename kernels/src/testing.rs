//! Seeded inputs and bit comparison for the tests of this crate.

use crate::{MatrixLayout, WeightFormat};

/// splitmix64.
#[derive(Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A value in [-1, 1).
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    /// Values in (-2, 2), scaled by powers of two from -spread to spread.
    pub(crate) fn floats(&mut self, count: usize, spread: u32) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let exponent = (self.next() % u64::from(2 * spread + 1)) as i32 - spread as i32;
                self.float() * f32::from_bits(((127 + exponent) as u32) << 23)
            })
            .collect()
    }
}

/// Random weights and scales of a layout: finite, and without -128 in q8.
pub(crate) fn random_matrix(layout: &MatrixLayout, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0_u8; layout.total_bytes()];
    let (weights, rest) = bytes.split_at_mut(layout.weight_bytes());
    match layout.format() {
        WeightFormat::Q8G64 => weights.fill_with(|| (rng.next() % 255) as u8 ^ 0x80 | 1),
        WeightFormat::Q4G64 => weights.fill_with(|| rng.next() as u8),
        WeightFormat::Bf16 => fill(weights, || half::bf16::from_f32(rng.float()).to_le_bytes()),
        WeightFormat::F16 => fill(weights, || half::f16::from_f32(rng.float()).to_le_bytes()),
        WeightFormat::F32 => fill(weights, || rng.float().to_le_bytes()),
    }
    fill(rest, || half::f16::from_f32(rng.float() * 0.01).to_le_bytes());
    bytes
}

fn fill<const N: usize>(bytes: &mut [u8], mut next: impl FnMut() -> [u8; N]) {
    bytes.chunks_exact_mut(N).for_each(|chunk| chunk.copy_from_slice(&next()));
}

/// Equal bits; any NaN equals any other.
pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}
