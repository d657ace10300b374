//! Matrix products over tiles: one block of 16 output rows times a few rows of activations, held in registers.
//!
//! A tile of one row is the matrix-vector product of a decode step, a tile of eight reads each weight once for eight rows
//! of a prefill. Both follow the same order, so the bits do not depend on which is chosen.

use std::marker::PhantomData;

use super::element::{Bf16, Element, F16, F32};
use super::lanes::{Lanes, Task, prefetch};
use crate::activations::{ActivationRows, RowsView};
use crate::strided::TileMut;
use crate::{ActivationFormat, BLOCK_ROWS, Matrix, SEGMENTS, WeightFormat};

/// Rows of activations are visited in runs of about this many bytes, so that they stay in the second-level cache while
/// the weights pass by.
const RUN_BYTES: usize = 96 << 10;

#[inline(always)]
pub(super) fn matmul<V: Lanes>(
    w: &Matrix<'_>,
    first_block: usize,
    x: RowsView<'_>,
    out: &mut TileMut<'_>,
) {
    match (w.format(), x.buffer().format()) {
        (WeightFormat::Q8G64, ActivationFormat::A16G64) => {
            tiles::<V, Integer<Q8, 2>>(w, first_block, x, out)
        }
        (WeightFormat::Q8G64, _) => tiles::<V, Integer<Q8, 1>>(w, first_block, x, out),
        (WeightFormat::Q4G64, ActivationFormat::A16G64) => {
            tiles::<V, Integer<Q4, 2>>(w, first_block, x, out)
        }
        (WeightFormat::Q4G64, _) => tiles::<V, Integer<Q4, 1>>(w, first_block, x, out),
        (WeightFormat::Bf16, _) => tiles::<V, Float<Bf16>>(w, first_block, x, out),
        (WeightFormat::F16, _) => tiles::<V, Float<F16>>(w, first_block, x, out),
        (WeightFormat::F32, _) => tiles::<V, Float<F32>>(w, first_block, x, out),
    }
}

/// How one pair of formats multiplies.
trait Product {
    /// Bytes of one row of activations.
    fn row_bytes(cols: usize) -> usize;

    /// One block times the rows `sources` of `x`.
    fn tile<V: Lanes, const T: usize>(
        w: &Matrix<'_>,
        block: usize,
        x: &ActivationRows,
        sources: [usize; T],
    ) -> [V; T];
}

/// Visits all tiles: runs of rows, then blocks, then tiles of the run.
#[inline(always)]
fn tiles<V: Lanes, P: Product>(
    w: &Matrix<'_>,
    first_block: usize,
    x: RowsView<'_>,
    out: &mut TileMut<'_>,
) {
    let run = (RUN_BYTES / P::row_bytes(w.cols())).next_multiple_of(8);
    let blocks = out.cols().div_ceil(BLOCK_ROWS);
    for begin in (0..x.len()).step_by(run) {
        let end = x.len().min(begin + run);
        for block in 0..blocks {
            let mut row = begin;
            while row < end {
                row += match end - row {
                    8.. if V::TILE >= 8 => tile::<V, P, 8>(w, first_block, block, x, row, out),
                    4.. => tile::<V, P, 4>(w, first_block, block, x, row, out),
                    2.. => tile::<V, P, 2>(w, first_block, block, x, row, out),
                    _ => tile::<V, P, 1>(w, first_block, block, x, row, out),
                };
            }
        }
    }
}

/// One tile and its place in the output; returns the rows done.
#[inline(always)]
fn tile<V: Lanes, P: Product, const T: usize>(
    w: &Matrix<'_>,
    first_block: usize,
    block: usize,
    x: RowsView<'_>,
    row: usize,
    out: &mut TileMut<'_>,
) -> usize {
    let mut sources = [0; T];
    for t in 0..T {
        sources[t] = x.source(row + t);
    }
    let mut values = [[0.0; BLOCK_ROWS]; T];
    let (block_in_matrix, kind) = (first_block + block, PhantomData);
    V::isolate(Tile::<V, P, T> {
        w,
        block: block_in_matrix,
        x: x.buffer(),
        sources,
        values: &mut values,
        kind,
    });
    for t in 0..T {
        let lanes = &mut out.row_mut(row + t)[block * BLOCK_ROWS..];
        let count = lanes.len().min(BLOCK_ROWS);
        match lanes.first_chunk_mut::<BLOCK_ROWS>() {
            Some(lanes) => *lanes = values[t],
            None => lanes.copy_from_slice(&values[t][..count]),
        }
    }
    T
}

