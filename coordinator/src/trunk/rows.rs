//! HOT PATH. Operations on each row by itself, handed to other threads when there are many.

use rayon::prelude::*;
use shimmer_kernels::Kernels;

/// Values below which the work stays on its thread: about 20 microseconds of elementwise work.
const GRAIN: usize = 1 << 15;

/// Rows that one thread takes at once.
fn rows_at_once(width: usize) -> usize {
    (GRAIN / 2 / width.max(1)).max(1)
}

/// Calls `f` with the first row and the values of every run of rows.
pub(super) fn each(x: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if x.len() < GRAIN {
        return f(0, x);
    }
    let rows = rows_at_once(width);
    x.par_chunks_mut(rows * width).enumerate().for_each(|(index, part)| f(index * rows, part));
}

/// Adds one vector to every row.
pub(super) fn add_bias(kernels: &Kernels, x: &mut [f32], bias: &[f32]) {
    each(x, bias.len(), |_, part| {
        part.chunks_exact_mut(bias.len()).for_each(|row| kernels.add_assign(row, bias))
    });
}

/// x += y.
pub(super) fn add(kernels: &Kernels, x: &mut [f32], y: &[f32], width: usize) {
    each(x, width, |first, part| kernels.add_assign(part, &y[first * width..][..part.len()]));
}

/// Root mean square norm of every row of `width` values, with a weight that divides the row.
pub(super) fn rms_norm(
    kernels: &Kernels,
    x: &[f32],
    width: usize,
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    each(out, width, |first, part| {
        kernels.rms_norm(&x[first * width..][..part.len()], weight, eps, part)
    });
}
