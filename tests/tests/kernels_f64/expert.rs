use shimmer_kernels::{
    ActivationFormat, ActivationRows, Expert, ExpertLayout, ExpertScratch, WeightFormat,
    pack_expert,
};
use shimmer_tests::{
    random::uniform,
    reference::ops::{self, count, dot},
};

use super::{UNIT, assert_close, dequantised, quantised, scalar};

fn check(weights: WeightFormat, activations: ActivationFormat, hidden: usize, intermediate: usize) {
    let name = format!("expert {weights} x {activations}, {hidden} x {intermediate}");
    let layout = ExpertLayout::new(hidden, intermediate, weights).unwrap();
    let size = hidden * intermediate;
    let source: Vec<f32> = uniform(11, 3 * size).iter().map(|x| x * 0.2).collect();
    let mut slab = vec![0; layout.slab_bytes()];
    pack_expert(&layout, &source[..size], &source[size..2 * size], &source[2 * size..], &mut slab)
        .unwrap();
    let expert = Expert::from_slab(&layout, &slab).unwrap();

    let (batch, picked) = (5, [4_u32, 0, 4]);
    let x = uniform(12, batch * hidden);
    let (mut input, mut scratch) = (ActivationRows::new(), ExpertScratch::default());
    input.set(&scalar(), activations, &x, batch, hidden);
    let mut out = vec![f32::NAN; picked.len() * hidden];
    scalar().expert(&expert, &input, &picked, &mut out, &mut scratch);

    let [gate, up, down] = expert.matrices().map(|matrix| dequantised(&matrix));
    for (row, &index) in picked.iter().enumerate() {
        let x = quantised(activations, &x[index as usize * hidden..][..hidden]);
        let product = |w: &[f64], u: &[f64]| ops::silu(dot(w, &x)) * dot(u, &x);
        #[expect(clippy::cast_possible_truncation, reason = "the kernels hold this value in f32")]
        let inner: Vec<f32> =
            gate.iter().zip(&up).map(|(gate, up)| product(gate, up) as f32).collect();
        let inner = quantised(activations, &inner);
        let largest = inner.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        for (index, down) in down.iter().enumerate() {
            let size: f64 = down.iter().zip(&inner).map(|(w, x)| (w * x).abs()).sum();
            let heaviest = down.iter().fold(0.0_f64, |heaviest, w| heaviest.max(w.abs()));
            // Both projections' chains, then that of `down`; an inner value that lies between two integers may be
            // rounded to the other one: allow two such values.
            let chains = (count(hidden) / 8.0 + 8.0) * 2.0 + count(intermediate) / 8.0 + 8.0;
            let flips = match activations {
                ActivationFormat::F32 => 0.0,
                ActivationFormat::A8G64 => 2.0 * heaviest * largest / 127.0,
                ActivationFormat::A16G64 => 2.0 * heaviest * largest / 16319.0,
            };
            let bound = chains * UNIT * (size + heaviest * largest) + flips;
            assert_close(&name, index, out[row * hidden + index], dot(down, &inner), bound);
        }
    }
}

#[test]
fn experts_are_within_their_roundings() {
    for (hidden, intermediate) in [(64, 40), (100, 16), (192, 257)] {
        for weights in [WeightFormat::Bf16, WeightFormat::F16, WeightFormat::F32] {
            check(weights, ActivationFormat::F32, hidden, intermediate);
        }
        for weights in [WeightFormat::Q8G64, WeightFormat::Q4G64] {
            check(weights, ActivationFormat::A8G64, hidden, intermediate);
        }
    }
}
