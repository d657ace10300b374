//! Attention over tiles of queries that share a kv head: scores with one lane per position, values with one lane per
//! element of the head.

use std::marker::PhantomData;

use super::element::{Bf16, Element, F16, F32};
use super::lanes::{Lanes, Task};
use super::matmul::float_tile;
use super::rows::exp;
use crate::attention::Attend;
use crate::kv::{ATTENTION_BLOCK, PAGE_POSITIONS};
use crate::strided::TileMut;
use crate::{BLOCK_ROWS, KvFormat, math};

#[inline(always)]
pub(super) fn attend<V: Lanes>(work: &Attend<'_>, out: &mut TileMut<'_>) {
    match work.layout.format {
        KvFormat::F32 => tiles::<V, F32>(work, out),
        KvFormat::F16 => tiles::<V, F16>(work, out),
        KvFormat::Bf16 => tiles::<V, Bf16>(work, out),
    }
}

/// Queries are numbered row by row: query `i` is head `i % group` of row `i / group`.
#[inline(always)]
fn tiles<V: Lanes, E: Element>(work: &Attend<'_>, out: &mut TileMut<'_>) {
    let count = out.rows() * work.group;
    let mut query = 0;
    while query < count {
        query += match count - query {
            8.. if V::TILE >= 8 => tile::<V, E, 8>(work, query, out),
            4.. => tile::<V, E, 4>(work, query, out),
            // Three query heads on a kv head are common in decode.
            3 if E::BYTES == 4 => tile::<V, E, 3>(work, query, out),
            2 if E::BYTES == 4 => tile::<V, E, 2>(work, query, out),
            _ => tile::<V, E, 1>(work, query, out),
        };
    }
}

/// Attention of `T` queries from `query`; returns `T`.
#[inline(always)]
fn tile<V: Lanes, E: Element, const T: usize>(
    work: &Attend<'_>,
    query: usize,
    out: &mut TileMut<'_>,
) -> usize {
    V::isolate(Tile::<V, E, T> { work, first_query: query, out_rows: out, kind: PhantomData })
}

/// The running softmax of one query.
#[derive(Debug, Clone, Copy, Default)]
struct Fold {
    max: f32,
    denominator: f32,
    /// Factors on the old and on the new block's values; the first block is taken as it is.
    old: f32,
    new: f32,
}

impl Fold {
    #[inline(always)]
    fn push(&mut self, first: bool, block_max: f32, block_sum: f32) {
        if first {
            (self.max, self.denominator) = (block_max, block_sum);
            return;
        }
        let max = if block_max > self.max { block_max } else { self.max };
        self.old = math::exp(self.max - max);
        self.new = math::exp(block_max - max);
        self.denominator = self.denominator.mul_add(self.old, block_sum * self.new);
        self.max = max;
    }
}

struct Tile<'a, 'o, V, E, const T: usize> {
    work: &'a Attend<'a>,
    first_query: usize,
    out_rows: &'a mut TileMut<'o>,
    kind: PhantomData<(V, E)>,
}

impl<V: Lanes, E: Element, const T: usize> Task for Tile<'_, '_, V, E, T> {
    type Output = usize;

    #[inline(always)]
    fn run(self) -> usize {
        let Self { work, first_query, out_rows: out, .. } = self;
        let mut place = [(0, 0); T];
        let mut queries: [&[f32]; T] = [&[]; T];
        let mut limits = [0; T];
        for t in 0..T {
            place[t] = ((first_query + t) / work.group, (first_query + t) % work.group);
            queries[t] = work.query(place[t].0, place[t].1);
            limits[t] = work.limit(place[t].0);
        }
        let mut folds = [Fold::default(); T];
        // Scores, then exponentials, of one block of positions.
        let mut p = [[0.0_f32; ATTENTION_BLOCK]; T];
        for begin in (0..limits[T - 1]).step_by(ATTENTION_BLOCK) {
            let mut counts = [0; T];
            for t in 0..T {
                counts[t] = limits[t].saturating_sub(begin).min(ATTENTION_BLOCK);
            }
            scores::<V, E, T>(work, begin, counts[T - 1], queries, &mut p);
            for t in 0..T {
                if counts[t] > 0 {
                    let (max, sum) = exponentials::<V>(&mut p[t], counts[t]);
                    folds[t].push(begin == 0, max, sum);
                }
            }
            values::<V, E, T>(work, begin, counts, &p, &folds, place, out);
        }
        for t in 0..T {
            let dim = work.layout.head_dim;
            let (row, head) = place[t];
            for value in &mut out.row_mut(row)[head * dim..][..dim] {
                *value /= folds[t].denominator;
            }
        }
        T
    }
}

