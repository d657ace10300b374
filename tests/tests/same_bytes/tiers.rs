//! Where experts live, how they are read and what is read ahead must not matter.
//!
//! The full product of the settings runs inside one process with a short workload; worker processes run a choice of it
//! with the whole one.

use std::{
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use shimmer_tests::{
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    in_process::{InProcess, InProcessOptions},
    process::{generate_args, shimmer_binary},
    workload::{Job, mixed},
};
use shimmer_worker::{
    TierOptions,
    tier_options::{IoBackend, Policy},
};

use super::{VOCABULARY, assert_same, default_class, odd_model, plainest};

const BACKENDS: [IoBackend; 3] = [IoBackend::Pread, IoBackend::Uring, IoBackend::Buffered];

/// A prompt that touches every expert, one token at a time after it, and a second sequence beside it.
fn short() -> Vec<Job> {
    let mut jobs = mixed(VOCABULARY);
    jobs.truncate(5);
    jobs.remove(2);
    for job in &mut jobs {
        job.max_tokens = 6;
    }
    jobs
}

/// Every combination of the settings that a cache can have, for one number of slots per layer.
fn product(cap: Option<u32>) -> Vec<TierOptions> {
    let mut all = Vec::new();
    for io in BACKENDS {
        for policy in [Policy::Lru, Policy::Lfru] {
            for evict_guard in [true, false] {
                for pilot_workers in [0, 1, 8] {
                    let base = TierOptions { cap, io, policy, ..TierOptions::default() };
                    all.push(TierOptions { evict_guard, pilot_workers, ..base });
                }
            }
        }
    }
    all
}

fn check(cap: Option<u32>) {
    let model = odd_model();
    let container = model.container(default_class());
    let jobs = short();
    let expected = plainest(&container, &jobs);
    let (mut misses, mut prefetched) = (0, 0);
    for workers in 1..=3 {
        for tiers in product(cap) {
            let condition = format!("{workers} workers, {tiers:?}");
            let options = InProcessOptions {
                worker_weights: vec![1.0; workers],
                tiers,
                ..InProcessOptions::new(&container)
            };
            let engine = InProcess::with_options(&options);
            assert_same(&condition, &engine.run_together(&jobs), &expected);
            for tiers in engine.tiers() {
                misses += tiers.misses;
                prefetched += tiers.prefetch_issued;
            }
        }
    }
    assert_eq!(misses > 0, cap.is_some(), "a bounded cache misses, and nothing else does");
    assert_eq!(prefetched > 0, cap.is_some(), "hints are followed where something is missing");
}

#[test]
fn everything_resident() {
    check(None);
}

#[test]
fn one_slot_per_layer() {
    check(Some(1));
}

#[test]
fn two_slots_per_layer() {
    check(Some(2));
}

#[test]
fn four_slots_per_layer() {
    check(Some(4));
}

#[test]
fn eight_slots_per_layer() {
    check(Some(8));
}

#[test]
fn reads_one_after_another() {
    let model = odd_model();
    let container = model.container(default_class());
    let jobs = mixed(VOCABULARY);
    let tiers = TierOptions { cap: Some(3), pipeline: false, ..TierOptions::default() };
    let options = InProcessOptions { tiers, ..InProcessOptions::new(&container) };
    let found = InProcess::with_options(&options).run_together(&jobs);
    assert_same("without the pipeline", &found, &plainest(&container, &jobs));
}

#[test]
fn a_cache_that_shrinks_while_it_is_used() {
    let model = odd_model();
    let container = model.container(default_class());
    let jobs = mixed(VOCABULARY);
    let expected = plainest(&container, &jobs);
    let tiers = TierOptions { cap: Some(8), pilot_workers: 4, ..TierOptions::default() };
    let options = InProcessOptions { tiers, ..InProcessOptions::new(&container) };
    let engine = InProcess::with_options(&options);
    let ended = AtomicBool::new(false);
    let before = engine.tiers()[0].slots;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                engine.shrink(1);
                std::thread::yield_now();
            }
        });
        for _ in 0..3 {
            let found = engine.run_together(&jobs);
            assert_same("while the cache shrinks", &found, &expected);
        }
        ended.store(true, Ordering::Relaxed);
    });
    let after = engine.tiers()[0].slots;
    assert!(after < before, "{after} slots of {before} are left");
    assert_same("after it has shrunk", &engine.run_together(&jobs), &expected);
}

/// Worker processes whose settings differ from each other.
fn processes(container: &Path, of_worker: &[&[&str]]) -> ClusterOptions {
    let worker = |args: &&[&str]| WorkerOptions {
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        ..WorkerOptions::default()
    };
    ClusterOptions {
        workers: of_worker.iter().map(worker).collect(),
        ..ClusterOptions::new(container, 0)
    }
}

#[test]
fn worker_processes_with_tiers_of_their_own() {
    let model = odd_model();
    let container = model.container(default_class());
    let jobs = mixed(VOCABULARY);
    let expected = plainest(&container, &jobs);
    let clusters: [&[&[&str]]; 3] = [
        &[&["--cap", "2", "--pilot-workers", "8", "--io", "uring", "--profile"]],
        &[
            &["--cap", "1", "--policy", "lfru", "--evict-guard", "off"],
            &["--cap", "4", "--io", "buffered", "--pilot-workers", "0"],
        ],
        &[
            &["--cap", "1", "--io-threads", "1", "--profile"],
            &["--ram", "all"],
            &["--cap", "2", "--pipeline", "off"],
        ],
    ];
    for workers in clusters {
        let cluster = Cluster::start(&processes(&container, workers));
        let requests = jobs.iter().map(Job::request).collect();
        let found: Vec<_> =
            cluster.generate_together(requests).unwrap().into_iter().map(Into::into).collect();
        assert_same(&format!("workers with {workers:?}"), &found, &expected);
    }
}

#[test]
fn a_profile_changes_no_byte() {
    let model = odd_model();
    let container = model.container(default_class());
    let generate = |more: &[&str]| {
        let mut command = Command::new(shimmer_binary());
        let output = command.args(generate_args(&container, more)).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["profile"].is_object(), more.contains(&"--profile"));
        answer["logits_sha256"].as_str().unwrap().to_owned()
    };
    let expected = generate(&[]);
    for cap in ["1", "4", "13"] {
        for workers in ["1", "3"] {
            let conditions = ["--cap", cap, "--workers", workers];
            assert_eq!(generate(&conditions), expected, "{conditions:?}");
            let profiled = [&conditions[..], &["--profile"]].concat();
            assert_eq!(generate(&profiled), expected, "{profiled:?}");
        }
    }
}
