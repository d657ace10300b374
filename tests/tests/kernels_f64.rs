//! The scalar kernels against float64, within bounds that follow from the rounding steps that the numerics allow.
//!
//! The other instruction sets are compared with the scalar one bit for bit where they are written, so a bound is stated
//! once, here.

mod attention;
mod expert;
mod functions;
mod gating;
mod matmul;

use shimmer_kernels::{ActivationFormat, Isa, Kernels, Matrix};

/// Largest relative error of one rounding to f32.
const UNIT: f64 = 1.0 / 16_777_216.0;

fn scalar() -> Kernels {
    Kernels::new(Some(Isa::Scalar)).unwrap()
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Every weight as the kernels must see it.
fn dequantised(matrix: &Matrix<'_>) -> Vec<Vec<f64>> {
    let mut row = vec![0.0; matrix.cols()];
    (0..matrix.rows())
        .map(|index| {
            matrix.row(index, &mut row);
            widen(&row)
        })
        .collect()
}

/// A row as an integer matrix must see it, by the rule of the numerics and nothing else: `q * scale` per element.
fn quantised(format: ActivationFormat, row: &[f32]) -> Vec<f64> {
    let limit: f32 = match format {
        ActivationFormat::F32 => return widen(row),
        ActivationFormat::A8G64 => 127.0,
        ActivationFormat::A16G64 => 16319.0,
    };
    let quantise = |group: &[f32]| {
        let largest = group.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let (scale, inverse) = (largest / limit, limit / largest);
        let value = move |x: &f32| f64::from((x * inverse).round_ties_even()) * f64::from(scale);
        group.iter().map(|x| if largest > 0.0 { value(x) } else { 0.0 }).collect::<Vec<_>>()
    };
    row.chunks(64).flat_map(quantise).collect()
}

#[track_caller]
fn assert_close(name: &str, index: usize, found: f32, expected: f64, bound: f64) {
    let error = (f64::from(found) - expected).abs();
    assert!(
        error <= bound,
        "{name} at {index}: {found:e} instead of {expected:e}, {error:e} apart, allowed {bound:e}"
    );
}
