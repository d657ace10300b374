use half::f16;
use shimmer_kernels::{
    ActivationFormat, ActivationRows, Matrix, MatrixLayout, WeightFormat, pack_matrix,
};
use shimmer_tests::{random::uniform, reference::ops::count};

use super::{UNIT, assert_close, dequantised, quantised, scalar};

/// Shapes around the borders of blocks (16 rows), groups (64 columns) and segments (8).
const SHAPES: [(usize, usize); 7] =
    [(1, 1), (3, 64), (16, 63), (17, 65), (40, 576), (31, 1000), (64, 520)];

fn pack(
    format: WeightFormat,
    rows: usize,
    cols: usize,
    source: &[f32],
) -> (MatrixLayout, Vec<u8>, Vec<u8>) {
    let layout = MatrixLayout::new(format, rows, cols).unwrap();
    let (mut weights, mut scales) = (vec![0; layout.weight_bytes()], vec![0; layout.scale_bytes()]);
    pack_matrix(&layout, source, &mut weights, &mut scales).unwrap();
    (layout, weights, scales)
}

fn check(weights: WeightFormat, activations: ActivationFormat, rows: usize, cols: usize) {
    let name = format!("{weights} x {activations}, {rows} x {cols}");
    let seed = u64::try_from(rows * 10_000 + cols).unwrap();
    let (layout, bytes, scales) = pack(weights, rows, cols, &uniform(seed, rows * cols));
    let matrix = Matrix::new(layout, &bytes, &scales).unwrap();
    let batch = 3;
    // Rows of very different magnitudes, one of them zero.
    let mut x = uniform(seed + 1, batch * cols);
    x[..cols].iter_mut().for_each(|value| *value *= 1e3);
    x[cols..2 * cols].fill(0.0);
    let (mut input, mut out) = (ActivationRows::new(), vec![f32::NAN; batch * rows]);
    input.set(&scalar(), activations, &x, batch, cols);
    scalar().matmul(&matrix, &input, &mut out);

    let step = if weights.is_integer() { 64 } else { 1 };
    // One chain of fma per segment, three adds of segments; integer terms are rounded twice more.
    let roundings =
        count(cols.div_ceil(step).div_ceil(8) + 3 + if weights.is_integer() { 3 } else { 0 });
    let w = dequantised(&matrix);
    for row in 0..batch {
        let x = quantised(activations, &x[row * cols..][..cols]);
        for (index, w) in w.iter().enumerate() {
            let steps = w.chunks(step).zip(x.chunks(step));
            let terms: Vec<f64> =
                steps.map(|(w, x)| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
            let size: f64 = terms.iter().map(|term: &f64| term.abs()).sum();
            assert_close(
                &name,
                index,
                out[row * rows + index],
                terms.iter().sum(),
                roundings * UNIT * size,
            );
        }
    }
}

#[test]
fn products_are_within_their_roundings() {
    for (rows, cols) in SHAPES {
        for weights in [WeightFormat::Bf16, WeightFormat::F16, WeightFormat::F32] {
            check(weights, ActivationFormat::F32, rows, cols);
        }
        for weights in [WeightFormat::Q8G64, WeightFormat::Q4G64] {
            check(weights, ActivationFormat::A8G64, rows, cols);
            check(weights, ActivationFormat::A16G64, rows, cols);
        }
    }
}

/// A weight by the written layout: blocks of 16 rows, groups of 64 columns, chunks of 64 bytes.
fn by_the_page(
    format: WeightFormat,
    cols: usize,
    weights: &[u8],
    scales: &[u8],
    row: usize,
    col: usize,
) -> f32 {
    let (block, lane, groups) = (row / 16, row % 16, cols.div_ceil(64));
    let (group, chunk) = (block * groups + col / 64, col % 64 / 4);
    let at = (group * 16 + lane) * 2;
    let scale = f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32();
    let byte =
        |chunk: usize, chunks: usize| weights[(group * chunks + chunk) * 64 + lane * 4 + col % 4];
    let value = match format {
        WeightFormat::Q8G64 => f32::from(byte(chunk, 16).cast_signed()),
        _ if chunk < 8 => f32::from(byte(chunk, 8) & 15) - 8.0,
        _ => f32::from(byte(chunk - 8, 8) >> 4) - 8.0,
    };
    value * scale
}

#[test]
fn weights_lie_where_the_layout_says_and_scales_are_no_worse_than_the_largest_magnitude() {
    let (rows, cols) = (35, 150);
    let source = uniform(7, rows * cols);
    for (format, limit) in [(WeightFormat::Q8G64, 127.0_f32), (WeightFormat::Q4G64, 7.0)] {
        let (layout, weights, scales) = pack(format, rows, cols, &source);
        let matrix = Matrix::new(layout, &weights, &scales).unwrap();
        for (row, found) in dequantised(&matrix).into_iter().enumerate() {
            let source = &source[row * cols..][..cols];
            for (col, &found) in found.iter().enumerate() {
                assert_close(
                    "weight",
                    col,
                    by_the_page(format, cols, &weights, &scales, row, col),
                    found,
                    0.0,
                );
            }
            for (found, source) in found.chunks(64).zip(source.chunks(64)) {
                let plain =
                    f16::from_f32(source.iter().fold(0.0_f32, |m, x| m.max(x.abs())) / limit)
                        .to_f32();
                let rounded =
                    |x: &f32| f64::from((x / plain).round_ties_even().clamp(-limit, limit) * plain);
                let error = |approximate: f64, x: &f32| (approximate - f64::from(*x)).powi(2);
                let ours: f64 = found.iter().zip(source).map(|(found, x)| error(*found, x)).sum();
                let theirs: f64 = source.iter().map(|x| error(rounded(x), x)).sum();
                assert!(
                    ours <= theirs * 1.000_001,
                    "{format}, row {row}: error {ours:e}, with plain scales {theirs:e}"
                );
            }
        }
    }
}
