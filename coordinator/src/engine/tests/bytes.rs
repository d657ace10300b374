//! The bytes of every logit are a function of container, prompt and parameters alone.

use std::collections::BTreeMap;

use shimmer_kernels::{Isa, WeightFormat};
use shimmer_model::tiny::{Preset, TinyOptions};

use crate::engine::EngineHandle;
use crate::sampler::Sampling;
use crate::sequence::{Generation, OutputRules, StopRules};
use crate::test_support::{TestWorkers, Tiny, collect, config, kernels, make, start, tiny_model};

/// Prompts of 1, 17 and 300 tokens, greedy and sampled.
fn workload(vocab: u32) -> Vec<Generation> {
    let prompt =
        |length: u32, salt: u32| (0..length).map(|i| (i * i * 7 + i * 13 + salt) % vocab).collect();
    let one = |id: &str, length, temperature, seed| Generation {
        id: id.to_owned(),
        prompt: prompt(length, u32::try_from(seed).unwrap()),
        sampling: Sampling {
            temperature,
            seed,
            top_p: 0.9,
            repetition_penalty: 1.1,
            ..Sampling::default()
        },
        stop: StopRules { max_tokens: Some(12), ignore_eos: true, ..StopRules::default() },
        output: OutputRules { logits_digest: true, ..OutputRules::default() },
        ..Generation::default()
    };
    vec![
        one("one", 1, 0.0, 1),
        one("short", 17, 0.8, 2),
        one("long", 300, 0.0, 3),
        one("other", 17, 1.2, 4),
    ]
}

/// Digest and tokens of each generation, submitted together or one after the other.
fn digests(handle: &EngineHandle, together: bool) -> BTreeMap<String, (String, Vec<u32>)> {
    let work = workload(handle.model_info().vocab_size);
    let submit =
        |generation: Generation| (generation.id.clone(), handle.submit(generation).unwrap());
    let outcome = |(id, stream)| {
        let outcome = collect(stream);
        (id, (outcome.sha256().to_owned(), outcome.tokens))
    };
    if together {
        let streams: Vec<_> = work.into_iter().map(submit).collect();
        streams.into_iter().map(outcome).collect()
    } else {
        work.into_iter().map(|generation| outcome(submit(generation))).collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct Way {
    isa: Isa,
    threads: usize,
    rows: usize,
    chunk: usize,
    weights: &'static [f64],
    together: bool,
    part_rows: usize,
}

const PLAIN: Way = Way {
    isa: Isa::Scalar,
    threads: 1,
    rows: 512,
    chunk: 512,
    weights: &[1.0],
    together: false,
    part_rows: 4096,
};

/// Every way of computing the workload gives the same bytes.
fn check(tiny: &Tiny) {
    let run = |way: Way| {
        let workers =
            TestWorkers::new(tiny, kernels(way.isa)?, way.weights).limits(way.part_rows, 4 << 20);
        let handle = start(tiny, workers, config(way.rows, way.chunk, way.threads));
        let digests = digests(&handle, way.together);
        handle.shutdown();
        Some(digests)
    };
    let expected = run(PLAIN).unwrap();
    let ways = [
        Way { together: true, ..PLAIN },
        Way { chunk: 1, ..PLAIN },
        Way { isa: Isa::Avx2, chunk: 7, together: true, threads: 2, weights: &[1.0, 1.0], ..PLAIN },
        Way { isa: Isa::Avx512, chunk: 64, together: true, weights: &[1.0, 3.0, 1.0], ..PLAIN },
        Way { isa: Isa::Avx512, chunk: 512, threads: 2, weights: &[1.0; 5], ..PLAIN },
        Way { isa: Isa::Avx2, rows: 8, chunk: 8, together: true, part_rows: 3, ..PLAIN },
        Way { weights: &[1.0; 30], together: true, part_rows: 1, ..PLAIN },
    ];
    for way in ways {
        let Some(found) = run(way) else { continue };
        assert_eq!(found, expected, "{way:?}");
    }
}

#[test]
fn glm4_moe_q8() {
    check(&tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64));
}

#[test]
fn glm4_moe_with_groups_q4_experts() {
    check(&tiny_model(Preset::Glm4MoeGroups, WeightFormat::Q4G64, WeightFormat::Q8G64));
}

#[test]
fn qwen3_moe_bf16() {
    check(&tiny_model(Preset::Qwen3Moe, WeightFormat::Bf16, WeightFormat::Bf16));
}

#[test]
fn qwen3_moe_with_a_dense_layer_q8() {
    check(&tiny_model(Preset::Qwen3MoeTied, WeightFormat::Q8G64, WeightFormat::Q8G64));
}

#[test]
fn mixtral_f32() {
    check(&tiny_model(Preset::Mixtral, WeightFormat::F32, WeightFormat::F32));
}

#[test]
fn olmoe_q4() {
    check(&tiny_model(Preset::Olmoe, WeightFormat::Q4G64, WeightFormat::Q4G64));
}

#[test]
fn expert_counts_that_divide_by_nothing() {
    let experts = BTreeMap::from([(0, 7), (1, 13), (2, 5)]);
    let options = TinyOptions { experts, ..TinyOptions::default() };
    check(&make(Preset::Mixtral, WeightFormat::Q8G64, WeightFormat::Q8G64, &options));
}

#[test]
fn scores_are_the_logits_that_generations_saw() {
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let workers = || TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), &[1.0]);
    let tokens: Vec<u32> = (0..90).map(|i| i * 5 % 260).collect();
    let whole = start(&tiny, workers(), config(64, 64, 1)).score(&tokens).unwrap();
    let by_row = start(&tiny, workers(), config(2, 1, 1)).score(&tokens).unwrap();
    assert_eq!(whole.len(), 90);
    assert!(whole == by_row, "chunks change the logits of a scored text");
}
