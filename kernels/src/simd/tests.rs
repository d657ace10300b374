//! Every level against the scalar one, bit for bit.

use proptest::prelude::*;

use super::Level;
use crate::activations::ActivationRows;
use crate::kernels::{Isa, Kernels};
use crate::testing::{Rng, random_matrix, same_bits};
use crate::{ActivationFormat, Matrix, MatrixLayout, RopeTable, WeightFormat};

/// The scalar kernels, and every other level that this processor runs.
pub(crate) fn levels() -> (Kernels, Vec<Kernels>) {
    let plain = Kernels::with_level(Level::plain());
    let others = [Isa::Scalar, Isa::Avx2, Isa::Avx512];
    (plain, others.into_iter().filter_map(|isa| Kernels::new(Some(isa)).ok()).collect())
}

fn activations_of(format: WeightFormat) -> &'static [ActivationFormat] {
    if format.is_integer() {
        &[ActivationFormat::A8G64, ActivationFormat::A16G64]
    } else {
        &[ActivationFormat::F32]
    }
}

/// Products of every format and level for one shape, with values spread over `spread` binary orders of magnitude.
fn check_matmul(rows: usize, cols: usize, m: usize, seed: u64, spread: u32) {
    let mut rng = Rng(seed);
    let x = rng.floats(m * cols, spread);
    let (scalar, others) = levels();
    for &format in WeightFormat::ALL {
        let layout = MatrixLayout::new(format, rows, cols).unwrap();
        let bytes = random_matrix(&layout, &mut rng);
        let matrix = Matrix::from_bytes(layout, &bytes).unwrap();
        for &activations in activations_of(format) {
            let mut expected = vec![0.0; m * rows];
            let mut quantised = ActivationRows::new();
            quantised.set(&scalar, activations, &x, m, cols);
            scalar.matmul(&matrix, &quantised, &mut expected);
            for kernels in &others {
                let mut own = ActivationRows::new();
                own.set(kernels, activations, &x, m, cols);
                let mut found = vec![f32::NAN; m * rows];
                kernels.matmul(&matrix, &own, &mut found);
                assert!(
                    same_bits(&expected, &found),
                    "{} {format}/{activations} {rows}x{cols} m={m} seed={seed}",
                    kernels.isa()
                );
            }
        }
    }
}

#[test]
fn matmul_agrees_for_every_number_of_rows() {
    for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64] {
        check_matmul(48, 192, m, 1 + m as u64, 4);
    }
}

#[test]
fn matmul_agrees_on_odd_shapes() {
    for (rows, cols) in
        [(1, 1), (15, 63), (17, 65), (16, 64), (33, 513), (5, 1), (31, 700), (100, 100)]
    {
        check_matmul(rows, cols, 3, (rows * cols) as u64, 20);
    }
}

