//! Operations on one row: quantisation, norms, activations, rotation, sums.

use super::lanes::Lanes;
use crate::{ActivationFormat, GROUP, RopeTable, combine, math, scalar};

/// e^x in every lane; the order of operations is that of [`math::exp`].
#[inline(always)]
pub(super) fn exp<V: Lanes>(x: V) -> V {
    let (low, high) = (V::splat(math::EXP_MIN), V::splat(math::EXP_MAX));
    // The bound comes first, so that NaN passes through both.
    let clamped = high.min(low.max(x));
    let n = clamped.mul(V::splat(math::LOG2_E)).round();
    let r = n.fma(V::splat(-math::LN2_HIGH), clamped);
    let r = n.fma(V::splat(-math::LN2_LOW), r);
    let mut p = V::splat(math::EXP_POLYNOMIAL[0]);
    for c in &math::EXP_POLYNOMIAL[1..] {
        p = p.fma(r, V::splat(*c));
    }
    let p = p.fma(r.mul(r), r).add(V::splat(1.0));
    let e = p.scale_exponent(n);
    let e = x.where_below(low, V::zero(), e);
    high.where_below(x, V::splat(f32::INFINITY), e)
}

/// Applies `f` to all values, the last ones padded with zeros.
macro_rules! map_lanes {
    ($values:expr, |$lanes:ident| $f:expr) => {{
        let (chunks, rest) = $values.as_chunks_mut::<16>();
        for chunk in chunks {
            let $lanes = V::load(chunk);
            $f.store(chunk);
        }
        if !rest.is_empty() {
            let $lanes = V::load(&padded(rest));
            let count = rest.len();
            rest.copy_from_slice(&$f.to_array()[..count]);
        }
    }};
}

#[inline(always)]
fn padded(rest: &[f32]) -> [f32; 16] {
    let mut lanes = [0.0; 16];
    lanes[..rest.len()].copy_from_slice(rest);
    lanes
}

#[inline(always)]
pub(super) fn exp_in_place<V: Lanes>(values: &mut [f32]) {
    map_lanes!(values, |x| exp(x));
}

#[inline(always)]
fn silu_times<V: Lanes>(gate: V, up: V) -> V {
    gate.div(V::splat(1.0).add(exp(gate.neg()))).mul(up)
}

#[inline(always)]
pub(super) fn swiglu<V: Lanes>(gate: &mut [f32], up: &[f32]) {
    let (gates, gate_rest) = gate.as_chunks_mut::<16>();
    let (ups, up_rest) = up.as_chunks::<16>();
    for (gate, up) in gates.iter_mut().zip(ups) {
        silu_times(V::load(gate), V::load(up)).store(gate);
    }
    if !gate_rest.is_empty() {
        let values = silu_times(V::load(&padded(gate_rest)), V::load(&padded(up_rest))).to_array();
        let count = gate_rest.len();
        gate_rest.copy_from_slice(&values[..count]);
    }
}

#[inline(always)]
pub(super) fn rms_norm<V: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (chunks, rest) = x.as_chunks::<16>();
    let mut lanes = V::zero();
    for chunk in chunks {
        let v = V::load(chunk);
        lanes = v.fma(v, lanes);
    }
    if !rest.is_empty() {
        // A padded lane adds 0 * 0 to a sum that is not negative: nothing.
        let v = V::load(&padded(rest));
        lanes = v.fma(v, lanes);
    }
    #[expect(clippy::cast_precision_loss, reason = "a row has far fewer than 2^24 values")]
    let n = x.len() as f32;
    let factor = 1.0 / (lanes.fold() / n + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * weight;
    }
}

#[inline(always)]
pub(super) fn rope<V: Lanes>(head: &mut [f32], table: &RopeTable, position: usize) {
    let (cos, sin) = table.at(position);
    let (first, second) = head[..table.rotary_dim()].split_at_mut(table.rotary_dim() / 2);
    let (first, first_rest) = first.as_chunks_mut::<16>();
    let (second, second_rest) = second.as_chunks_mut::<16>();
    let (cos, cos_rest) = cos.as_chunks::<16>();
    let (sin, sin_rest) = sin.as_chunks::<16>();
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (x0, x1, c, s) = (V::load(a), V::load(b), V::load(c), V::load(s));
        x0.fma(c, x1.mul(s).neg()).store(a);
        x0.fma(s, x1.mul(c)).store(b);
    }
    scalar::rotate(first_rest, second_rest, cos_rest, sin_rest);
}