/// Scaled scores of `count` positions from `begin`; lanes beyond hold whatever the cache holds.
#[inline(always)]
fn scores<V: Lanes, E: Element, const T: usize>(
    work: &Attend<'_>,
    begin: usize,
    count: usize,
    queries: [&[f32]; T],
    p: &mut [[f32; ATTENTION_BLOCK]; T],
) {
    let dim = work.layout.head_dim;
    let scale = V::splat(work.scale);
    for lanes in 0..count.div_ceil(BLOCK_ROWS) {
        let position = begin + lanes * BLOCK_ROWS;
        let (keys, _) = work.head_of(position);
        let block = (position % PAGE_POSITIONS) / BLOCK_ROWS;
        let keys = &E::chunks(keys)[block * dim..][..dim];
        let products = float_tile::<V, E, T>(keys, queries);
        for t in 0..T {
            products[t].mul(scale).store(&mut p[t].as_chunks_mut::<16>().0[lanes]);
        }
    }
}

/// Turns the first `count` scores into exp(score - max); returns the maximum and the sum. Lanes of the last vector
/// beyond `count` become 0.
#[inline(always)]
fn exponentials<V: Lanes>(p: &mut [f32; ATTENTION_BLOCK], count: usize) -> (f32, f32) {
    let chunks = &mut p.as_chunks_mut::<16>().0[..count.div_ceil(16)];
    let lowest = V::splat(f32::NEG_INFINITY);
    let last = chunks.len() - 1;
    let in_last = count - last * 16;
    let tail = V::load(&chunks[last]).first(in_last, lowest);
    let mut max = lowest;
    for chunk in &chunks[..last] {
        max = V::load(chunk).max(max);
    }
    let max = tail.max(max).fold_max();
    let shift = V::splat(max);
    let mut sum = V::zero();
    for chunk in &mut chunks[..last] {
        let e = exp(V::load(chunk).sub(shift));
        sum = sum.add(e);
        e.store(chunk);
    }
    let e = exp(tail.sub(shift)).first(in_last, V::zero());
    e.store(&mut chunks[last]);
    (max, sum.add(e).fold())
}

/// Adds the weighted values of the block to the output, folding it with the blocks before.
#[inline(always)]
fn values<V: Lanes, E: Element, const T: usize>(
    work: &Attend<'_>,
    begin: usize,
    counts: [usize; T],
    p: &[[f32; ATTENTION_BLOCK]; T],
    folds: &[Fold; T],
    place: [(usize, usize); T],
    out: &mut TileMut<'_>,
) {
    let dim = work.layout.head_dim;
    for d in (0..dim).step_by(16) {
        let width = 16.min(dim - d);
        let sums = weighted::<V, E, T>(work, begin, counts, p, d, width);
        for t in 0..T {
            if counts[t] == 0 {
                continue;
            }
            let (row, head) = place[t];
            let out = &mut out.row_mut(row)[head * dim + d..][..width];
            let mut lanes = [0.0; 16];
            lanes[..width].copy_from_slice(out);
            let folded = if begin == 0 {
                sums[t]
            } else {
                V::load(&lanes).fma(V::splat(folds[t].old), sums[t].mul(V::splat(folds[t].new)))
            };
            out.copy_from_slice(&folded.to_array()[..width]);
        }
    }
}

/// Sums of `p[t]` * value over positions in ascending order, for `width` elements of the head from `d`.
#[inline(always)]
fn weighted<V: Lanes, E: Element, const T: usize>(
    work: &Attend<'_>,
    begin: usize,
    counts: [usize; T],
    p: &[[f32; ATTENTION_BLOCK]; T],
    d: usize,
    width: usize,
) -> [V; T] {
    let mut sums = [V::zero(); T];
    // Positions that every query sees, then the rest of each query: a later row sees more.
    let shared = counts[0];
    for page in (0..shared).step_by(PAGE_POSITIONS) {
        let (_, values) = work.head_of(begin + page);
        let count = PAGE_POSITIONS.min(shared - page);
        for (slot, position) in (page..page + count).enumerate() {
            let lanes: V = value::<V, E>(work, values, slot, d, width);
            for t in 0..T {
                sums[t] = V::splat(p[t][position]).fma(lanes, sums[t]);
            }
        }
    }
    for t in 0..T {
        for position in shared..counts[t] {
            let (_, values) = work.head_of(begin + position);
            let lanes: V = value::<V, E>(work, values, position % PAGE_POSITIONS, d, width);
            sums[t] = V::splat(p[t][position]).fma(lanes, sums[t]);
        }
    }
    sums
}

/// `width` elements from `d` of the value in `slot` of a page.
#[inline(always)]
fn value<V: Lanes, E: Element>(
    work: &Attend<'_>,
    values: &[u8],
    slot: usize,
    d: usize,
    width: usize,
) -> V {
    let at = (slot * work.layout.head_dim + d) * E::BYTES;
    let bytes = &values[at..at + width * E::BYTES];
    match E::chunks(bytes).first() {
        Some(chunk) => E::load(chunk),
        None => E::load_some(bytes),
    }
}
