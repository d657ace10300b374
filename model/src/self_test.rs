//! The self-test of an expert: one fixed row through the expert function, and a digest of what comes out. The digest is
//! made when the container is, and stored in its manifest; a worker that computes another one has damaged memory, a
//! damaged container or another arithmetic, and is not given work.

use shimmer_kernels::{
    ActivationFormat, ActivationRows, Expert, ExpertLayout, ExpertScratch, Kernels,
};

use crate::splitmix;

/// Start of the pseudo-random sequence that the row is made of ("shimmer\0" in ASCII, big endian).
const SEED: u64 = 0x7368_696d_6d65_7200;

/// The row: values in [-1, 1), multiples of 2^-23, from splitmix64.
#[must_use]
pub fn row(hidden: usize) -> Vec<f32> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "multiples of 2^-23 below 1 are exact in f32"
    )]
    (0..hidden as u64).map(|index| splitmix::unit(SEED, index) as f32).collect()
}

/// The first 16 bytes of blake3 over the values as little-endian f32.
#[must_use]
pub fn digest(output: &[f32]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for value in output {
        hasher.update(&value.to_le_bytes());
    }
    let mut digest = [0; 16];
    digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    digest
}

/// Runs the self-test of an expert: the row in the activation format of the class, through the expert.
#[must_use]
pub fn run(
    kernels: &Kernels,
    layout: &ExpertLayout,
    expert: &Expert<'_>,
    activations: ActivationFormat,
    scratch: &mut ExpertScratch,
) -> [u8; 16] {
    let mut rows = ActivationRows::new();
    rows.set(kernels, activations, &row(layout.hidden()), 1, layout.hidden());
    let mut output = vec![0.0; layout.hidden()];
    kernels.expert(expert, &rows, &[0], &mut output, scratch);
    digest(&output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_is_fixed() {
        let row = row(4096);
        assert!(row.iter().all(|value| (-1.0..1.0).contains(value)));
        assert_eq!(hex::encode(digest(&row)), "045151ec1ee8b657d27b9a4be28088fe");
    }

    #[test]
    fn the_digest_sees_every_bit() {
        assert_ne!(digest(&[0.0]), digest(&[-0.0]));
        assert_ne!(digest(&[1.0, 2.0]), digest(&[2.0, 1.0]));
    }
}
