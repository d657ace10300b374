#![expect(
    clippy::disallowed_methods,
    reason = "a reference within bounds may use the platform's functions"
)]

use shimmer_kernels::{RopeTable, combine, math};
use shimmer_tests::{
    random::uniform,
    reference::ops::{self, count},
};

use super::{UNIT, assert_close, scalar, widen};

#[test]
fn exp_sigmoid_and_silu_are_close_everywhere() {
    // Relative: two roundings of the reduction, six of the polynomial, two more of the sigmoid.
    let bound = |expected: f64, roundings: f64| {
        expected.abs() * roundings * UNIT + f64::from(f32::MIN_POSITIVE)
    };
    for step in -8700..=8800_i16 {
        let x = f32::from(step) / 100.0;
        let wide = f64::from(x);
        let index = usize::from(step.unsigned_abs());
        assert_close("exp", index, math::exp(x), wide.exp(), bound(wide.exp(), 2.0));
        assert_close(
            "sigmoid",
            index,
            math::sigmoid(x),
            ops::sigmoid(wide),
            bound(ops::sigmoid(wide), 4.0),
        );
        assert_close("silu", index, math::silu(x), ops::silu(wide), bound(ops::silu(wide), 4.0));
    }
    assert_eq!(math::exp(-87.5).to_bits(), 0);
    assert_eq!(math::exp(89.0).to_bits(), f32::INFINITY.to_bits());
    assert!(math::exp(f32::NAN).is_nan());
}

#[test]
fn rms_norm_is_within_its_roundings() {
    for (seed, len) in [(1, 1), (2, 16), (3, 64), (4, 577), (5, 6144)] {
        let (x, weight, eps) = (uniform(seed, len), uniform(seed + 100, len), 1e-5_f32);
        let mut out = vec![f32::NAN; len];
        scalar().rms_norm(&x, &weight, eps, &mut out);
        let expected = ops::rms_norm(&widen(&x), &widen(&weight), f64::from(eps));
        // A chain of fma per lane and four levels of adds, halved by the root; then six more operations.
        let roundings = count(len.div_ceil(16) + 4) / 2.0 + 6.0;
        for (index, (&found, expected)) in out.iter().zip(expected).enumerate() {
            assert_close("rms_norm", index, found, expected, roundings * UNIT * expected.abs());
        }
    }
}

#[test]
fn rope_is_within_its_roundings() {
    for (theta, head_dim, rotary) in [(1e4, 64, 64), (1e6, 128, 64), (1e5, 16, 8)] {
        let table = RopeTable::new(theta, rotary, 9000);
        for position in [0, 1, 63, 300, 8191] {
            let x = uniform(u64::try_from(position).unwrap(), head_dim);
            let (mut found, mut expected) = (x.clone(), widen(&x));
            scalar().rope(&mut found, &table, position);
            ops::rope(&mut expected, rotary, theta, position);
            for (index, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
                // Both factors of both products, and the fma: below two units of the larger element.
                assert_close(
                    "rope",
                    index,
                    found,
                    expected,
                    if index < rotary { 4.0 * UNIT } else { 0.0 },
                );
            }
        }
    }
}

#[test]
fn swiglu_is_within_its_roundings() {
    let (gate, up) = (uniform(1, 300), uniform(2, 300));
    let mut found = gate.iter().map(|x| x * 20.0).collect::<Vec<_>>();
    let expected: Vec<f64> =
        found.iter().zip(&up).map(|(g, u)| ops::silu(f64::from(*g)) * f64::from(*u)).collect();
    scalar().swiglu(&mut found, &up);
    for (index, (&found, expected)) in found.iter().zip(expected).enumerate() {
        assert_close("swiglu", index, found, expected, 5.0 * UNIT * expected.abs());
    }
}

#[test]
fn combine_loses_half_a_quantum_per_term() {
    let (rows, hidden) = (9, 100);
    let gates = uniform(3, rows);
    let outputs = uniform(4, rows * hidden);
    let mut sums = vec![0; hidden];
    for (gate, y) in gates.iter().zip(outputs.chunks_exact(hidden)) {
        combine::accumulate(&mut sums, *gate, y).unwrap();
    }
    let mut found = vec![f32::NAN; hidden];
    combine::finish(&sums, &mut found);
    for (index, &found) in found.iter().enumerate() {
        let terms = || gates.iter().zip(outputs[index..].iter().step_by(hidden));
        let expected: f64 = terms().map(|(gate, y)| f64::from(*gate) * f64::from(*y)).sum();
        let size: f64 = terms().map(|(gate, y)| f64::from(gate * y).abs()).sum();
        let quantum = 2.0_f64.powi(-30);
        assert_close(
            "combine",
            index,
            found,
            expected,
            count(rows) * quantum / 2.0 + 2.0 * UNIT * size,
        );
    }
}
