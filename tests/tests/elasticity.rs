//! Workers that come and go while a stream runs, on hosts of their own.

use std::time::{Duration, Instant};

use shimmer_coordinator::sampler::Sampling;
use shimmer_tests::{
    in_process::InProcess,
    lab::{cell::Bench, deployment::Deployment},
    wait::{wait_for, wait_until},
    workload::Job,
};

/// From the start of a worker's process to its first result.
const TAKES_LOAD_WITHIN: Duration = Duration::from_secs(10);
/// From the signal to the end of a worker that hands over.
const LEAVES_WITHIN: Duration = Duration::from_secs(15);
/// For a stream to be under way.
const SOON: Duration = Duration::from_secs(60);
/// One way, before every worker: a stream of 300 tokens then takes as long as one of a large model.
const DELAY: Duration = Duration::from_millis(5);

#[test]
fn a_worker_joins_takes_load_and_leaves_during_a_stream_of_300_tokens() {
    let bench = Bench::new();
    let job = Job {
        prompt: vec![7, 77, 3],
        max_tokens: 300,
        sampling: Sampling { temperature: 0.8, seed: 5, ..Sampling::default() },
    };
    let expected = InProcess::start(bench.container()).run(&job);
    let mut plan = bench.plan(2, 1);
    plan.workers.iter_mut().for_each(|worker| worker.wire = Some(DELAY));
    let newcomer = 1;
    plan.workers[newcomer].late = true;
    let mut cluster = match Deployment::start(&plan) {
        Ok(cluster) => cluster,
        Err(reason) => return println!("skipped: several hosts: {reason}"),
    };
    let (timed, (joined, left)) = cluster.run(&[job], |cluster, progress| {
        wait_until("the stream to be under way", SOON, || progress.least() >= 20);
        let begun = Instant::now();
        cluster.launch_worker(newcomer);
        let works =
            |cluster: &mut Deployment| cluster.figures(newcomer)["counters"]["work_done"].as_u64();
        wait_until("the new worker to take load", TAKES_LOAD_WITHIN, || works(cluster) > Some(0));
        let joined = begun.elapsed();
        assert_eq!(progress.ended(), 0, "the stream was over before the worker took load");

        let begun = Instant::now();
        cluster.workers()[newcomer].process().signal("TERM");
        let status =
            wait_for("the worker to hand over and end", LEAVES_WITHIN, || cluster.ended(newcomer));
        assert!(status.success(), "the worker ended with {status}");
        let left = begun.elapsed();
        assert_eq!(progress.ended(), 0, "the stream was over before the worker had left");
        (joined, left)
    });
    println!("takes load after {joined:.1?}, has handed over after {left:.1?}");
    assert_eq!(timed[0].outcome.as_ref().map_err(ToString::to_string), Ok(&expected));
}
