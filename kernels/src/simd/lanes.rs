//! Sixteen f32 side by side, the unit in which every rule of the arithmetic is written.

/// A piece of work that is compiled as a function of its own. Its `run` must be `inline(always)`.
///
/// Without it one function would hold every format and tile size, and optimising that takes minutes.
pub(super) trait Task {
    type Output;

    fn run(self) -> Self::Output;
}

/// Sixteen f32 and the instructions on them. See the parent module for where its methods may run.
///
/// Methods are `inline(always)` without target features: they take those of the function they end up in.
pub(super) trait Lanes: Copy {
    /// Sixteen i32.
    type Ints: Copy;

    /// Rows of activations that a product handles at once: as many as keep their sums in registers.
    const TILE: usize;

    /// Runs a task in a function with the target features of this type.
    fn isolate<T: Task>(task: T) -> T::Output;

    fn splat(x: f32) -> Self;
    fn load(from: &[f32; 16]) -> Self;
    /// Sixteen little-endian f32.
    fn load_f32(from: &[u8; 64]) -> Self;
    /// Sixteen little-endian half floats, widened exactly.
    fn load_f16(from: &[u8; 32]) -> Self;
    /// Sixteen little-endian upper halves of f32.
    fn load_bf16(from: &[u8; 32]) -> Self;
    fn store(self, to: &mut [f32; 16]);

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// self * factor + addend, rounded once.
    fn fma(self, factor: Self, addend: Self) -> Self;
    /// Flips the sign bit.
    fn neg(self) -> Self;
    /// The larger of both; `other` if one is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of both; `other` if one is NaN.
    fn min(self, other: Self) -> Self;
    /// `then` where self < bound, else `otherwise`. NaN is not below anything.
    fn where_below(self, bound: Self, then: Self, otherwise: Self) -> Self;
    /// The first `count` lanes of self, `other` in the rest.
    fn first(self, count: usize, other: Self) -> Self;

    /// Rounds half to even.
    fn round(self) -> Self;
    /// Rounds half to even; for values that fit.
    fn to_ints(self) -> Self::Ints;
    /// Rounds half to even.
    fn from_ints(ints: Self::Ints) -> Self;
    /// Adds `exponent` (an integer) to the exponent bits.
    fn scale_exponent(self, exponent: Self) -> Self;
    /// The bits without their signs, as integers.
    fn magnitude_bits(self) -> Self::Ints;

    fn int_splat(x: i32) -> Self::Ints;
    fn int_add(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn int_sub(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn int_max(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn int_shift_left_7(a: Self::Ints) -> Self::Ints;
    fn int_shift_right_7(a: Self::Ints) -> Self::Ints;
    fn int_store(a: Self::Ints, to: &mut [i32; 16]);
    /// Stores lanes that lie in -128..=127 as bytes.
    fn int_store_bytes(a: Self::Ints, to: &mut [i8; 16]);

    /// Dot products of one group of 16 q8 rows with `T` rows of `P` planes each; `negated` holds minus the rows' sums.
    fn dot_q8<const P: usize, const T: usize>(
        weights: &[u8; 1024],
        x: [&[[i8; 64]; P]; T],
        negated: [i32; T],
    ) -> [Self::Ints; T];
    /// The same for q4 rows.
    fn dot_q4<const P: usize, const T: usize>(
        weights: &[u8; 512],
        x: [&[[i8; 64]; P]; T],
        negated: [i32; T],
    ) -> [Self::Ints; T];

    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }

    #[inline(always)]
    fn to_array(self) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes);
        lanes
    }

    /// l + (l + 8), l + (l + 4), l + (l + 2), l + (l + 1).
    #[inline(always)]
    fn fold(self) -> f32 {
        crate::math::fold_lanes(self.to_array())
    }

    /// The largest lane.
    #[inline(always)]
    fn fold_max(self) -> f32 {
        crate::math::max(&self.to_array())
    }

    #[inline(always)]
    fn int_to_array(a: Self::Ints) -> [i32; 16] {
        let mut lanes = [0; 16];
        Self::int_store(a, &mut lanes);
        lanes
    }
}

/// Four quantised values as the integer that is broadcast to all lanes.
#[inline(always)]
pub(super) fn quad(x: &[i8; 64], chunk: usize) -> i32 {
    let x = &x.as_chunks::<4>().0[chunk];
    i32::from_le_bytes([
        x[0].cast_unsigned(),
        x[1].cast_unsigned(),
        x[2].cast_unsigned(),
        x[3].cast_unsigned(),
    ])
}

/// Asks for the cache line `ahead` bytes after `at`. Never faults, whatever lies there.
///
/// The hardware prefetcher stops at every 4 KiB page. Asking 4 KiB ahead took the matrix-vector product of q8 weights
/// from 92 % (1 KiB ahead) to 101 % of a plain read with AVX-512, and from 69 % to 93 % with AVX2.
#[inline(always)]
pub(super) fn prefetch<const AHEAD: usize>(at: &u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    let at = std::ptr::from_ref(at).wrapping_add(AHEAD);
    // SAFETY: a hint; prefetching any address is allowed.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}
