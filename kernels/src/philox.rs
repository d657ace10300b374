//! Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): random numbers as a
//! function of a key and a counter, so that a draw depends on (seed, choice, position) and on nothing that came before.

const MULTIPLIER_0: u32 = 0xD251_1F53;
const MULTIPLIER_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;

/// The upper and lower halves of a 32 x 32 bit product.
#[expect(clippy::cast_possible_truncation, reason = "the two halves are what is wanted")]
const fn multiply(a: u32, b: u32) -> (u32, u32) {
    let product = a as u64 * b as u64;
    ((product >> 32) as u32, product as u32)
}

/// Ten rounds of Philox on a 128-bit counter under a 64-bit key.
pub const fn philox4x32_10(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut c = counter;
    let mut k = key;
    let mut round = 0;
    while round < 10 {
        let (high_0, low_0) = multiply(MULTIPLIER_0, c[0]);
        let (high_1, low_1) = multiply(MULTIPLIER_1, c[2]);
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0];
        k = [k[0].wrapping_add(WEYL_0), k[1].wrapping_add(WEYL_1)];
        round += 1;
    }
    c
}

/// A number in [0, 1) with 53 random bits, from two words of output.
pub fn unit_f64(high: u32, low: u32) -> f64 {
    // 2^-53; the 53-bit integer is exact in f64.
    let bits = (u64::from(high) << 21) | (u64::from(low) >> 11);
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    let value = bits as f64;
    value * (1.0 / 9_007_199_254_740_992.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
    #[test]
    fn known_answers() {
        let check = |key, counter, expected| assert_eq!(philox4x32_10(key, counter), expected);
        check([0, 0], [0, 0, 0, 0], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 2], [u32::MAX; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0xa409_3822, 0x299f_31d0],
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn unit_stays_below_one() {
        assert!(unit_f64(u32::MAX, u32::MAX) < 1.0);
        assert!(unit_f64(0, 0) == 0.0);
    }
}
