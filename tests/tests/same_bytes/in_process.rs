//! Conditions inside one process.

use std::path::Path;

use shimmer_kernels::KvFormat;
use shimmer_model::NumericClass;
use shimmer_tests::{
    in_process::{InProcess, InProcessOptions},
    workload::{Job, decode_rows, mixed},
};

use super::{
    VOCABULARY, assert_same, default_class, float_class, grouped_model, instruction_sets,
    narrow_model, odd_model, plainest,
};

/// Every condition that must not matter, by name.
fn conditions(container: &Path) -> Vec<(String, InProcessOptions)> {
    let plain = || InProcessOptions::new(container);
    let mut out = Vec::new();
    for isa in instruction_sets() {
        for threads in [1, 2] {
            let options = InProcessOptions { isa: Some(isa), threads, ..plain() };
            out.push((format!("{isa}, {threads} threads"), options));
        }
    }
    for prefill_chunk in [1, 7, 64, 512] {
        out.push((
            format!("prefill chunk {prefill_chunk}"),
            InProcessOptions { prefill_chunk, ..plain() },
        ));
    }
    for weights in [vec![1.0; 2], vec![1.0; 3], vec![1.0, 3.0], vec![1.0; 5]] {
        out.push((
            format!("workers of weights {weights:?}"),
            InProcessOptions { worker_weights: weights, ..plain() },
        ));
    }
    out
}

fn check(container: &Path) {
    let jobs = mixed(VOCABULARY);
    let expected = plainest(container, &jobs);
    for (condition, options) in conditions(container) {
        let engine = InProcess::with_options(&options);
        assert_same(&format!("{condition}, together"), &engine.run_together(&jobs), &expected);
        let alone: Vec<_> = jobs.iter().map(|job| engine.run(job)).collect();
        assert_same(&format!("{condition}, alone"), &alone, &expected);
    }
}

#[test]
fn odd_sizes_in_the_default_class() {
    check(&odd_model().container(default_class()));
}

#[test]
fn shared_experts_and_groups_with_a_rounded_cache() {
    check(&grouped_model().container(NumericClass { kv: KvFormat::F16, ..default_class() }));
}

#[test]
fn more_workers_than_experts_of_a_layer_in_f32() {
    check(&narrow_model().container(float_class()));
}

#[test]
fn any_number_of_decode_rows() {
    for class in [default_class(), float_class()] {
        let model = odd_model();
        let container = model.container(class);
        let jobs: Vec<Job> = decode_rows(VOCABULARY, 9);
        let expected = plainest(&container, &jobs);
        for isa in instruction_sets() {
            let options = InProcessOptions { isa: Some(isa), ..InProcessOptions::new(&container) };
            let engine = InProcess::with_options(&options);
            for rows in 1..=jobs.len() {
                let found = engine.run_together(&jobs[..rows]);
                assert_same(
                    &format!("{class}, {isa}, {rows} decode rows"),
                    &found,
                    &expected[..rows],
                );
            }
        }
    }
}
