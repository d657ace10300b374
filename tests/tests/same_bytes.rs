//! The promise: logits and tokens depend on the container, the prompt, the parameters and the seed, and on nothing else.
//!
//! One mixed workload runs under every condition that must not matter; each time the SHA-256 over all logits and tokens
//! must be that of the plainest run: scalar kernels, one thread, one worker inside the process, one request at a time.

mod counts;
mod in_process;
mod processes;
mod tiers;

use shimmer_kernels::{Isa, WeightFormat};
use shimmer_model::{
    NumericClass,
    tiny::{Preset, TinyOptions},
};
use shimmer_tests::{
    in_process::{InProcess, InProcessOptions},
    models::TinyModel,
    workload::{Job, Outcome, digest},
};
use std::path::Path;

/// Token ids below this one are bytes in every tiny model.
const VOCABULARY: u32 = 256;

/// 4-bit experts in an 8-bit trunk, as `convert` makes by default.
fn default_class() -> NumericClass {
    NumericClass::default()
}

/// 13 experts of width 40: counts and widths that divide by nothing.
fn odd_model() -> TinyModel {
    TinyModel::new(Preset::Qwen3Moe)
}

/// Shared experts, groups, a dense first layer.
fn grouped_model() -> TinyModel {
    TinyModel::new(Preset::Glm4MoeGroups)
}

/// Two experts per layer, so that three workers are more than a layer has experts.
fn narrow_model() -> TinyModel {
    let config = [("num_local_experts".to_owned(), 2.into())].into_iter().collect();
    TinyModel::with_options(Preset::Qwen3MoeTied, &TinyOptions { config, ..TinyOptions::default() })
}

/// Every instruction set that this processor has.
fn instruction_sets() -> Vec<Isa> {
    let best = Isa::detect();
    if best < Isa::Avx512 {
        println!("this processor has no AVX-512 VNNI: {best} is the best set that is tested");
    }
    [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| *isa <= best).collect()
}

/// What everything else is compared with.
fn plainest(container: &Path, jobs: &[Job]) -> Vec<Outcome> {
    let options =
        InProcessOptions { isa: Some(Isa::Scalar), threads: 1, ..InProcessOptions::new(container) };
    let engine = InProcess::with_options(&options);
    jobs.iter().map(|job| engine.run(job)).collect()
}

#[track_caller]
fn assert_same(condition: &str, found: &[Outcome], expected: &[Outcome]) {
    let different: Vec<usize> =
        (0..expected.len()).filter(|&index| found[index] != expected[index]).collect();
    assert!(different.is_empty(), "{condition}: jobs {different:?} have other bytes");
    assert_eq!(digest(found), digest(expected), "{condition}");
}

fn float_class() -> NumericClass {
    NumericClass::uniform(WeightFormat::F32)
}
