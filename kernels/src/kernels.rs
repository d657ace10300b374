//! The door to all arithmetic: which instruction set runs is chosen here, once; the bits never depend on it.

use std::fmt;
use std::str::FromStr;

use rayon::prelude::*;

use crate::activations::RowsView;
use crate::attention::Attend;
use crate::combine::{self, CombineError};
use crate::simd::{self, Level};
use crate::strided::TileMut;
use crate::{ActivationFormat, GROUP, Matrix, RopeTable};

/// An instruction set that the kernels are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, any machine.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

/// An instruction set that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// A name we do not know.
    #[error("unknown instruction set {name:?}, expected scalar, avx2 or avx512")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The processor lacks it.
    #[error("this processor lacks what {isa} kernels need (the best it can run is {best})")]
    Unsupported {
        /// Asked for.
        isa: Isa,
        /// What [`Isa::detect`] finds.
        best: Isa,
    },
}

impl Isa {
    /// The best set this processor can run.
    pub fn detect() -> Self {
        simd::detect()
    }

    /// Its name in the configuration and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Self, IsaError> {
        [Self::Scalar, Self::Avx2, Self::Avx512]
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| IsaError::Unknown { name: name.to_owned() })
    }
}

/// Element-wise work on fewer values than this stays on its thread: it takes about as long as waking another one.
const PARALLEL_VALUES: usize = 32 << 10;

/// Every operation of the canonical arithmetic. Copyable; holds nothing but the choice of instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    level: Level,
}

/// Reads every byte with the best vectors and returns a digest of no meaning: the yardstick for bandwidth measurements.
pub fn read_all(bytes: &[u8]) -> i32 {
    Kernels::new(None).map_or(0, |kernels| simd::read_all(kernels.level, bytes))
}

impl Kernels {
    /// Kernels of the given set, or of the best one. A set that the processor lacks is refused.
    pub fn new(isa: Option<Isa>) -> Result<Self, IsaError> {
        let best = Isa::detect();
        let isa = isa.unwrap_or(best);
        let level = Level::new(isa).ok_or(IsaError::Unsupported { isa, best })?;
        Ok(Self { isa, level })
    }

    #[cfg(test)]
    pub(crate) fn with_level(level: Level) -> Self {
        Self { isa: Isa::Scalar, level }
    }

    /// Kernels of the set that the environment variable `SHIMMER_ISA` names; of the best one if it is unset or empty.
    pub fn from_env() -> Result<Self, IsaError> {
        match std::env::var("SHIMMER_ISA") {
            Ok(name) if !name.is_empty() => Self::new(Some(name.parse()?)),
            _ => Self::new(None),
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// gate = silu(gate) * up.
    pub fn swiglu(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "one up value per gate value");
        if gate.len() < PARALLEL_VALUES {
            simd::swiglu(self.level, gate, up);
            return;
        }
        let piece = PARALLEL_VALUES / 2;
        gate.par_chunks_mut(piece).zip(up.par_chunks(piece)).for_each(|(gate, up)| {
            simd::swiglu(self.level, gate, up);
        });
    }

    /// exp of every value in place; as [`crate::math::exp`].
    pub fn exp(&self, values: &mut [f32]) {
        simd::exp(self.level, values);
    }

    /// Root mean square norm of one or many rows of `weight.len()` values.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "one output per input");
        assert!(x.len().is_multiple_of(weight.len()), "whole rows of {} values", weight.len());
        let rows = |x: &[f32], out: &mut [f32]| {
            for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
                simd::rms_norm(self.level, x, weight, eps, out);
            }
        };
        if x.len() < PARALLEL_VALUES {
            rows(x, out);
            return;
        }
        let piece = (PARALLEL_VALUES / 2).next_multiple_of(weight.len());
        x.par_chunks(piece).zip(out.par_chunks_mut(piece)).for_each(|(x, out)| rows(x, out));
    }

    /// Rotates one head in place.
    pub fn rope(&self, head: &mut [f32], table: &RopeTable, position: usize) {
        assert!(
            head.len() >= table.rotary_dim(),
            "a head of at least {} values",
            table.rotary_dim()
        );
        simd::rope(self.level, head, table, position);
    }

    /// x += y.
    pub fn add_assign(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "rows of equal length");
        simd::add_assign(self.level, x, y);
    }

    /// Adds `gate * y` to a fixed-point row; as [`combine::accumulate`].
    pub fn accumulate(&self, acc: &mut [i64], gate: f32, y: &[f32]) -> Result<(), CombineError> {
        assert_eq!(acc.len(), y.len(), "one sum per element");
        let in_range = simd::accumulate(self.level, acc, gate, y);
        if in_range { Ok(()) } else { Err(combine::first_out_of_range(gate, y)) }
    }

    /// Converts a fixed-point row back; as [`combine::finish`].
    pub fn finish(&self, acc: &[i64], out: &mut [f32]) {
        assert_eq!(acc.len(), out.len(), "one value per sum");
        simd::finish(self.level, acc, out);
    }

    /// Quantises rows of `cols` values.
    pub(crate) fn quantise(
        &self,
        format: ActivationFormat,
        x: &[f32],
        cols: usize,
        q: &mut [i8],
        scales: &mut [f32],
        sums: &mut [i32],
    ) {
        if cols == 0 {
            return;
        }
        let groups = cols.div_ceil(GROUP);
        let width = groups * GROUP * format.planes();
        let piece = |x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i32]| {
            let rows = x.chunks_exact(cols).zip(q.chunks_exact_mut(width));
            let groups = scales.chunks_exact_mut(groups).zip(sums.chunks_exact_mut(groups));
            for ((x, q), (scales, sums)) in rows.zip(groups) {
                simd::quantise(self.level, format, x, q, scales, sums);
            }
        };
        if x.len() < PARALLEL_VALUES {
            piece(x, q, scales, sums);
            return;
        }
        let rows = (PARALLEL_VALUES / 2).div_ceil(cols);
        x.par_chunks(rows * cols)
            .zip(q.par_chunks_mut(rows * width))
            .zip(scales.par_chunks_mut(rows * groups).zip(sums.par_chunks_mut(rows * groups)))
            .for_each(|((x, q), (scales, sums))| piece(x, q, scales, sums));
    }

    /// A product on this thread; the columns of `out` are the rows of `w` from `first_block`.
    pub(crate) fn matmul_piece(
        &self,
        w: &Matrix<'_>,
        first_block: usize,
        x: RowsView<'_>,
        out: &mut TileMut<'_>,
    ) {
        simd::matmul(self.level, w, first_block, x, out);
    }

    /// Attention on this thread.
    pub(crate) fn attend(&self, work: &Attend<'_>, out: &mut TileMut<'_>) {
        simd::attend(self.level, work, out);
    }
}
