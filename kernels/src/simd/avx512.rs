//! AVX-512: one register is sixteen lanes, and VNNI multiplies 64 bytes in one instruction.

use std::arch::x86_64::*;

use super::lanes::{Lanes, Task, prefetch, quad};

/// Sixteen f32 in one register.
#[derive(Debug, Clone, Copy)]
pub(super) struct Floats(__m512);

/// Wraps intrinsics that only compute.
macro_rules! compute {
    ($($body:tt)*) => {
        // SAFETY: computes on registers; the processor has AVX-512 F, BW, DQ, VL and VNNI (see the parent module).
        unsafe { $($body)* }
    };
}

/// Wraps one load or store through a reference to an array of exactly the accessed size.
macro_rules! access {
    ($($body:tt)*) => {
        // SAFETY: an unaligned access to all bytes of the referenced array; the processor has AVX-512 (see the parent
        // module).
        unsafe { $($body)* }
    };
}

#[inline(always)]
fn load_bytes(from: &[u8; 64]) -> __m512i {
    access!(_mm512_loadu_si512(from.as_ptr().cast()))
}

impl Lanes for Floats {
    type Ints = __m512i;

    const TILE: usize = 8;

    #[inline(always)]
    fn isolate<T: Task>(task: T) -> T::Output {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        #[inline(never)]
        fn isolated<T: Task>(task: T) -> T::Output {
            task.run()
        }
        // SAFETY: the processor has these features (see the parent module).
        unsafe { isolated(task) }
    }

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self(compute!(_mm512_set1_ps(x)))
    }

    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        Self(access!(_mm512_loadu_ps(from.as_ptr())))
    }

    #[inline(always)]
    fn load_f32(from: &[u8; 64]) -> Self {
        Self(access!(_mm512_loadu_ps(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_f16(from: &[u8; 32]) -> Self {
        let halves = access!(_mm256_loadu_si256(from.as_ptr().cast()));
        Self(compute!(_mm512_cvtph_ps(halves)))
    }

    #[inline(always)]
    fn load_bf16(from: &[u8; 32]) -> Self {
        let halves = access!(_mm256_loadu_si256(from.as_ptr().cast()));
        Self(compute!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        access!(_mm512_storeu_ps(to.as_mut_ptr(), self.0));
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(compute!(_mm512_add_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(compute!(_mm512_sub_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(compute!(_mm512_mul_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(compute!(_mm512_div_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn fma(self, factor: Self, addend: Self) -> Self {
        Self(compute!(_mm512_fmadd_ps(self.0, factor.0, addend.0)))
    }

    #[inline(always)]
    fn neg(self) -> Self {
        Self(compute!(_mm512_xor_ps(self.0, _mm512_set1_ps(-0.0))))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(compute!(_mm512_max_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(compute!(_mm512_min_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn where_below(self, bound: Self, then: Self, otherwise: Self) -> Self {
        let below = compute!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0));
        Self(compute!(_mm512_mask_blend_ps(below, otherwise.0, then.0)))
    }

    #[inline(always)]
    fn first(self, count: usize, other: Self) -> Self {
        let mask = if count >= 16 { u16::MAX } else { (1 << count) - 1 };
        Self(compute!(_mm512_mask_blend_ps(mask, other.0, self.0)))
    }

    #[inline(always)]
    fn round(self) -> Self {
        Self(compute!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(
            self.0
        )))
    }

    #[inline(always)]
    fn to_ints(self) -> __m512i {
        compute!(_mm512_cvt_roundps_epi32::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(
            self.0
        ))
    }

    #[inline(always)]
    fn from_ints(ints: __m512i) -> Self {
        Self(compute!(
            _mm512_cvt_roundepi32_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(ints)
        ))
    }

    #[inline(always)]
    fn scale_exponent(self, exponent: Self) -> Self {
        let exponent = compute!(_mm512_slli_epi32::<23>(_mm512_cvtps_epi32(exponent.0)));
        Self(compute!(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), exponent))))
    }

    #[inline(always)]
    fn magnitude_bits(self) -> __m512i {
        compute!(_mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(i32::MAX)))
    }

    #[inline(always)]
    fn int_splat(x: i32) -> __m512i {
        compute!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn int_add(a: __m512i, b: __m512i) -> __m512i {
        compute!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn int_sub(a: __m512i, b: __m512i) -> __m512i {
        compute!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    fn int_max(a: __m512i, b: __m512i) -> __m512i {
        compute!(_mm512_max_epi32(a, b))
    }

    #[inline(always)]
    fn int_shift_left_7(a: __m512i) -> __m512i {
        compute!(_mm512_slli_epi32::<7>(a))
    }

    #[inline(always)]
    fn int_shift_right_7(a: __m512i) -> __m512i {
        compute!(_mm512_srai_epi32::<7>(a))
    }

    #[inline(always)]
    fn int_store(a: __m512i, to: &mut [i32; 16]) {
        access!(_mm512_storeu_si512(to.as_mut_ptr().cast(), a));
    }

    #[inline(always)]
    fn int_store_bytes(a: __m512i, to: &mut [i8; 16]) {
        let bytes = compute!(_mm512_cvtepi32_epi8(a));
        access!(_mm_storeu_si128(to.as_mut_ptr().cast(), bytes));
    }

    /// VNNI multiplies unsigned by signed bytes: weights are biased by 128, which adds 128 * sum(x) to every lane.
    #[inline(always)]
    fn dot_q8<const P: usize, const T: usize>(
        weights: &[u8; 1024],
        x: [&[[i8; 64]; P]; T],
        negated: [i32; T],
    ) -> [__m512i; T] {
        let bias = compute!(_mm512_set1_epi8(i8::MIN));
        let mut sums = Sums::<P, T>::new();
        for (quarter, chunks) in weights.as_chunks::<64>().0.as_chunks::<4>().0.iter().enumerate() {
            for (c, chunk) in chunks.iter().enumerate() {
                if T * P <= 4 {
                    prefetch::<4096>(&chunk[0]);
                }
                let biased = compute!(_mm512_xor_si512(load_bytes(chunk), bias));
                sums.add(c, biased, &x, quarter * 4 + c);
            }
        }
        sums.total::<7>(negated)
    }

    /// The nibbles are weights + 8, which adds 8 * sum(x) to every lane.
    #[inline(always)]
    fn dot_q4<const P: usize, const T: usize>(
        weights: &[u8; 512],
        x: [&[[i8; 64]; P]; T],
        negated: [i32; T],
    ) -> [__m512i; T] {
        let mask = compute!(_mm512_set1_epi8(15));
        let mut sums = Sums::<P, T>::new();
        for (quarter, chunks) in weights.as_chunks::<64>().0.as_chunks::<2>().0.iter().enumerate() {
            for (c, chunk) in chunks.iter().enumerate() {
                if T * P <= 4 {
                    prefetch::<4096>(&chunk[0]);
                }
                let bytes = load_bytes(chunk);
                let low = compute!(_mm512_and_si512(bytes, mask));
                let high = compute!(_mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask));
                sums.add(2 * c, low, &x, quarter * 2 + c);
                sums.add(2 * c + 1, high, &x, 8 + quarter * 2 + c);
            }
        }
        sums.total::<3>(negated)
    }
}

/// Running integer sums of `T` rows with `P` planes. Few of them are kept in several parts, since each VNNI instruction
/// waits five cycles for the one before it on the same register.
struct Sums<const P: usize, const T: usize>([[[__m512i; P]; T]; 4]);

impl<const P: usize, const T: usize> Sums<P, T> {
    const PARTS: usize = if T * P >= 16 {
        1
    } else if T * P >= 8 {
        2
    } else {
        4
    };

    #[inline(always)]
    fn new() -> Self {
        Self([[[compute!(_mm512_setzero_si512()); P]; T]; 4])
    }

    /// Adds unsigned weights times chunk `chunk` of every row to part `part`.
    #[inline(always)]
    fn add(&mut self, part: usize, weights: __m512i, x: &[&[[i8; 64]; P]; T], chunk: usize) {
        let part = part % Self::PARTS;
        for t in 0..T {
            for p in 0..P {
                let sum = &mut self.0[part][t][p];
                *sum = compute!(_mm512_dpbusd_epi32(
                    *sum,
                    weights,
                    _mm512_set1_epi32(quad(&x[t][p], chunk))
                ));
            }
        }
    }

    /// 128 * upper plane + lower plane, plus the negated sums shifted by the bias of the weights.
    #[inline(always)]
    fn total<const BIAS: u32>(self, negated: [i32; T]) -> [__m512i; T] {
        let mut totals = [compute!(_mm512_setzero_si512()); T];
        for t in 0..T {
            let correction = compute!(_mm512_slli_epi32::<BIAS>(_mm512_set1_epi32(negated[t])));
            let mut planes = [correction; P];
            for p in 0..P {
                planes[p] = self.0[0][t][p];
                for part in 1..Self::PARTS {
                    planes[p] = Floats::int_add(planes[p], self.0[part][t][p]);
                }
            }
            let mut sum = planes[0];
            if P == 2 {
                sum = Floats::int_add(Floats::int_shift_left_7(sum), planes[P - 1]);
            }
            totals[t] = Floats::int_add(sum, correction);
        }
        totals
    }
}
