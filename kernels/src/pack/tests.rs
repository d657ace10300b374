use proptest::prelude::*;

use super::*;
use crate::Matrix;
use crate::testing::Rng;

fn pack(
    format: WeightFormat,
    source: &[f32],
    rows: usize,
) -> Result<(MatrixLayout, Vec<u8>), LayoutError> {
    let layout = MatrixLayout::new(format, rows, source.len() / rows).unwrap();
    let mut bytes = vec![0xee; layout.total_bytes()];
    let (weights, rest) = bytes.split_at_mut(layout.weight_bytes());
    let padding = layout.scale_offset() - layout.weight_bytes();
    let rest = if format.is_integer() { &mut rest[padding..] } else { rest };
    pack_matrix(&layout, source, weights, rest).map(|()| (layout, bytes))
}

/// Values of the packed matrix.
fn unpacked(format: WeightFormat, source: &[f32], rows: usize) -> Vec<f32> {
    let (layout, bytes) = pack(format, source, rows).unwrap();
    let matrix = Matrix::from_bytes(layout, &bytes).unwrap();
    let mut out = vec![0.0; source.len()];
    for (r, row) in out.chunks_exact_mut(layout.cols()).enumerate() {
        matrix.row(r, row);
    }
    out
}

fn error_of(source: &[f32], packed: &[f32]) -> f32 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, |s, v| s + v * v);
    let wrong = squares(&mut source.iter().zip(packed).map(|(a, b)| a - b));
    (wrong / squares(&mut source.iter().copied())).sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn packing_keeps_values(rows in 1_usize..40, cols in 1_usize..150, seed: u64) {
        let source = Rng(seed).floats(rows * cols, 0);
        for (format, bound) in [
            (WeightFormat::F32, 0.0), (WeightFormat::F16, 5e-4), (WeightFormat::Bf16, 4e-3),
            (WeightFormat::Q8G64, 6e-3), (WeightFormat::Q4G64, 0.1),
        ] {
            let error = error_of(&source, &unpacked(format, &source, rows));
            prop_assert!(error <= bound, "{} {}", format, error);
        }
    }
}

#[test]
fn integers_times_a_scale_are_kept_exactly() {
    let scale = 0.125;
    let q8: Vec<f32> = (0..128)
        .map(|i| (i as f32 - 63.5).round() * scale * 2.0 + if i == 0 { -0.25 } else { 0.0 })
        .collect();
    let q8: Vec<f32> = q8.iter().map(|v| v.clamp(-127.0 * scale, 127.0 * scale)).collect();
    assert_eq!(
        unpacked(WeightFormat::Q8G64, &[&q8[..], &[127.0 * scale; 64]].concat(), 3)[128..],
        [127.0 * scale; 64]
    );
    let q4: Vec<f32> = (0..64).map(|i| (i % 16 - 8) as f32 * scale).collect();
    assert_eq!(unpacked(WeightFormat::Q4G64, &q4, 1), q4);
    let mirrored: Vec<f32> = q4.iter().map(|v| -v).collect();
    assert_eq!(unpacked(WeightFormat::Q4G64, &mirrored, 1), mirrored);
}

#[test]
fn zeros_stay_zero_and_padding_is_zero() {
    for &format in WeightFormat::ALL {
        let (layout, bytes) = pack(format, &[0.0; 3 * 70], 3).unwrap();
        let zero = if format == WeightFormat::Q4G64 { 0x88 } else { 0 };
        assert!(bytes[..layout.weight_bytes()].iter().all(|b| *b == zero), "{format}");
        assert!(
            bytes[layout.scale_offset().min(bytes.len())..].iter().all(|b| *b == 0),
            "{format}"
        );
    }
}

#[test]
fn values_that_no_format_holds_are_refused() {
    for &format in WeightFormat::ALL {
        for bad in [f32::NAN, f32::INFINITY] {
            let error = pack(format, &[0.0, 1.0, bad, 0.0], 2).unwrap_err();
            assert_eq!(error, LayoutError::NonFinite { row: 1, col: 0 }, "{format}");
        }
    }
    for (format, value) in [
        (WeightFormat::F16, 7e4),
        (WeightFormat::Q8G64, 1e8),
        (WeightFormat::Q4G64, 1e6),
        (WeightFormat::Bf16, f32::MAX),
    ] {
        let error = pack(format, &[0.0, value], 1).unwrap_err();
        assert!(matches!(error, LayoutError::OutOfRange { row: 0, .. }), "{format} {error}");
    }
}

#[test]
fn no_weight_is_minus_128() {
    let source = Rng(4).floats(64 * 64, 3);
    let (layout, bytes) = pack(WeightFormat::Q8G64, &source, 64).unwrap();
    assert!(bytes[..layout.weight_bytes()].iter().all(|b| *b != 0x80));
}

#[test]
fn the_bytes_do_not_depend_on_threads() {
    let source = Rng(5).floats(100 * 130, 3);
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| pack(WeightFormat::Q4G64, &source, 100).unwrap().1)
    };
    assert_eq!(with(1), with(2));
}
