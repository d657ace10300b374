//! Conditions across real processes on loopback.

use std::path::Path;

use shimmer_tests::{
    cluster::{Cluster, ClusterOptions, WorkerOptions},
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

#[test]
fn more_worker_processes_than_experts_of_a_layer() {
    let model = narrow_model();
    let container = model.container(float_class());
    let jobs = mixed(VOCABULARY);
    let expected = plainest(&container, &jobs);
    check("three workers for two experts", &ClusterOptions::new(&container, 3), &jobs, &expected);
}
