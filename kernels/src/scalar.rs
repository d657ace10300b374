//! The specification in executable form: every operation, one row and one output at a time, in the stated order.
//!
//! HOT PATH only where a machine has no vector unit we know. Everything here is `inline(always)` so that a copy can be
//! compiled with the fused multiply-add instruction; without it `mul_add` is a software routine with the same bits.

use crate::activations::RowsView;
use crate::attention::Attend;
use crate::kv::{ATTENTION_BLOCK, PAGE_POSITIONS, read_element};
use crate::layout::read_float;
use crate::strided::TileMut;
use crate::{ActivationFormat, BLOCK_ROWS, GROUP, Matrix, RopeTable, SEGMENTS, WeightFormat, math};

/// The products of blocks `first_block..` (as many as `out` has columns for) with every row of `x`.
#[inline(always)]
pub(crate) fn matmul(w: &Matrix<'_>, first_block: usize, x: RowsView<'_>, out: &mut TileMut<'_>) {
    for row in 0..x.len() {
        let source = x.source(row);
        for (block, lanes) in (first_block..).zip(out.row_mut(row).chunks_mut(BLOCK_ROWS)) {
            let values = if w.format().is_integer() {
                integer_block(w, block, x, source)
            } else {
                float_block(w, block, x.buffer().values(source))
            };
            lanes.copy_from_slice(&values[..lanes.len()]);
        }
    }
}

/// One block of integer weights with one row: a step is a group, whose sum is exact in 32 bits.
#[inline(always)]
fn integer_block(w: &Matrix<'_>, block: usize, x: RowsView<'_>, row: usize) -> [f32; BLOCK_ROWS] {
    let (layout, rows) = (w.layout(), x.buffer());
    let (q, scales) = (rows.quantised(row), rows.scales(row));
    let planes = rows.format().planes();
    let block_weights = &w.weights()[block * layout.block_bytes()..][..layout.block_bytes()];
    let groups = layout.groups();
    let segment = groups.div_ceil(SEGMENTS);
    let mut sums = [[0.0_f32; BLOCK_ROWS]; SEGMENTS];
    for (group, weights) in block_weights.chunks_exact(block_weights.len() / groups).enumerate() {
        let q = &q[group * planes * GROUP..][..planes * GROUP];
        let mut total = group_sums(w.format(), weights, &q[..GROUP]);
        if planes == 2 {
            let low = group_sums(w.format(), weights, &q[GROUP..]);
            for (total, low) in total.iter_mut().zip(low) {
                *total = *total * 128 + low;
            }
        }
        let acc = &mut sums[group / segment];
        for lane in 0..BLOCK_ROWS {
            let scale = w.scale(block * BLOCK_ROWS + lane, group) * scales[group];
            #[expect(clippy::cast_precision_loss, reason = "rounds half to even, as the rule says")]
            let sum = total[lane] as f32;
            acc[lane] = sum.mul_add(scale, acc[lane]);
        }
    }
    fold(&sums)
}

/// Sums of the products of one group, for each of 16 rows.
#[inline(always)]
fn group_sums(format: WeightFormat, weights: &[u8], q: &[i8]) -> [i32; BLOCK_ROWS] {
    let mut sums = [0_i32; BLOCK_ROWS];
    for (c, chunk) in weights.chunks_exact(64).enumerate() {
        for (lane, sum) in sums.iter_mut().enumerate() {
            for b in 0..4 {
                let byte = chunk[lane * 4 + b];
                if format == WeightFormat::Q8G64 {
                    *sum += i32::from(byte.cast_signed()) * i32::from(q[c * 4 + b]);
                } else {
                    *sum += (i32::from(byte & 15) - 8) * i32::from(q[c * 4 + b]);
                    *sum += (i32::from(byte >> 4) - 8) * i32::from(q[32 + c * 4 + b]);
                }
            }
        }
    }
    sums
}

