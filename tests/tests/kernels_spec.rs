//! The kernels against the written arithmetic, bit for bit: each rule of `docs/NUMERICS.md` once more, in the plainest
//! code, for whatever instruction set this processor prefers.
//!
//! `kernels_f64` shows that the results are right; this suite shows that they are the ones that are written down.

use half::{bf16, f16};
use shimmer_kernels::{
    ActivationFormat, ActivationRows, AttentionRequest, AttentionSpan, Kernels, KvFormat, KvLayout,
    Matrix, MatrixLayout, PAGE_POSITIONS, PagePlace, WeightFormat, math, pack_matrix,
};
use shimmer_tests::random::uniform;

fn kernels() -> Kernels {
    Kernels::new(None).unwrap()
}

#[track_caller]
fn assert_bits(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(
            found.to_bits(),
            expected.to_bits(),
            "{name} at {index}: {found:e} instead of {expected:e}"
        );
    }
}

/// Eight contiguous segments of `ceil(steps / 8)` steps, each one chain from 0; then the tree of adjacent pairs.
fn segmented(steps: usize, mut step: impl FnMut(usize, f32) -> f32) -> f32 {
    let length = steps.div_ceil(8);
    let mut sums = [0.0_f32; 8];
    for (segment, sum) in sums.iter_mut().enumerate() {
        for index in (segment * length).min(steps)..((segment + 1) * length).min(steps) {
            *sum = step(index, *sum);
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

/// Sixteen strided lanes, then the tree of halves.
fn strided(len: usize, mut step: impl FnMut(usize, f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; 16];
    for index in 0..len {
        lanes[index % 16] = step(index, lanes[index % 16]);
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

/// One group of activations: integers and their scale.
fn quantise(group: &[f32], limit: f32) -> (Vec<i64>, f32) {
    let largest = group.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    if largest == 0.0 {
        return (vec![0; group.len()], 0.0);
    }
    let inverse = limit / largest;
    #[expect(clippy::cast_possible_truncation, reason = "an integer of at most 16319")]
    let integers = group.iter().map(|x| (x * inverse).round_ties_even() as i64).collect();
    (integers, largest / limit)
}

/// A weight as an integer and its scale, from the dequantised row; exact, since one divides the other. Scales may be negative.
fn weight_group(row: &[f32], scale: f32) -> Vec<i64> {
    #[expect(clippy::cast_possible_truncation, reason = "an integer of at most 127")]
    row.iter()
        .map(|w| if scale != 0.0 { (w / scale).round_ties_even() as i64 } else { 0 })
        .collect()
}

/// Scale of a row and group: `[block][group][16 rows]` f16.
fn scale_of(scales: &[u8], groups: usize, row: usize, group: usize) -> f32 {
    let at = ((row / 16 * groups + group) * 16 + row % 16) * 2;
    f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32()
}

fn check_product(
    weights: WeightFormat,
    activations: ActivationFormat,
    rows: usize,
    cols: usize,
    batch: usize,
) {
    let layout = MatrixLayout::new(weights, rows, cols).unwrap();
    let (mut bytes, mut scales) = (vec![0; layout.weight_bytes()], vec![0; layout.scale_bytes()]);
    pack_matrix(&layout, &uniform(1, rows * cols), &mut bytes, &mut scales).unwrap();
    let matrix = Matrix::new(layout, &bytes, &scales).unwrap();
    let x = uniform(2, batch * cols);
    let (mut input, mut found) = (ActivationRows::new(), vec![f32::NAN; batch * rows]);
    input.set(&kernels(), activations, &x, batch, cols);
    kernels().matmul(&matrix, &input, &mut found);

    let limit = if activations == ActivationFormat::A8G64 { 127.0 } else { 16319.0 };
    let (mut expected, mut w) = (vec![f32::NAN; batch * rows], vec![0.0; cols]);
    for row in 0..rows {
        matrix.row(row, &mut w);
        for (index, x) in x.chunks_exact(cols).enumerate() {
            expected[index * rows + row] = if weights.is_integer() {
                let groups = cols.div_ceil(64);
                segmented(groups, |group, sum| {
                    let columns = group * 64..cols.min(group * 64 + 64);
                    let (q, x_scale) = quantise(&x[columns.clone()], limit);
                    let w_scale = scale_of(&scales, groups, row, group);
                    let product: i64 =
                        weight_group(&w[columns], w_scale).iter().zip(&q).map(|(w, q)| w * q).sum();
                    #[expect(
                        clippy::cast_precision_loss,
                        reason = "rounded half to even, as written"
                    )]
                    (product as f32).mul_add(w_scale * x_scale, sum)
                })
            } else {
                segmented(cols, |col, sum| w[col].mul_add(x[col], sum))
            };
        }
    }
    assert_bits(
        &format!("{weights} x {activations}, {rows} x {cols}, {batch} rows"),
        &found,
        &expected,
    );
}

#[test]
fn products() {
    for (rows, cols) in [(5, 3), (33, 200), (48, 1100)] {
        for batch in [1, 2, 7, 8, 9, 33] {
            for weights in [WeightFormat::Bf16, WeightFormat::F16, WeightFormat::F32] {
                check_product(weights, ActivationFormat::F32, rows, cols, batch);
            }
            for weights in [WeightFormat::Q8G64, WeightFormat::Q4G64] {
                check_product(weights, ActivationFormat::A8G64, rows, cols, batch);
                check_product(weights, ActivationFormat::A16G64, rows, cols, batch);
            }
        }
    }
}

#[test]
fn norms() {
    for len in [1, 15, 64, 577] {
        let (x, weight, eps) = (uniform(3, len), uniform(4, len), 1e-6_f32);
        let mut found = vec![f32::NAN; len];
        kernels().rms_norm(&x, &weight, eps, &mut found);
        let squares = strided(len, |index, sum| x[index].mul_add(x[index], sum));
        #[expect(clippy::cast_precision_loss, reason = "a small count")]
        let factor = 1.0 / (squares / len as f32 + eps).sqrt();
        let expected: Vec<f32> =
            x.iter().zip(&weight).map(|(x, weight)| x * factor * weight).collect();
        assert_bits(&format!("norm of {len}"), &found, &expected);
    }
}

/// Attention of one query head over keys and values as the cache keeps them.
fn attend(query: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>], scale: f32) -> Vec<f32> {
    let mut total: Option<(f32, f32, Vec<f32>)> = None;
    for (keys, values) in keys.chunks(256).zip(values.chunks(256)) {
        let score =
            |key: &Vec<f32>| segmented(query.len(), |d, sum| key[d].mul_add(query[d], sum)) * scale;
        let scores: Vec<f32> = keys.iter().map(score).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| math::exp(score - max)).collect();
        let sum = strided(weights.len(), |index, sum| sum + weights[index]);
        let mut out = vec![0.0_f32; values[0].len()];
        for (weight, value) in weights.iter().zip(values) {
            out.iter_mut().zip(value).for_each(|(out, value)| *out = weight.mul_add(*value, *out));
        }
        total = Some(match total {
            None => (max, sum, out),
            Some((old_max, old_sum, old_out)) => {
                let new_max = old_max.max(max);
                let (a, b) = (math::exp(old_max - new_max), math::exp(max - new_max));
                let out =
                    old_out.iter().zip(&out).map(|(old, new)| old.mul_add(a, new * b)).collect();
                (new_max, old_sum.mul_add(a, sum * b), out)
            }
        });
    }
    let (_, sum, out) = total.unwrap();
    out.iter().map(|out| out / sum).collect()
}

fn check_attention(format: KvFormat, head_dim: usize, before: usize, rows: usize) {
    let (heads, kv_heads, scale) = (4, 2, 0.25_f32);
    let (positions, width) = (before + rows, kv_heads * head_dim);
    let layout = KvLayout { format, kv_heads, head_dim };
    let [queries, keys, values] =
        [(5, rows * heads * head_dim), (6, positions * width), (7, positions * width)]
            .map(|(seed, len)| uniform(seed, len).into_iter().map(|x| x * 3.0).collect::<Vec<_>>());
    let pages: Vec<u32> = (0..u32::try_from(positions.div_ceil(PAGE_POSITIONS)).unwrap()).collect();
    let place = PagePlace { stride: layout.page_bytes(), offset: 0 };
    let mut cache = vec![0_u8; layout.page_bytes() * pages.len()];
    kernels().write_kv(layout, &mut cache, place, &pages, 0, &keys, &values);
    let spans = [AttentionSpan { pages: &pages, first_position: before, rows }];
    let request = AttentionRequest {
        layout,
        cache: &cache,
        place,
        heads,
        scale,
        queries: &queries,
        spans: &spans,
    };
    let mut found = vec![f32::NAN; rows * heads * head_dim];
    kernels().attention(&request, &mut found);

    let kept = |x: &f32| match format {
        KvFormat::F32 => *x,
        KvFormat::F16 => f16::from_f32(*x).to_f32(),
        KvFormat::Bf16 => bf16::from_f32(*x).to_f32(),
    };
    let mut expected = Vec::with_capacity(found.len());
    for row in 0..rows {
        for head in 0..heads {
            let first = head / (heads / kv_heads) * head_dim;
            let seen = |values: &[f32]| -> Vec<Vec<f32>> {
                let rows = values.chunks_exact(width).take(before + row + 1);
                rows.map(|row| row[first..first + head_dim].iter().map(kept).collect()).collect()
            };
            let query = &queries[(row * heads + head) * head_dim..][..head_dim];
            expected.extend(attend(query, &seen(&keys), &seen(&values), scale));
        }
    }
    assert_bits(&format!("attention over {format}, {rows} rows after {before}"), &found, &expected);
}

#[test]
fn attention() {
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16] {
        check_attention(format, 16, 0, 70);
        check_attention(format, 64, 255, 3);
        check_attention(format, 20, 600, 1);
    }
}
