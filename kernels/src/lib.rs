//! Canonical arithmetic of Shimmer, `shimmer-math/1`: the layouts of weights, activations and cache pages, the scalar
//! reference of every operation, and AVX2 and AVX-512 versions of the same operations with the same bits.
//!
//! This crate never reads a file, never starts a thread (it runs on the caller's rayon pool), knows no model family and
//! never calls the platform's math library. Every rule it follows is written down in `docs/NUMERICS.md`.
//!
//! Start reading at [`Kernels`], the one door to all arithmetic; then [`MatrixLayout`] for how weights lie in memory, and
//! the `scalar` module, which is the specification in executable form.

#![cfg_attr(
    test,
    allow(
        clippy::float_cmp,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::approx_constant,
        reason = "tests compare exact values and make small numbers from large random ones"
    )
)]

mod activations;
mod arena;
mod attention;
pub mod combine;
mod expert;
mod format;
pub mod gating;
mod kernels;
mod kv;
mod layout;
pub mod math;
mod matmul;
mod pack;
pub mod philox;
mod rope;
mod scalar;
mod simd;
mod strided;
#[cfg(test)]
mod testing;

pub use activations::{ActivationError, ActivationRows};
pub use arena::{Arena, PAGE_BYTES};
pub use attention::{AttentionRequest, AttentionSpan};
pub use expert::{Expert, ExpertLayout, ExpertScratch};
pub use format::{ActivationFormat, KvFormat, UnknownFormat, WeightFormat};
pub use kernels::{Isa, IsaError, Kernels, read_all};
pub use kv::{ATTENTION_BLOCK, KvLayout, PAGE_POSITIONS, PagePlace};
pub use layout::{LayoutError, Matrix, MatrixLayout};
pub use pack::{pack_expert, pack_matrix};
pub use rope::RopeTable;

/// Names the arithmetic. Changing any rule of `docs/NUMERICS.md` that can change a byte changes this name.
pub const MATH_ID: &str = "shimmer-math/1";

/// Columns that share one scale, in weights and in activations.
pub const GROUP: usize = 64;

/// Output rows that lie side by side in memory; one vector lane each.
pub const BLOCK_ROWS: usize = 16;

/// Contiguous pieces into which the columns of a product are cut before they are summed by a fixed tree.
pub const SEGMENTS: usize = 8;
