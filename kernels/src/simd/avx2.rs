//! AVX2 with FMA and F16C: two registers are sixteen lanes.

use std::arch::x86_64::*;

use super::lanes::{Lanes, Task, prefetch, quad};

/// Sixteen f32 in two registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Floats([__m256; 2]);

/// Wraps intrinsics that only compute.
macro_rules! compute {
    ($($body:tt)*) => {
        // SAFETY: computes on registers; the processor has AVX2, FMA and F16C (see the parent module).
        unsafe { $($body)* }
    };
}

/// Wraps one load or store through a reference to an array of exactly the accessed size.
macro_rules! access {
    ($($body:tt)*) => {
        // SAFETY: an unaligned access to all bytes of the referenced array; the processor has AVX2 (see the parent
        // module).
        unsafe { $($body)* }
    };
}

/// The lower and upper halves of an array.
macro_rules! halves {
    ($array:expr, $half:literal) => {{
        let (low, high) = $array.split_at($half);
        let low: &[_; $half] = low.try_into().expect("half of the array");
        let high: &[_; $half] = high.try_into().expect("half of the array");
        [low, high]
    }};
}

/// An expression for the lower and for the upper register.
macro_rules! both {
    (|$i:ident: usize| $body:expr) => {
        [
            {
                let $i = 0;
                $body
            },
            {
                let $i = 1;
                $body
            },
        ]
    };
}

#[inline(always)]
fn load_half(from: &[u8; 32]) -> __m256i {
    access!(_mm256_loadu_si256(from.as_ptr().cast()))
}

#[inline(always)]
fn load_quarter(from: &[u8; 16]) -> __m128i {
    access!(_mm_loadu_si128(from.as_ptr().cast()))
}

/// Lane numbers of the two registers.
#[inline(always)]
fn lane_numbers() -> [__m256i; 2] {
    compute!([
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
        _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)
    ])
}

impl Lanes for Floats {
    type Ints = [__m256i; 2];

    const TILE: usize = 4;