/// One block times the rows `sources`.
struct Tile<'a, V, P, const T: usize> {
    w: &'a Matrix<'a>,
    block: usize,
    x: &'a ActivationRows,
    sources: [usize; T],
    values: &'a mut [[f32; BLOCK_ROWS]; T],
    kind: PhantomData<(V, P)>,
}

impl<V: Lanes, P: Product, const T: usize> Task for Tile<'_, V, P, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let values = P::tile::<V, T>(self.w, self.block, self.x, self.sources);
        for t in 0..T {
            values[t].store(&mut self.values[t]);
        }
    }
}

/// Adds eight segment sums: ((0+1)+(2+3)) + ((4+5)+(6+7)).
#[inline(always)]
fn fold_segments<V: Lanes, const T: usize>(s: &[[V; T]; SEGMENTS]) -> [V; T] {
    let mut sums = [V::zero(); T];
    for t in 0..T {
        let low = s[0][t].add(s[1][t]).add(s[2][t].add(s[3][t]));
        sums[t] = low.add(s[4][t].add(s[5][t]).add(s[6][t].add(s[7][t])));
    }
    sums
}

/// Bytes of one group of an integer format.
trait Group {
    type Bytes;

    fn groups(bytes: &[u8]) -> &[Self::Bytes];

    fn dot<V: Lanes, const P: usize, const T: usize>(
        weights: &Self::Bytes,
        x: [&[[i8; 64]; P]; T],
        negated: [i32; T],
    ) -> [V::Ints; T];
}

struct Q8;
struct Q4;

macro_rules! group {
    ($type:ident, $bytes:literal, $dot:ident) => {
        impl Group for $type {
            type Bytes = [u8; $bytes];

            #[inline(always)]
            fn groups(bytes: &[u8]) -> &[Self::Bytes] {
                bytes.as_chunks().0
            }

            #[inline(always)]
            fn dot<V: Lanes, const P: usize, const T: usize>(
                weights: &Self::Bytes,
                x: [&[[i8; 64]; P]; T],
                negated: [i32; T],
            ) -> [V::Ints; T] {
                V::$dot(weights, x, negated)
            }
        }
    };
}

group!(Q8, 1024, dot_q8);
group!(Q4, 512, dot_q4);

/// Integer weights of group type `G` with `P` planes of activations.
struct Integer<G, const P: usize>(G);

impl<G: Group, const P: usize> Product for Integer<G, P> {
    #[inline(always)]
    fn row_bytes(cols: usize) -> usize {
        cols.next_multiple_of(64) * P
    }

    #[inline(always)]
    fn tile<V: Lanes, const T: usize>(
        w: &Matrix<'_>,
        block: usize,
        x: &ActivationRows,
        sources: [usize; T],
    ) -> [V; T] {
        let groups = w.layout().groups();
        let block_bytes = w.layout().block_bytes();
        let weights = &G::groups(&w.weights()[block * block_bytes..][..block_bytes])[..groups];
        let scales = &w.scales().as_chunks::<32>().0[block * groups..][..groups];
        let mut rows: [&[[[i8; 64]; P]]; T] = [&[]; T];
        let mut x_scales: [&[f32]; T] = [&[]; T];
        let mut negated: [&[i32]; T] = [&[]; T];
        for t in 0..T {
            rows[t] = &x.quantised(sources[t]).as_chunks::<64>().0.as_chunks::<P>().0[..groups];
            x_scales[t] = &x.scales(sources[t])[..groups];
            negated[t] = &x.negated_sums(sources[t])[..groups];
        }

        let mut segments = [[V::zero(); T]; SEGMENTS];
        let step = groups.div_ceil(SEGMENTS);
        let mut group = 0;
        for sums in &mut segments {
            let end = groups.min(group + step);
            while group < end {
                if T == 1 {
                    prefetch::<512>(&scales[group][0]);
                }
                let mut x = [&[[0; 64]; P]; T];
                let mut corrections = [0; T];
                for t in 0..T {
                    x[t] = &rows[t][group];
                    corrections[t] = negated[t][group];
                }
                let dots = G::dot::<V, P, T>(&weights[group], x, corrections);
                let scale = V::load_f16(&scales[group]);
                for t in 0..T {
                    let factor = scale.mul(V::splat(x_scales[t][group]));
                    sums[t] = V::from_ints(dots[t]).fma(factor, sums[t]);
                }
                group += 1;
            }
        }
        fold_segments(&segments)
    }
}

