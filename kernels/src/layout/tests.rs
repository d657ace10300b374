use super::*;
use crate::testing::{Rng, random_matrix};

#[test]
fn sizes_are_those_of_the_formats() {
    let check = |format, rows, cols, weights, scales| {
        let layout = MatrixLayout::new(format, rows, cols).unwrap();
        assert_eq!(
            (layout.weight_bytes(), layout.scale_bytes()),
            (weights, scales),
            "{format} {rows}x{cols}"
        );
    };
    check(WeightFormat::Q8G64, 16, 64, 1024, 32);
    check(WeightFormat::Q8G64, 17, 65, 2 * 2 * 1024, 2 * 2 * 32);
    check(WeightFormat::Q4G64, 16, 64, 512, 32);
    check(WeightFormat::Q4G64, 1, 1, 512, 32);
    check(WeightFormat::Bf16, 17, 3, 2 * 16 * 3 * 2, 0);
    check(WeightFormat::F32, 1, 1, 64, 0);
}

#[test]
fn impossible_shapes_are_refused() {
    let empty = MatrixLayout::new(WeightFormat::F32, 0, 5);
    assert_eq!(empty, Err(LayoutError::Empty { rows: 0, cols: 5 }));
    for (rows, cols) in
        [(usize::MAX, usize::MAX), (usize::MAX, 1), (1, usize::MAX), (1 << 32, 1 << 32)]
    {
        for &format in WeightFormat::ALL {
            let error = MatrixLayout::new(format, rows, cols).unwrap_err();
            assert!(matches!(error, LayoutError::TooLarge { .. }), "{error}");
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let layout = MatrixLayout::new(WeightFormat::Q8G64, 16, 64).unwrap();
    let error = Matrix::new(layout, &[0; 1023], &[0; 32]).unwrap_err();
    assert_eq!(error.to_string(), "weights holds 1023 bytes, expected 1024");
    assert!(Matrix::new(layout, &[0; 1024], &[0; 33]).is_err());
    assert!(Matrix::from_bytes(layout, &[0; 1024 + 31]).is_err());
}

#[test]
fn every_element_has_its_own_place() {
    for &format in WeightFormat::ALL {
        let layout = MatrixLayout::new(format, 32, 128).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for row in 0..32 {
            for col in 0..128 {
                let (at, high) = layout.element(row, col);
                assert!(at + format.unit_bytes().min(4) <= layout.weight_bytes() + 3);
                assert!(seen.insert((at, high)), "{format} {row} {col}");
            }
        }
    }
}

#[test]
fn places_are_those_of_the_page() {
    let q8 = MatrixLayout::new(WeightFormat::Q8G64, 32, 128).unwrap();
    assert_eq!(q8.element(0, 5), (64 + 1, false));
    assert_eq!(q8.element(3, 64 + 63), (1024 + 15 * 64 + 15, false));
    assert_eq!(q8.element(16, 0), (2048, false));
    let q4 = MatrixLayout::new(WeightFormat::Q4G64, 32, 128).unwrap();
    assert_eq!(q4.element(2, 33), (8 + 1, true));
    assert_eq!(q4.element(2, 31), (7 * 64 + 8 + 3, false));
    let f32 = MatrixLayout::new(WeightFormat::F32, 32, 128).unwrap();
    assert_eq!(f32.element(17, 3), (128 * 64 + (3 * 16 + 1) * 4, false));
    assert_eq!(q8.scale(17, 1), ((2 + 1) * 16 + 1) * 2);
}

#[test]
fn a_row_is_its_products_with_unit_vectors() {
    let mut rng = Rng(1);
    let kernels = crate::Kernels::new(None).unwrap();
    for &format in &[WeightFormat::Bf16, WeightFormat::F16, WeightFormat::F32] {
        let layout = MatrixLayout::new(format, 20, 30).unwrap();
        let bytes = random_matrix(&layout, &mut rng);
        let matrix = Matrix::from_bytes(layout, &bytes).unwrap();
        let mut identity = vec![0.0; 30 * 30];
        identity.iter_mut().step_by(31).for_each(|v| *v = 1.0);
        let mut rows = crate::ActivationRows::new();
        rows.set(&kernels, crate::ActivationFormat::F32, &identity, 30, 30);
        let mut out = vec![0.0; 30 * 20];
        kernels.matmul(&matrix, &rows, &mut out);
        let mut row = vec![0.0; 30];
        for r in 0..20 {
            matrix.row(r, &mut row);
            for c in 0..30 {
                assert_eq!(row[c], out[c * 20 + r]);
            }
        }
    }
}