    #[inline(always)]
    fn isolate<T: Task>(task: T) -> T::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        fn isolated<T: Task>(task: T) -> T::Output {
            task.run()
        }
        // SAFETY: the processor has these features (see the parent module).
        unsafe { isolated(task) }
    }

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([compute!(_mm256_set1_ps(x)); 2])
    }

    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        let halves = halves!(from, 8);
        Self(both!(|i: usize| access!(_mm256_loadu_ps(halves[i].as_ptr()))))
    }

    #[inline(always)]
    fn load_f32(from: &[u8; 64]) -> Self {
        let halves = halves!(from, 32);
        Self(both!(|i: usize| compute!(_mm256_castsi256_ps(load_half(halves[i])))))
    }

    #[inline(always)]
    fn load_f16(from: &[u8; 32]) -> Self {
        let halves = halves!(from, 16);
        Self(both!(|i: usize| compute!(_mm256_cvtph_ps(load_quarter(halves[i])))))
    }

    #[inline(always)]
    fn load_bf16(from: &[u8; 32]) -> Self {
        let halves = halves!(from, 16);
        Self(both!(|i: usize| {
            let wide = compute!(_mm256_cvtepu16_epi32(load_quarter(halves[i])));
            compute!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
        }))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        for (half, value) in to.as_chunks_mut::<8>().0.iter_mut().zip(self.0) {
            access!(_mm256_storeu_ps(half.as_mut_ptr(), value));
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_add_ps(self.0[i], other.0[i]))))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_sub_ps(self.0[i], other.0[i]))))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_mul_ps(self.0[i], other.0[i]))))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_div_ps(self.0[i], other.0[i]))))
    }

    #[inline(always)]
    fn fma(self, factor: Self, addend: Self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_fmadd_ps(self.0[i], factor.0[i], addend.0[i]))))
    }

    #[inline(always)]
    fn neg(self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_xor_ps(self.0[i], _mm256_set1_ps(-0.0)))))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_max_ps(self.0[i], other.0[i]))))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(both!(|i: usize| compute!(_mm256_min_ps(self.0[i], other.0[i]))))
    }

    #[inline(always)]
    fn where_below(self, bound: Self, then: Self, otherwise: Self) -> Self {
        Self(both!(|i: usize| {
            let below = compute!(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0[i], bound.0[i]));
            compute!(_mm256_blendv_ps(otherwise.0[i], then.0[i], below))
        }))
    }

    #[inline(always)]
    fn first(self, count: usize, other: Self) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_possible_wrap,
            reason = "at most 16"
        )]
        let count = count.min(16) as i32;
        let numbers = lane_numbers();
        Self(both!(|i: usize| {
            let taken = compute!(_mm256_castsi256_ps(_mm256_cmpgt_epi32(
                _mm256_set1_epi32(count),
                numbers[i]
            )));
            compute!(_mm256_blendv_ps(other.0[i], self.0[i], taken))
        }))
    }

    #[inline(always)]
    fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        Self(both!(|i: usize| compute!(_mm256_round_ps::<NEAREST>(self.0[i]))))
    }

    #[inline(always)]
    fn to_ints(self) -> [__m256i; 2] {
        both!(|i: usize| compute!(_mm256_cvtps_epi32(self.0[i])))
    }

    #[inline(always)]
    fn from_ints(ints: [__m256i; 2]) -> Self {
        Self(both!(|i: usize| compute!(_mm256_cvtepi32_ps(ints[i]))))
    }

    #[inline(always)]
    fn scale_exponent(self, exponent: Self) -> Self {
        Self(both!(|i: usize| {
            let exponent = compute!(_mm256_slli_epi32::<23>(_mm256_cvtps_epi32(exponent.0[i])));
            compute!(_mm256_castsi256_ps(_mm256_add_epi32(
                _mm256_castps_si256(self.0[i]),
                exponent
            )))
        }))
    }

    #[inline(always)]
    fn magnitude_bits(self) -> [__m256i; 2] {
        both!(|i: usize| compute!(_mm256_and_si256(
            _mm256_castps_si256(self.0[i]),
            _mm256_set1_epi32(i32::MAX)
        )))
    }

    #[inline(always)]
    fn int_splat(x: i32) -> [__m256i; 2] {
        [compute!(_mm256_set1_epi32(x)); 2]
    }

    #[inline(always)]
    fn int_add(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i: usize| compute!(_mm256_add_epi32(a[i], b[i])))
    }

    #[inline(always)]
    fn int_sub(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i: usize| compute!(_mm256_sub_epi32(a[i], b[i])))
    }

    #[inline(always)]
    fn int_max(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i: usize| compute!(_mm256_max_epi32(a[i], b[i])))
    }

    #[inline(always)]
    fn int_shift_left_7(a: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i: usize| compute!(_mm256_slli_epi32::<7>(a[i])))
    }

    #[inline(always)]
    fn int_shift_right_7(a: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i: usize| compute!(_mm256_srai_epi32::<7>(a[i])))
    }

    #[inline(always)]
    fn int_store(a: [__m256i; 2], to: &mut [i32; 16]) {
        for (half, value) in to.as_chunks_mut::<8>().0.iter_mut().zip(a) {
            access!(_mm256_storeu_si256(half.as_mut_ptr().cast(), value));
        }
    }

    #[inline(always)]
    fn int_store_bytes(a: [__m256i; 2], to: &mut [i8; 16]) {
        // Packing works within halves: lanes 0-3 8-11 | 4-7 12-15, put in order as 64-bit words.
        let words =
            compute!(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a[0], a[1])));
        let bytes = compute!(_mm_packs_epi16(
            _mm256_castsi256_si128(words),
            _mm256_extracti128_si256::<1>(words)
        ));
        access!(_mm_storeu_si128(to.as_mut_ptr().cast(), bytes));
    }

    /// maddubs multiplies unsigned by signed bytes: the sign of the weight moves to the activation. A pair of products is
    /// at most 2 * 127 * 127 = 32258, so the 16-bit sums never saturate.
    #[inline(always)]
    fn dot_q8<const P: usize, const T: usize>(
        weights: &[u8; 1024],
        x: [&[[i8; 64]; P]; T],
        _negated: [i32; T],
    ) -> [[__m256i; 2]; T] {
        let ones = compute!(_mm256_set1_epi16(1));
        let mut totals = [[compute!(_mm256_setzero_si256()); 2]; T];
        for half in 0..2 {
            let mut sums = [[compute!(_mm256_setzero_si256()); P]; T];
            for (c, chunk) in weights.as_chunks::<64>().0.iter().enumerate() {
                if T * P <= 4 && half == 0 {
                    prefetch::<4096>(&chunk[0]);
                }
                let w = load_half(halves!(chunk, 32)[half]);
                let magnitude = compute!(_mm256_abs_epi8(w));
                for t in 0..T {
                    for p in 0..P {
                        let x = compute!(_mm256_sign_epi8(_mm256_set1_epi32(quad(&x[t][p], c)), w));
                        let pairs = compute!(_mm256_maddubs_epi16(magnitude, x));
                        sums[t][p] =
                            compute!(_mm256_add_epi32(sums[t][p], _mm256_madd_epi16(pairs, ones)));
                    }
                }
            }
            for t in 0..T {
                totals[t][half] = join_planes(sums[t]);
            }
        }
        totals
    }

    /// Nibbles are weights + 8. Eight pairs of products are at most 8 * 2 * 15 * 127 = 30480, so they add up in 16 bits.
    #[inline(always)]
    fn dot_q4<const P: usize, const T: usize>(
        weights: &[u8; 512],
        x: [&[[i8; 64]; P]; T],
        negated: [i32; T],
    ) -> [[__m256i; 2]; T] {
        if T * P == 1 {
            return [dot_q4_one(weights, &x[0][0], negated[0]); T];
        }
        let (ones, mask) = compute!((_mm256_set1_epi16(1), _mm256_set1_epi8(15)));
        let mut totals = [[compute!(_mm256_setzero_si256()); 2]; T];
        for half in 0..2 {
            let mut lows = [[compute!(_mm256_setzero_si256()); P]; T];
            let mut highs = lows;
            for (c, chunk) in weights.as_chunks::<64>().0.iter().enumerate() {
                if T * P <= 4 && half == 0 {
                    prefetch::<4096>(&chunk[0]);
                }
                let bytes = load_half(halves!(chunk, 32)[half]);
                let low = compute!(_mm256_and_si256(bytes, mask));
                let high = compute!(_mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask));
                for t in 0..T {
                    for p in 0..P {
                        let (a, b) = (quad(&x[t][p], c), quad(&x[t][p], 8 + c));
                        let a = compute!(_mm256_maddubs_epi16(low, _mm256_set1_epi32(a)));
                        let b = compute!(_mm256_maddubs_epi16(high, _mm256_set1_epi32(b)));
                        lows[t][p] = compute!(_mm256_add_epi16(lows[t][p], a));
                        highs[t][p] = compute!(_mm256_add_epi16(highs[t][p], b));
                    }
                }
            }
            for t in 0..T {
                let mut sums = [compute!(_mm256_setzero_si256()); P];
                for p in 0..P {
                    let (low, high) = (lows[t][p], highs[t][p]);
                    sums[p] = compute!(_mm256_add_epi32(
                        _mm256_madd_epi16(low, ones),
                        _mm256_madd_epi16(high, ones)
                    ));
                }
                let correction = compute!(_mm256_set1_epi32(negated[t].wrapping_mul(8)));
                totals[t][half] = compute!(_mm256_add_epi32(join_planes(sums), correction));
            }
        }
        totals
    }
}

