use super::*;
use crate::simd::tests::levels;
use crate::testing::{Rng, same_bits};
use crate::{ActivationFormat, math, pack_expert};

const HIDDEN: usize = 96;
const INTERMEDIATE: usize = 80;

fn slab(format: WeightFormat) -> (ExpertLayout, Vec<u8>, [Vec<f32>; 3]) {
    let layout = ExpertLayout::new(HIDDEN, INTERMEDIATE, format).unwrap();
    let mut rng = Rng(11);
    let parts = [(); 3].map(|()| rng.floats(HIDDEN * INTERMEDIATE, 0));
    let mut slab = vec![1; layout.slab_bytes()];
    pack_expert(&layout, &parts[0], &parts[1], &parts[2], &mut slab).unwrap();
    (layout, slab, parts)
}

fn activations(format: WeightFormat) -> ActivationFormat {
    if format.is_integer() { ActivationFormat::A8G64 } else { ActivationFormat::F32 }
}

#[test]
fn slabs_are_whole_pages_with_aligned_parts() {
    for &format in WeightFormat::ALL {
        for (hidden, intermediate) in [(1, 1), (96, 80), (7168, 2048), (576, 1536)] {
            let layout = ExpertLayout::new(hidden, intermediate, format).unwrap();
            assert!(layout.slab_bytes().is_multiple_of(4096));
            let mut end = 0;
            let parts = layout.parts();
            let weights = parts.iter().map(|(m, w, _)| (*w, m.weight_bytes()));
            let scales = parts.iter().map(|(m, _, s)| (*s, m.scale_bytes()));
            for (begin, bytes) in weights.chain(scales) {
                assert!(
                    begin.is_multiple_of(64) && begin >= end && begin < end + 64,
                    "{format} {begin} {end}"
                );
                end = begin + bytes;
            }
            assert!(end <= layout.slab_bytes() && layout.slab_bytes() < end + 4096);
        }
    }
    assert!(ExpertLayout::new(usize::MAX / 2, 64, WeightFormat::Q8G64).is_err());
}

#[test]
fn rows_batches_and_levels_do_not_change_bits() {
    for &format in WeightFormat::ALL {
        let (layout, slab, _) = slab(format);
        let expert = Expert::from_slab(&layout, &slab).unwrap();
        let x = Rng(12).floats(21 * HIDDEN, 2);
        let (scalar, others) = levels();
        let run = |kernels: &Kernels, picked: &[u32]| {
            let mut rows = ActivationRows::new();
            rows.set(kernels, activations(format), &x, 21, HIDDEN);
            let mut out = vec![0.0; picked.len() * HIDDEN];
            kernels.expert(&expert, &rows, picked, &mut out, &mut ExpertScratch::default());
            out
        };
        let all: Vec<u32> = (0..21).collect();
        let expected = run(&scalar, &all);
        for kernels in &others {
            assert!(same_bits(&expected, &run(kernels, &all)), "{format} {}", kernels.isa());
            for picked in [&[3_u32][..], &[20, 0, 5], &[7, 7]] {
                let found = run(kernels, picked);
                for (row, found) in picked.iter().zip(found.chunks_exact(HIDDEN)) {
                    let expected = &expected[*row as usize * HIDDEN..][..HIDDEN];
                    assert!(same_bits(expected, found), "{format} {} {picked:?}", kernels.isa());
                }
            }
        }
    }
}

#[test]
fn is_the_gated_feed_forward() {
    let (layout, slab, [gate, up, down]) = slab(WeightFormat::F32);
    let expert = Expert::from_slab(&layout, &slab).unwrap();
    let kernels = Kernels::new(None).unwrap();
    let x = Rng(13).floats(HIDDEN, 0);
    let mut rows = ActivationRows::new();
    rows.set(&kernels, ActivationFormat::F32, &x, 1, HIDDEN);
    let mut out = vec![0.0; HIDDEN];
    kernels.expert(&expert, &rows, &[0], &mut out, &mut ExpertScratch::default());
    let dot = |w: &[f32], x: &[f32]| {
        w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).fold(0.0, |a, b| a + b)
    };
    let hidden: Vec<f32> = (0..INTERMEDIATE)
        .map(|r| {
            let (g, u) =
                (dot(&gate[r * HIDDEN..][..HIDDEN], &x), dot(&up[r * HIDDEN..][..HIDDEN], &x));
            math::silu(g as f32) * u as f32
        })
        .collect();
    for (r, found) in out.iter().enumerate() {
        let expected = dot(&down[r * INTERMEDIATE..][..INTERMEDIATE], &hidden);
        assert!((f64::from(*found) - expected).abs() < 1e-3, "{found} {expected}");
    }
}

#[test]
fn shapes_must_fit() {
    let layout = ExpertLayout::new(HIDDEN, INTERMEDIATE, WeightFormat::Q8G64).unwrap();
    assert!(Expert::from_slab(&layout, &[0; 4096]).is_err());
    let (layout, slab, _) = slab(WeightFormat::Q4G64);
    let [gate, up, down] = Expert::from_slab(&layout, &slab).unwrap().matrices();
    assert!(Expert::from_matrices(gate, up, down).is_ok());
    assert!(Expert::from_matrices(gate, down, up).is_err());
}