/// Float weights of element type `E`.
struct Float<E>(E);

impl<E: Element> Product for Float<E> {
    #[inline(always)]
    fn row_bytes(cols: usize) -> usize {
        cols * 4
    }

    #[inline(always)]
    fn tile<V: Lanes, const T: usize>(
        w: &Matrix<'_>,
        block: usize,
        x: &ActivationRows,
        sources: [usize; T],
    ) -> [V; T] {
        let block_bytes = w.layout().block_bytes();
        let weights = E::chunks(&w.weights()[block * block_bytes..][..block_bytes]);
        let mut rows: [&[f32]; T] = [&[]; T];
        for t in 0..T {
            rows[t] = x.values(sources[t]);
        }
        float_tile::<V, E, T>(weights, rows)
    }
}

/// Sixteen float rows, stored by column, times `T` vectors. Also the scores of sixteen positions for `T` queries.
#[inline(always)]
pub(super) fn float_tile<V: Lanes, E: Element, const T: usize>(
    weights: &[E::Chunk],
    x: [&[f32]; T],
) -> [V; T] {
    let steps = weights.len();
    let mut segments = [[V::zero(); T]; SEGMENTS];
    let step = steps.div_ceil(SEGMENTS);
    if T >= 4 {
        for (s, sums) in segments.iter_mut().enumerate() {
            chain::<V, E, T>(weights, &x, (s * step).min(steps), ((s + 1) * step).min(steps), sums);
        }
        return fold_segments(&segments);
    }
    // Few rows make few chains, and each fma waits four cycles for the one before it: four segments side by side.
    for half in 0..2 {
        let first = half * 4;
        let whole = if (first + 4) * step <= steps { step } else { 0 };
        let mut acc = [[V::zero(); T]; 4];
        for k in 0..whole {
            for s in 0..4 {
                let at = (first + s) * step + k;
                prefetch::<1024>(E::first_byte(&weights[at]));
                let lanes: V = E::load(&weights[at]);
                for t in 0..T {
                    acc[s][t] = lanes.fma(V::splat(x[t][at]), acc[s][t]);
                }
            }
        }
        for s in 0..4 {
            let begin = ((first + s) * step + whole).min(steps);
            let end = ((first + s + 1) * step).min(steps);
            chain::<V, E, T>(weights, &x, begin, end, &mut acc[s]);
            segments[first + s] = acc[s];
        }
    }
    fold_segments(&segments)
}

/// Continues the chains of `T` rows over steps `begin..end`.
#[inline(always)]
fn chain<V: Lanes, E: Element, const T: usize>(
    weights: &[E::Chunk],
    x: &[&[f32]; T],
    begin: usize,
    end: usize,
    sums: &mut [V; T],
) {
    let mut parts: [&[f32]; T] = [&[]; T];
    for t in 0..T {
        parts[t] = &x[t][begin..end];
    }
    let mut acc = *sums;
    for (k, chunk) in weights[begin..end].iter().enumerate() {
        let lanes: V = E::load(chunk);
        for t in 0..T {
            acc[t] = lanes.fma(V::splat(parts[t][k]), acc[t]);
        }
    }
    *sums = acc;
}
