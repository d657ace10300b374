use super::*;
use crate::testing::Rng;

#[test]
fn order_does_not_matter() {
    let mut rng = Rng(2);
    let terms: Vec<(f32, Vec<f32>)> =
        (0..8).map(|_| (rng.float().abs(), rng.floats(37, 8))).collect();
    let add = |order: &[usize]| {
        let mut acc = vec![0; 37];
        for &i in order {
            accumulate(&mut acc, terms[i].0, &terms[i].1).unwrap();
        }
        acc
    };
    assert_eq!(add(&[0, 1, 2, 3, 4, 5, 6, 7]), add(&[5, 7, 1, 0, 6, 3, 2, 4]));
}

#[test]
fn rounds_half_to_even() {
    let check = |term: f32, expected: i64| {
        let mut acc = [0];
        accumulate(&mut acc, 1.0, &[term]).unwrap();
        assert_eq!(acc[0], expected, "{term}");
    };
    let quantum = QUANTUM;
    check(quantum, 1);
    check(quantum * 0.5, 0);
    check(quantum * 1.5, 2);
    check(quantum * 2.5, 2);
    check(-quantum * 1.5, -2);
    check(-quantum * 0.5, 0);
    check(f32::from_bits(1), 0);
    check(1.0, 1 << 30);
    check(2_097_151.8, 2_251_799_545_249_792);
}

#[test]
fn large_terms_are_refused_by_place() {
    let check = |term: f32| {
        let error = accumulate(&mut [0, 0], 1.0, &[1.0, term]).unwrap_err();
        assert!(matches!(error, CombineError::OutOfRange { index: 1, .. }), "{error}");
    };
    check(TERM_LIMIT);
    check(-TERM_LIMIT);
    check(f32::INFINITY);
    check(f32::NAN);
}

#[test]
fn finish_rounds_once() {
    let mut out = [0.0; 4];
    finish(&[1 << 30, -3, (1 << 53) + 1, (1 << 62) + (1 << 38) + 1], &mut out);
    assert_eq!(out, [1.0, -3.0 * QUANTUM, 8_388_608.0, 4_294_967_296.0 + 512.0]);
}
