//! Workers on hosts of their own: they work at the same time, and come and go while a stream runs.

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

/// Time from the first token to the last with so many workers behind slow lines.
fn decode_time(bench: &Bench, job: &Job, workers: usize) -> Result<Duration, String> {
    let mut plan = bench.plan(workers, 1);
    plan.workers.iter_mut().for_each(|worker| worker.wire = Some(2 * DELAY));
    let mut cluster = Deployment::start(&plan)?;
    let (timed, ()) = cluster.run(std::slice::from_ref(job), |_, _| ());
    assert!(timed[0].outcome.is_ok(), "{:?}", timed[0].outcome);
    // Behind the first two, which are the start and the prompt.
    Ok(timed[0].gaps[2..].iter().sum())
}

#[test]
fn hosts_work_at_the_same_time() {
    let bench = Bench::new();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let job = Job { prompt: vec![7, 77, 3], max_tokens: 24, sampling };
    let (one, three) = match (decode_time(&bench, &job, 1), decode_time(&bench, &job, 3)) {
        (Ok(one), Ok(three)) => (one, three),
        (Err(reason), _) | (_, Err(reason)) => return println!("skipped: several hosts: {reason}"),
    };
    println!("{one:.1?} with one worker behind a slow line, {three:.1?} with three");
    assert!(three < one * 3 / 2, "{three:?} with three workers, {one:?} with one");
}
