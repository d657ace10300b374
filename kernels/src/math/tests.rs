use super::*;

/// Bits computed with exact rational arithmetic, rounded after every operation as the rule says.
#[test]
fn exp_has_known_bits() {
    let check = |x: f32, bits: u32| assert_eq!(exp(x).to_bits(), bits, "exp({x})");
    check(0.0, 0x3f80_0000);
    check(-0.0, 0x3f80_0000);
    check(1.0, 0x402d_f854);
    check(-1.0, 0x3ebc_5ab2);
    check(0.5, 0x3fd3_094c);
    check(-0.5, 0x3f1b_4598);
    check(10.0, 0x46ac_14ee);
    check(-10.0, 0x383e_6bce);
    check(88.0, 0x7ef8_82b7);
    check(-87.0, 0x00b3_3687);
    check(0.346_573_6, 0x3fb5_04f3);
    check(3.141_592_7, 0x41b9_2024);
    check(1e-3, 0x3f80_20c9);
    check(-50.25, 0x1b35_981c);
    check(20.0, 0x4de7_5844);
}

#[test]
fn exp_ends_are_exact() {
    assert_eq!(exp(f32::from_bits((-87.0_f32).to_bits() + 1)).to_bits(), 0);
    assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
    assert_eq!(exp(f32::from_bits(88.0_f32.to_bits() + 1)), f32::INFINITY);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn sigmoid_and_silu_have_known_bits() {
    let check = |x: f32, sigmoid_bits: u32, silu_bits: u32| {
        assert_eq!(sigmoid(x).to_bits(), sigmoid_bits, "sigmoid({x})");
        assert_eq!(silu(x).to_bits(), silu_bits, "silu({x})");
    };
    check(1.0, 0x3f3b_26a8, 0x3f3b_26a8);
    check(-1.0, 0x3e89_b2b1, 0xbe89_b2b1);
    check(4.0, 0x3f7b_6541, 0x407b_6541);
    check(-20.0, 0x310d_a433, 0xb331_0d40);
}

#[test]
fn exp_is_close_to_the_function() {
    let mut worst = 0.0_f64;
    for i in 0..200_000 {
        let x = -87.0 + 175.0 * (i as f32 / 200_000.0);
        let exact = libm::exp(f64::from(x));
        worst = worst.max(((f64::from(exp(x)) - exact) / exact).abs());
    }
    assert!(worst < 1e-7, "{worst}");
}

#[test]
fn lanes_fold_as_a_tree() {
    // One lane is large: its neighbours vanish only if the order is another one.
    let mut values = [1.0_f32; 16];
    values[0] = 16_777_216.0;
    values[8] = -16_777_216.0;
    assert_eq!(fold_lanes(values), 14.0);
    let long: Vec<f32> = (0..35).map(|i| i as f32).collect();
    assert_eq!(sum(&long), 595.0);
    assert_eq!(sum(&[]), 0.0);
    assert_eq!(sum_of_squares(&[3.0, 4.0]), 25.0);
}

#[test]
fn softmax_of_equal_values_is_even() {
    let mut values = [2.5_f32; 4];
    softmax(&mut values);
    assert_eq!(values, [0.25; 4]);
}

#[test]
fn rounding_is_half_to_even() {
    for (x, expected) in
        [(0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (-0.5, 0.0), (-1.5, -2.0), (16318.5, 16318.0)]
    {
        assert_eq!(round_small(x), expected);
    }
}