/// One block of float weights with one row: a step is a column.
#[inline(always)]
fn float_block(w: &Matrix<'_>, block: usize, x: &[f32]) -> [f32; BLOCK_ROWS] {
    let layout = w.layout();
    let weights = &w.weights()[block * layout.block_bytes()..][..layout.block_bytes()];
    let unit = w.format().unit_bytes();
    let segment = layout.cols().div_ceil(SEGMENTS);
    let mut sums = [[0.0_f32; BLOCK_ROWS]; SEGMENTS];
    for (col, (lanes, x)) in weights.chunks_exact(BLOCK_ROWS * unit).zip(x).enumerate() {
        let acc = &mut sums[col / segment];
        for lane in 0..BLOCK_ROWS {
            acc[lane] = read_float(w.format(), &lanes[lane * unit..]).mul_add(*x, acc[lane]);
        }
    }
    fold(&sums)
}

#[inline(always)]
fn fold(sums: &[[f32; BLOCK_ROWS]; SEGMENTS]) -> [f32; BLOCK_ROWS] {
    let mut out = [0.0; BLOCK_ROWS];
    for (lane, out) in out.iter_mut().enumerate() {
        let [a, b, c, d, e, f, g, h] = sums;
        *out = math::fold_segments([
            a[lane], b[lane], c[lane], d[lane], e[lane], f[lane], g[lane], h[lane],
        ]);
    }
    out
}

/// Quantises one row into `[group][plane][64]`, one scale and one negated sum per group.
#[inline(always)]
pub(crate) fn quantise(
    format: ActivationFormat,
    x: &[f32],
    q: &mut [i8],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let planes = format.planes();
    let groups = x.chunks(GROUP).zip(q.chunks_exact_mut(planes * GROUP));
    for ((x, q), (scale, sum)) in groups.zip(scales.iter_mut().zip(sums)) {
        q.fill(0);
        *sum = 0;
        let (group_scale, factor) = group_scale(format.limit(), x);
        *scale = group_scale;
        let Some(factor) = factor else { continue };
        for (i, x) in x.iter().enumerate() {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "an integer of magnitude at most 16319"
            )]
            let value = math::round_small(x * factor) as i32;
            *sum -= value;
            let high = if planes == 2 { (value + 64) >> 7 } else { value };
            #[expect(clippy::cast_possible_truncation, reason = "both planes lie in -127..=127")]
            if planes == 2 {
                q[i] = high as i8;
                q[GROUP + i] = (value - 128 * high) as i8;
            } else {
                q[i] = high as i8;
            }
        }
    }
}

/// The scale of a group and the factor on its values; no factor when all quantised values are 0.
///
/// Zero, and groups so small that `limit / amax` is infinite, have scale 0. A group that holds NaN or an infinity has
/// scale NaN, which turns the whole row NaN: an error of that row alone.
#[inline(always)]
pub(crate) fn group_scale(limit: f32, x: &[f32]) -> (f32, Option<f32>) {
    let bits = x.iter().fold(0_u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
    scale_of(limit, bits)
}

/// [`group_scale`] from the largest bits of the magnitudes.
#[inline(always)]
pub(crate) fn scale_of(limit: f32, bits: u32) -> (f32, Option<f32>) {
    let amax = f32::from_bits(bits);
    if !amax.is_finite() {
        return (f32::NAN, None);
    }
    let factor = limit / amax;
    if factor.is_finite() { (amax / limit, Some(factor)) } else { (0.0, None) }
}

/// gate = silu(gate) * up.
#[inline(always)]
pub(crate) fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = math::silu(*gate) * up;
    }
}

/// Reads all bytes.
#[inline(always)]
pub(crate) fn read_all(bytes: &[u8]) -> i32 {
    bytes.as_chunks::<4>().0.iter().fold(0, |m, b| m.max(i32::from_le_bytes(*b)))
}

