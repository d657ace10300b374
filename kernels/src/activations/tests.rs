use proptest::prelude::*;

use super::*;
use crate::testing::Rng;

fn rows(format: ActivationFormat, x: &[f32], count: usize) -> ActivationRows {
    let mut rows = ActivationRows::new();
    rows.set(&Kernels::new(None).unwrap(), format, x, count, x.len() / count);
    rows
}

#[test]
fn largest_value_becomes_the_largest_integer() {
    let a8 = rows(ActivationFormat::A8G64, &[-2.0, 1.0, 0.0, 0.5], 1);
    assert_eq!(a8.quantised(0)[..5], [-127, 64, 0, 32, 0]);
    assert_eq!(a8.scales(0), [2.0 / 127.0]);
    assert_eq!(a8.negated_sums(0), [127 - 64 - 32]);
    let a16 = rows(ActivationFormat::A16G64, &[-2.0, 2.0], 1);
    assert_eq!(a16.quantised(0)[..2], [-127, 127]);
    assert_eq!(a16.quantised(0)[64..66], [-63, 63]);
}

#[test]
fn groups_that_are_not_finite_have_scale_nan() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = vec![1.0; 128];
        x[70] = bad;
        let a8 = rows(ActivationFormat::A8G64, &x, 1);
        assert!(!a8.scales(0)[0].is_nan());
        assert!(a8.scales(0)[1].is_nan());
        assert!(a8.quantised(0)[64..].iter().all(|q| *q == 0));
    }
}

#[test]
fn zero_and_tiny_groups_have_scale_zero() {
    for value in [0.0, -0.0, f32::from_bits(1), 3e-37] {
        let a8 = rows(ActivationFormat::A8G64, &[value; 64], 1);
        assert_eq!(a8.scales(0), [0.0]);
        assert!(a8.quantised(0).iter().all(|q| *q == 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn wire_form_round_trips(count in 1_usize..5, cols in 1_usize..200, seed: u64) {
        let x = Rng(seed).floats(count * cols, 5);
        for format in [ActivationFormat::F32, ActivationFormat::A8G64] {
            let sent = rows(format, &x, count);
            let mut bytes = Vec::new();
            sent.write_wire(&mut bytes);
            prop_assert_eq!(Some(bytes.len()), ActivationRows::wire_bytes(format, count, cols));
            let mut received = ActivationRows::new();
            received.read_wire(format, count, cols, &bytes).unwrap();
            prop_assert_eq!(&sent.values, &received.values);
            prop_assert_eq!(&sent.quantised, &received.quantised);
            prop_assert_eq!(&sent.scales, &received.scales);
            prop_assert_eq!(&sent.negated_sums, &received.negated_sums);
        }
    }
}

#[test]
fn wire_errors_leave_no_rows() {
    let check = |format, count, cols, bytes: &[u8]| {
        let mut rows = rows(ActivationFormat::A8G64, &[1.0; 10], 2);
        let error = rows.read_wire(format, count, cols, bytes).unwrap_err();
        assert_eq!(rows.rows(), 0);
        error
    };
    let short = check(ActivationFormat::A8G64, 1, 64, &[0; 67]);
    assert_eq!(short.to_string(), "1 rows of 64 a8g64 values take 68 bytes, found 67");
    let never = check(ActivationFormat::A16G64, 1, 64, &[]);
    assert!(matches!(never, ActivationError::Unsendable { .. }));
    let huge = check(ActivationFormat::F32, usize::MAX, 2, &[]);
    assert!(matches!(huge, ActivationError::Unsendable { .. }));
    let mut bytes = [0; 68];
    bytes[9] = 0x80;
    assert_eq!(
        check(ActivationFormat::A8G64, 1, 64, &bytes),
        ActivationError::Value { row: 0, col: 9 }
    );
}