#[inline(always)]
pub(super) fn add_assign<V: Lanes>(x: &mut [f32], y: &[f32]) {
    scalar::add_assign(x, y);
}

#[inline(always)]
pub(super) fn accumulate<V: Lanes>(acc: &mut [i64], gate: f32, y: &[f32]) -> bool {
    combine::accumulate_all(acc, gate, y)
}

#[inline(always)]
pub(super) fn finish<V: Lanes>(acc: &[i64], out: &mut [f32]) {
    combine::finish_all(acc, out);
}

#[inline(always)]
pub(super) fn quantise<V: Lanes>(
    format: ActivationFormat,
    x: &[f32],
    q: &mut [i8],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    if format == ActivationFormat::A16G64 {
        quantise_planes::<V, 2>(format.limit(), x, q, scales, sums);
    } else {
        quantise_planes::<V, 1>(format.limit(), x, q, scales, sums);
    }
}

#[inline(always)]
fn quantise_planes<V: Lanes, const P: usize>(
    limit: f32,
    x: &[f32],
    q: &mut [i8],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let planes = q.as_chunks_mut::<64>().0.as_chunks_mut::<P>().0;
    let (groups, rest) = x.as_chunks::<GROUP>();
    let whole = groups.len();
    for (((x, q), scale), sum) in
        groups.iter().zip(planes.iter_mut()).zip(scales.iter_mut()).zip(sums.iter_mut())
    {
        (*scale, *sum) = quantise_group::<V, P>(limit, x, q);
    }
    if !rest.is_empty() {
        let mut x = [0.0; GROUP];
        x[..rest.len()].copy_from_slice(rest);
        (scales[whole], sums[whole]) = quantise_group::<V, P>(limit, &x, &mut planes[whole]);
    }
}

/// Quantises one group; returns its scale and minus the sum of its integers.
#[inline(always)]
fn quantise_group<V: Lanes, const P: usize>(
    limit: f32,
    x: &[f32; GROUP],
    q: &mut [[i8; 64]; P],
) -> (f32, i32) {
    let chunks = x.as_chunks::<16>().0;
    let lanes =
        [V::load(&chunks[0]), V::load(&chunks[1]), V::load(&chunks[2]), V::load(&chunks[3])];
    let low = V::int_max(lanes[0].magnitude_bits(), lanes[1].magnitude_bits());
    let high = V::int_max(lanes[2].magnitude_bits(), lanes[3].magnitude_bits());
    let bits = V::int_to_array(V::int_max(low, high));
    let bits = bits.iter().fold(0, |m, b| m.max(*b));
    let (scale, factor) = scalar::scale_of(limit, bits.cast_unsigned());
    let Some(factor) = factor else {
        *q = [[0; 64]; P];
        return (scale, 0);
    };
    let mut total = V::int_splat(0);
    for (i, lanes) in lanes.into_iter().enumerate() {
        let value = lanes.mul(V::splat(factor)).to_ints();
        total = V::int_sub(total, value);
        if P == 2 {
            let high = V::int_shift_right_7(V::int_add(value, V::int_splat(64)));
            let low = V::int_sub(value, V::int_shift_left_7(high));
            V::int_store_bytes(high, &mut q[0].as_chunks_mut::<16>().0[i]);
            V::int_store_bytes(low, &mut q[P - 1].as_chunks_mut::<16>().0[i]);
        } else {
            V::int_store_bytes(value, &mut q[0].as_chunks_mut::<16>().0[i]);
        }
    }
    (scale, V::int_to_array(total).iter().sum())
}

/// The bitwise or of all bytes, read as fast as loads go; a tail shorter than a vector is left out.
#[inline(always)]
pub(super) fn read_all<V: Lanes>(bytes: &[u8]) -> i32 {
    let zero = V::int_splat(0);
    let mut sums = [zero; 4];
    for chunks in bytes.as_chunks::<64>().0.as_chunks::<4>().0 {
        for (sum, chunk) in sums.iter_mut().zip(chunks) {
            *sum = V::int_max(*sum, V::load_f32(chunk).magnitude_bits());
        }
    }
    V::int_to_array(V::int_max(V::int_max(sums[0], sums[1]), V::int_max(sums[2], sums[3])))[0]
}