#[test]
fn matmul_agrees_at_the_extremes() {
    let (scalar, others) = levels();
    let cols = 128;
    for &format in &[WeightFormat::Q8G64, WeightFormat::Q4G64] {
        let layout = MatrixLayout::new(format, 16, cols).unwrap();
        // 0x7f and 0x81 are +-127 in q8; 0x00 and 0xff are -8 and 7 in q4. 0x7bff is the largest f16.
        for fill in [0x7f_u8, 0x81, 0x00, 0xff] {
            let weights = vec![fill; layout.weight_bytes()];
            let scales = 0x7bff_u16.to_le_bytes().repeat(layout.scale_bytes() / 2);
            let matrix = Matrix::new(layout, &weights, &scales).unwrap();
            for value in [1.0, -1.0, f32::MIN_POSITIVE / 8.0, 3e38, 0.0] {
                for &activations in activations_of(format) {
                    let x: Vec<f32> =
                        (0..cols).map(|i| if i % 3 == 2 { -value } else { value }).collect();
                    let run = |kernels: &Kernels| {
                        let mut rows = ActivationRows::new();
                        rows.set(kernels, activations, &x, 1, cols);
                        let mut out = vec![0.0; 16];
                        kernels.matmul(&matrix, &rows, &mut out);
                        out
                    };
                    let expected = run(&scalar);
                    for kernels in &others {
                        assert!(
                            same_bits(&expected, &run(kernels)),
                            "{} {format} {fill} {value}",
                            kernels.isa()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_turns_nan_and_no_other() {
    let (scalar, others) = levels();
    let mut rng = Rng(3);
    let layout = MatrixLayout::new(WeightFormat::Q8G64, 32, 64).unwrap();
    let bytes = random_matrix(&layout, &mut rng);
    let matrix = Matrix::from_bytes(layout, &bytes).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = rng.floats(3 * 64, 3);
        x[64 + 5] = bad;
        for kernels in others.iter().chain([&scalar]) {
            let mut rows = ActivationRows::new();
            rows.set(kernels, ActivationFormat::A8G64, &x, 3, 64);
            let mut out = vec![0.0; 3 * 32];
            kernels.matmul(&matrix, &rows, &mut out);
            assert!(out[32..64].iter().all(|v| v.is_nan()), "{}", kernels.isa());
            assert!(out[..32].iter().chain(&out[64..]).all(|v| v.is_finite()), "{}", kernels.isa());
        }
    }
}

fn check_quantise(x: &[f32]) {
    let (scalar, others) = levels();
    for format in [ActivationFormat::A8G64, ActivationFormat::A16G64] {
        let mut expected = ActivationRows::new();
        expected.set(&scalar, format, x, 1, x.len());
        for kernels in &others {
            let mut found = ActivationRows::new();
            found.set(kernels, format, x, 1, x.len());
            assert_eq!(
                expected.quantised(0),
                found.quantised(0),
                "{} {format} {x:?}",
                kernels.isa()
            );
            assert!(
                same_bits(expected.scales(0), found.scales(0)),
                "{} {format} {x:?}",
                kernels.isa()
            );
            assert_eq!(
                expected.negated_sums(0),
                found.negated_sums(0),
                "{} {format} {x:?}",
                kernels.isa()
            );
        }
    }
}

#[test]
fn quantise_agrees_on_ties_and_tiny_values() {
    check_quantise(&[]);
    check_quantise(&[0.0; 64]);
    check_quantise(&[-0.0; 65]);
    // Halves of a step: 127 is the largest, so the factor is 1 and x.5 is a tie.
    let ties: Vec<f32> = (0..64).map(|i| if i == 0 { 127.0 } else { i as f32 - 32.5 }).collect();
    check_quantise(&ties);
    check_quantise(&[f32::from_bits(1); 70]);
    check_quantise(&[1e-37, -1e-37, 3.8e-37, 3.7e-37]);
    check_quantise(&[f32::MAX, -f32::MAX, 1.0]);
    check_quantise(&[1.0, f32::NAN, 2.0]);
}

fn check_rows(x: &[f32], y: &[f32]) {
    let (scalar, others) = levels();
    let run = |kernels: &Kernels| {
        let mut gate = x.to_vec();
        kernels.swiglu(&mut gate, y);
        let mut exps = x.to_vec();
        kernels.exp(&mut exps);
        let mut normed = vec![0.0; x.len()];
        kernels.rms_norm(x, y, 1e-5, &mut normed);
        let mut sum = x.to_vec();
        kernels.add_assign(&mut sum, y);
        let mut acc = vec![5_i64; x.len()];
        let accumulated = kernels.accumulate(&mut acc, 0.37, y).is_ok();
        let mut finished = vec![0.0; x.len()];
        if accumulated {
            kernels.finish(&acc, &mut finished);
        }
        let mut rotated = x.to_vec();
        let rotary = x.len() / 2 * 2;
        if rotary > 0 {
            kernels.rope(&mut rotated, &RopeTable::new(1e4, rotary, 9), 7);
        }
        [gate, exps, normed, sum, finished, rotated]
    };
    let expected = run(&scalar);
    for kernels in &others {
        let found = run(kernels);
        for (i, (e, f)) in expected.iter().zip(&found).enumerate() {
            assert!(same_bits(e, f), "{} operation {i} of {x:?} {y:?}: {e:?} {f:?}", kernels.isa());
        }
    }
}

#[test]
fn row_operations_agree_at_the_extremes() {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        86.9,
        -86.9,
        -87.0,
        -87.1,
        88.0,
        88.1,
        200.0,
        -200.0,
        1e-40,
        -1e-40,
        3e38,
        -3e38,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.5,
        1.5,
        2.5,
    ];
    check_rows(&special, &special);
    for x in special {
        check_rows(&[x], &[1.0]);
    }
}

#[test]
fn exp_agrees_everywhere() {
    // Every 997th bit pattern covers all exponents and both signs.
    let x: Vec<f32> = (0..u32::MAX / 997).map(|i| f32::from_bits(i * 997)).collect();
    let (scalar, others) = levels();
    let mut expected = x.clone();
    scalar.exp(&mut expected);
    for kernels in &others {
        let mut found = x.clone();
        kernels.exp(&mut found);
        assert!(same_bits(&expected, &found), "{}", kernels.isa());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn matmul_agrees(rows in 1_usize..70, cols in 1_usize..400, m in 1_usize..20, seed: u64, spread in 0_u32..30) {
        check_matmul(rows, cols, m, seed, spread);
    }

    #[test]
    fn quantise_agrees(x in proptest::collection::vec(proptest::num::f32::ANY, 0..200)) {
        check_quantise(&x);
    }

    #[test]
    fn row_operations_agree(
        pairs in proptest::collection::vec((proptest::num::f32::NORMAL, proptest::num::f32::NORMAL), 1..200),
    ) {
        let (x, y): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        check_rows(&x, &y);
    }

    #[test]
    fn row_operations_agree_on_ordinary_values(len in 1_usize..700, seed: u64) {
        let mut rng = Rng(seed);
        check_rows(&rng.floats(len, 6), &rng.floats(len, 6));
    }
}
