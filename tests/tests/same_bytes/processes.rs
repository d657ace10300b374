//! Conditions across real processes on loopback.

use std::path::Path;

use shimmer_model::tiny::{Preset, TinyOptions};
use shimmer_tests::{
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    in_process::InProcess,
    models::TinyModel,
    random,
    workload::{Job, Outcome, mixed},
};

use super::{
    VOCABULARY, assert_same, default_class, float_class, instruction_sets, narrow_model, odd_model,
    plainest,
};

pub(super) fn outcomes(cluster: &Cluster, jobs: &[Job], together: bool) -> Vec<Outcome> {
    let requests = jobs.iter().map(Job::request);
    let generations = if together {
        cluster.generate_together(requests.collect())
    } else {
        requests.map(|request| cluster.generate(request)).collect()
    };
    generations.unwrap().into_iter().map(Outcome::from).collect()
}

fn check(condition: &str, options: &ClusterOptions, jobs: &[Job], expected: &[Outcome]) {
    let cluster = Cluster::start(options);
    assert_same(&format!("{condition}, together"), &outcomes(&cluster, jobs, true), expected);
    assert_same(&format!("{condition}, alone"), &outcomes(&cluster, jobs, false), expected);
}

/// Workers of these relative capacities, each with another instruction set and number of threads.
fn mixed_workers(container: &Path, weights: &[f64]) -> ClusterOptions {
    let sets = instruction_sets();
    let worker = |(index, &weight): (usize, &f64)| WorkerOptions {
        weight,
        threads: 1 + index % 2,
        isa: Some(sets[index % sets.len()].name()),
        ..WorkerOptions::default()
    };
    ClusterOptions {
        workers: weights.iter().enumerate().map(worker).collect(),
        threads: weights.len().min(2),
        isa: Some(sets[weights.len() % sets.len()].name()),
        args: vec!["--prefill-chunk".to_owned(), ["7", "64", "512"][weights.len() % 3].to_owned()],
        ..ClusterOptions::new(container, 0)
    }
}

#[test]
fn one_two_and_three_workers() {
    let model = odd_model();
    let container = model.container(default_class());
    let jobs = mixed(VOCABULARY);
    let expected = plainest(&container, &jobs);
    for weights in [&[1.0][..], &[1.0, 1.0], &[1.0, 1.0, 3.0]] {
        let condition = format!("worker processes of weights {weights:?}");
        check(&condition, &mixed_workers(&container, weights), &jobs, &expected);
    }
}

/// Step by step through thousands of positions, to the very end of the context.
#[test]
fn a_prompt_of_thousands_fills_the_context() {
    const CONTEXT: usize = 4096;
    let config = [("max_position_embeddings".to_owned(), CONTEXT.into())].into_iter().collect();
    let options = TinyOptions { config, ..TinyOptions::default() };
    let model = TinyModel::with_options(Preset::Qwen3Moe, &options);
    let container = model.container(default_class());
    let mut job = mixed(VOCABULARY).remove(2);
    job.prompt = random::tokens(9, CONTEXT - 6, VOCABULARY);
    job.max_tokens = 6;
    let expected = InProcess::start(&container).run(&job);
    let cluster = Cluster::start(&ClusterOptions::new(&container, 2));
    let found = outcomes(&cluster, std::slice::from_ref(&job), false);
    assert_same("a context of thousands", &found, &[expected]);
    // One more token than there is room for ends where the context does.
    job.prompt.push(1);
    let generation = cluster.generate(job.request()).unwrap();
    assert_eq!(generation.tokens.len(), 5);
}

#[test]
fn more_worker_processes_than_experts_of_a_layer() {
    let model = narrow_model();
    let container = model.container(float_class());
    let jobs = mixed(VOCABULARY);
    let expected = plainest(&container, &jobs);
    check("three workers for two experts", &ClusterOptions::new(&container, 3), &jobs, &expected);
}
