//! Non-linear functions with bits of our own, and the reductions of one vector. See `docs/NUMERICS.md`.
//!
//! The platform's math library returns different bits with and without FMA in its own dispatch, so nothing here calls it:
//! only IEEE operations in a fixed order. `mul_add` without the FMA instruction is a correct, slow software routine.

/// log2(e), rounded to f32.
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// Upper part of ln 2 with 9 trailing zero bits, so that `n * LN2_HIGH` is exact for every exponent n.
pub(crate) const LN2_HIGH: f32 = 0.693_145_75;
/// ln 2 - LN2_HIGH.
pub(crate) const LN2_LOW: f32 = 1.428_606_8e-6;
/// Polynomial of (exp(r) - 1 - r) / r^2 on [-ln2 / 2, ln2 / 2], highest power first (Cephes).
pub(crate) const EXP_POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.0e-1];
/// Below this the exponential is 0: no denormal is ever created.
pub(crate) const EXP_MIN: f32 = -87.0;
/// Above this the exponential is infinite.
pub(crate) const EXP_MAX: f32 = 88.0;

/// 1.5 * 2^23: adding and subtracting it rounds |x| <= 2^22 half to even.
pub(crate) const ROUND_F32: f32 = 12_582_912.0;

/// Rounds half to even. Exact for |x| <= 2^22; larger values must not be passed.
#[inline(always)]
pub(crate) fn round_small(x: f32) -> f32 {
    (x + ROUND_F32) - ROUND_F32
}

/// e^x: 0 below -87, infinite above 88, NaN for NaN; relative error below 1e-7 between.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    if x < EXP_MIN {
        return 0.0;
    }
    if x > EXP_MAX {
        return f32::INFINITY;
    }
    let n = round_small(x * LOG2_E);
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut p = EXP_POLYNOMIAL[0];
    for c in &EXP_POLYNOMIAL[1..] {
        p = p.mul_add(r, *c);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    #[expect(clippy::cast_possible_truncation, reason = "n is an integer in -126..=127")]
    let n = n as i32;
    f32::from_bits(p.to_bits().wrapping_add_signed(n << 23))
}

/// 1 / (1 + exp(-x)).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x / (1 + exp(-x)).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Adds 16 lanes by the tree l + (l + 8), l + (l + 4), l + (l + 2), l + (l + 1).
#[inline(always)]
pub(crate) fn fold_lanes(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// Sum in 16 strided lanes: lane l adds elements l, l + 16, ... in ascending order from 0, then the lanes fold by a tree.
#[inline(always)]
pub fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    for chunk in values.chunks(16) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    fold_lanes(lanes)
}

/// Sum of squares in 16 strided lanes, each a chain of fma, then the same tree.
#[inline(always)]
pub fn sum_of_squares(values: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    for chunk in values.chunks(16) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = value.mul_add(*value, *lane);
        }
    }
    fold_lanes(lanes)
}

/// The largest value; -infinity for an empty slice. NaN never wins.
pub fn max(values: &[f32]) -> f32 {
    values.iter().fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
}

/// Adds the eight segment sums of a product: ((0+1)+(2+3)) + ((4+5)+(6+7)).
#[inline(always)]
pub(crate) fn fold_segments(s: [f32; 8]) -> f32 {
    ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
}

/// Softmax of a row in place: exp(x - max), summed as [`sum`] does, each divided by the sum.
pub fn softmax(values: &mut [f32]) {
    let m = max(values);
    for value in values.iter_mut() {
        *value = exp(*value - m);
    }
    let total = sum(values);
    for value in values.iter_mut() {
        *value /= total;
    }
}

#[cfg(test)]
mod tests;
