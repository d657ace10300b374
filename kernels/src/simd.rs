//! Vector versions of the hot operations, and the one place that chooses between them.
//!
//! Every operation is written once over [`lanes::Lanes`], sixteen f32 side by side, and compiled for AVX2 and for AVX-512;
//! only the integer dot products differ by instruction set. The scalar code is compiled twice, with and without the fused
//! multiply-add instruction. All of them give the same bits; tests compare them.
//!
//! HOT PATH. `unsafe` is worth it here: the scalar build reads weights at a tenth of what memory delivers.
//!
//! # Soundness
//!
//! Methods of a `Lanes` type may only run on a processor with its instructions. Such code is reached through this file
//! alone, by functions that carry the target features, and those are called only under a [`Level`], which is only made
//! after the processor was asked.

#![expect(unsafe_code, reason = "intrinsics; see the module header")]
#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use crate::activations::RowsView;
use crate::attention::Attend;
use crate::strided::TileMut;
use crate::{ActivationFormat, Isa, Matrix, RopeTable, combine, scalar};

#[cfg(target_arch = "x86_64")]
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod element;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod matmul;
#[cfg(target_arch = "x86_64")]
mod rows;

/// Proof that the processor runs a set of instructions. Only [`Level::new`] makes one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Level(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    Plain,
    /// Scalar code with the fused multiply-add instruction.
    #[cfg(target_arch = "x86_64")]
    Fma,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The best set that this processor runs.
pub(crate) fn detect() -> Isa {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        if avx512 {
            return Isa::Avx512;
        }
        if avx2 {
            return Isa::Avx2;
        }
    }
    Isa::Scalar
}

impl Level {
    /// The level of `isa`; `None` if the processor lacks it.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        if isa > detect() {
            return None;
        }
        #[cfg(target_arch = "x86_64")]
        return Some(Self(match isa {
            Isa::Scalar if is_x86_feature_detected!("fma") => Set::Fma,
            Isa::Scalar => Set::Plain,
            Isa::Avx2 => Set::Avx2,
            Isa::Avx512 => Set::Avx512,
        }));
        #[cfg(not(target_arch = "x86_64"))]
        Some(Self(Set::Plain))
    }

    /// Scalar code without any instruction that not every machine has.
    #[cfg(test)]
    pub(crate) fn plain() -> Self {
        Self(Set::Plain)
    }
}

/// Declares operations: a name, its arguments, the scalar version and the vector version.
macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $scalar:path, $($vector:ident)::+;)*) => {$(
        $(#[$doc])*
        pub(crate) fn $name(level: Level, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "fma")]
            fn fma($($arg: $type),*) $(-> $result)? {
                $scalar($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $type),*) $(-> $result)? {
                $($vector)::+::<avx2::Floats>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            fn avx512($($arg: $type),*) $(-> $result)? {
                $($vector)::+::<avx512::Floats>($($arg),*)
            }
            match level.0 {
                Set::Plain => $scalar($($arg),*),
                // SAFETY: a level with this set exists only where the processor has FMA.
                #[cfg(target_arch = "x86_64")]
                Set::Fma => unsafe { fma($($arg),*) },
                // SAFETY: a level with this set exists only where the processor has AVX2, FMA and F16C.
                #[cfg(target_arch = "x86_64")]
                Set::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: a level with this set exists only where the processor has all of these.
                #[cfg(target_arch = "x86_64")]
                Set::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    )*};
}

operations! {
    /// Products of the blocks from `first_block` (as many as `out` has columns for) with every row of `x`.
    matmul(w: &Matrix<'_>, first_block: usize, x: RowsView<'_>, out: &mut TileMut<'_>)
        = scalar::matmul, matmul::matmul;
    /// Quantises one row.
    quantise(format: ActivationFormat, x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i32])
        = scalar::quantise, rows::quantise;
    /// gate = silu(gate) * up.
    swiglu(gate: &mut [f32], up: &[f32]) = scalar::swiglu, rows::swiglu;
    /// exp of every value.
    exp(values: &mut [f32]) = scalar::exp, rows::exp_in_place;
    /// Norm of one row.
    rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = scalar::rms_norm, rows::rms_norm;
    /// Rotation of one head.
    rope(head: &mut [f32], table: &RopeTable, position: usize) = scalar::rope, rows::rope;
    /// x += y.
    add_assign(x: &mut [f32], y: &[f32]) = scalar::add_assign, rows::add_assign;
    /// Attention of one piece.
    attend(work: &Attend<'_>, out: &mut TileMut<'_>) = scalar::attend, attention::attend;
    /// Exact combine of one term.
    accumulate(acc: &mut [i64], gate: f32, y: &[f32]) -> bool = combine::accumulate_all, rows::accumulate;
    /// Reads all bytes.
    read_all(bytes: &[u8]) -> i32 = scalar::read_all, rows::read_all;
    /// End of the exact combine.
    finish(acc: &[i64], out: &mut [f32]) = combine::finish_all, rows::finish;
}

#[cfg(test)]
pub(crate) mod tests;