/// exp of every value.
#[inline(always)]
pub(crate) fn exp(values: &mut [f32]) {
    for value in values {
        *value = math::exp(*value);
    }
}

/// x * (1 / sqrt(sum of squares / n + eps)) * weight for one row.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    #[expect(clippy::cast_precision_loss, reason = "a row has far fewer than 2^24 values")]
    let n = x.len() as f32;
    let factor = 1.0 / (math::sum_of_squares(x) / n + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * weight;
    }
}

/// Rotates the pairs (i, i + rotary_dim / 2) of the first rotary_dim elements.
#[inline(always)]
pub(crate) fn rope(head: &mut [f32], table: &RopeTable, position: usize) {
    let (cos, sin) = table.at(position);
    let (first, second) = head[..table.rotary_dim()].split_at_mut(table.rotary_dim() / 2);
    rotate(first, second, cos, sin);
}

/// Rotates pairs.
#[inline(always)]
pub(crate) fn rotate(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((x0, x1), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let y0 = x0.mul_add(*c, -(*x1 * s));
        let y1 = x0.mul_add(*s, *x1 * c);
        (*x0, *x1) = (y0, y1);
    }
}

/// x += y.
#[inline(always)]
pub(crate) fn add_assign(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Attention of every query row of `work`; `out` has one row per query row, its columns are the heads of the group.
#[inline(always)]
pub(crate) fn attend(work: &Attend<'_>, out: &mut TileMut<'_>) {
    let dim = work.layout.head_dim;
    for row in 0..out.rows() {
        for (head, out) in out.row_mut(row).chunks_exact_mut(dim).enumerate() {
            attend_one(work, work.query(row, head), work.limit(row), out);
        }
    }
}

/// One query over positions 0..limit.
#[inline(always)]
fn attend_one(work: &Attend<'_>, query: &[f32], limit: usize, out: &mut [f32]) {
    let format = work.layout.format;
    let (mut max, mut denominator) = (0.0_f32, 0.0_f32);
    for begin in (0..limit).step_by(ATTENTION_BLOCK) {
        let count = ATTENTION_BLOCK.min(limit - begin);
        let mut p = [0.0_f32; ATTENTION_BLOCK];
        let p = &mut p[..count];
        for (t, score) in p.iter_mut().enumerate() {
            *score = score_of(work, query, begin + t) * work.scale;
        }
        let block_max = math::max(p);
        for p in p.iter_mut() {
            *p = math::exp(*p - block_max);
        }
        let block_sum = math::sum(p);
        let new_max = if begin == 0 || block_max > max { block_max } else { max };
        let (a, b) = (math::exp(max - new_max), math::exp(block_max - new_max));
        for (d, out) in out.iter_mut().enumerate() {
            let mut sum = 0.0_f32;
            for (t, p) in p.iter().enumerate() {
                let (_, values) = work.head_of(begin + t);
                let slot = (begin + t) % PAGE_POSITIONS;
                sum = p.mul_add(read_element(format, values, slot * work.layout.head_dim + d), sum);
            }
            *out = if begin == 0 { sum } else { out.mul_add(a, sum * b) };
        }
        denominator = if begin == 0 { block_sum } else { denominator.mul_add(a, block_sum * b) };
        max = new_max;
    }
    for out in out {
        *out /= denominator;
    }
}

/// Product of a query with the key at `position`: a step is one element of the head.
#[inline(always)]
fn score_of(work: &Attend<'_>, query: &[f32], position: usize) -> f32 {
    let (keys, _) = work.head_of(position);
    let slot = position % PAGE_POSITIONS;
    let segment = query.len().div_ceil(SEGMENTS);
    let mut sums = [0.0_f32; SEGMENTS];
    for (dim, q) in query.iter().enumerate() {
        let key = read_element(work.layout.format, keys, work.layout.key_index(slot, dim));
        let acc = &mut sums[dim / segment];
        *acc = key.mul_add(*q, *acc);
    }
    math::fold_segments(sums)
}