/// The product of a decode step: one row of one plane leaves registers for both halves, which share the broadcasts.
#[inline(always)]
fn dot_q4_one(weights: &[u8; 512], x: &[i8; 64], negated: i32) -> [__m256i; 2] {
    let (ones, mask) = compute!((_mm256_set1_epi16(1), _mm256_set1_epi8(15)));
    let mut lows = [compute!(_mm256_setzero_si256()); 2];
    let mut highs = lows;
    for (c, chunk) in weights.as_chunks::<64>().0.iter().enumerate() {
        prefetch::<4096>(&chunk[0]);
        let a = compute!(_mm256_set1_epi32(quad(x, c)));
        let b = compute!(_mm256_set1_epi32(quad(x, 8 + c)));
        let halves = halves!(chunk, 32);
        for half in 0..2 {
            let bytes = load_half(halves[half]);
            let low = compute!(_mm256_and_si256(bytes, mask));
            let high = compute!(_mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask));
            lows[half] = compute!(_mm256_add_epi16(lows[half], _mm256_maddubs_epi16(low, a)));
            highs[half] = compute!(_mm256_add_epi16(highs[half], _mm256_maddubs_epi16(high, b)));
        }
    }
    let correction = compute!(_mm256_set1_epi32(negated.wrapping_mul(8)));
    both!(|i: usize| {
        let sums = compute!(_mm256_add_epi32(
            _mm256_madd_epi16(lows[i], ones),
            _mm256_madd_epi16(highs[i], ones)
        ));
        compute!(_mm256_add_epi32(sums, correction))
    })
}

/// 128 * upper plane + lower plane, or the only plane.
#[inline(always)]
fn join_planes<const P: usize>(planes: [__m256i; P]) -> __m256i {
    if P == 2 {
        compute!(_mm256_add_epi32(_mm256_slli_epi32::<7>(planes[0]), planes[P - 1]))
    } else {
        planes[0]
    }
}
