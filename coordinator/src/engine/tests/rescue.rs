//! Workers that die, stop, refuse or lie while somebody else can compute the same: every request ends well, with the bytes of
//! the undisturbed run.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use shimmer_kernels::{Isa, WeightFormat};
use shimmer_model::tiny::Preset;
use shimmer_proto::expert::v1::{ErrorCode, ExpertWork};

use crate::dispatch::{FaultCounts, FaultPolicy};
use crate::engine::EngineConfig;
use crate::sequence::{Generation, OutputRules, StopRules};
use crate::test_support::{Act, Outcome, TestWorkers, collect, config, kernels, start, tiny_model};

fn generation(id: &str, prompt: &[u32]) -> Generation {
    Generation {
        id: id.to_owned(),
        prompt: prompt.to_vec(),
        stop: StopRules { max_tokens: Some(6), ignore_eos: true, ..StopRules::default() },
        output: OutputRules { logits_digest: true, ..OutputRules::default() },
        ..Generation::default()
    }
}

/// What a run came to.
struct Ran {
    outcomes: [Outcome; 2],
    counts: FaultCounts,
    quarantined: Arc<Mutex<Vec<usize>>>,
}

/// Runs two generations together over scripted workers, with a share of audits.
fn run(
    workers: usize,
    audit_per_10k: u32,
    arrange: impl FnOnce(TestWorkers) -> TestWorkers,
    script: impl FnMut(usize, &ExpertWork) -> Act + Send + 'static,
) -> Ran {
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let kernels = kernels(Isa::Scalar).unwrap();
    let workers = arrange(TestWorkers::new(&tiny, kernels, &vec![1.0; workers])).script(script);
    let quarantined = workers.quarantined();
    let faults = FaultPolicy { audit_per_10k, ..FaultPolicy::default() };
    let handle = start(&tiny, workers, EngineConfig { faults, ..config(64, 64, 1) });
    let first = handle.submit(generation("a", &[1, 2, 3])).unwrap();
    let second = handle.submit(generation("b", &[9; 20])).unwrap();
    let outcomes = [collect(first), collect(second)];
    Ran { outcomes, counts: handle.stats().faults, quarantined }
}

fn undisturbed() -> [String; 2] {
    let ran = run(1, 0, |workers| workers, |_, _| Act::Answer);
    assert_eq!(ran.counts, FaultCounts::default());
    ran.outcomes.map(|outcome| outcome.sha256().to_owned())
}

impl Ran {
    /// Both generations ended with the bytes of an undisturbed run.
    fn same_bytes(self) -> FaultCounts {
        assert_eq!(self.outcomes.map(|outcome| outcome.sha256().to_owned()), undisturbed());
        self.counts
    }

    fn quarantined(&self) -> Vec<usize> {
        let mut workers = self.quarantined.lock().unwrap().clone();
        workers.dedup();
        workers
    }
}

/// One worker does something from a step and layer on.
fn victim(
    worker: usize,
    from: (u64, u32),
    act: impl Fn() -> Act + Send + 'static,
) -> impl FnMut(usize, &ExpertWork) -> Act + Send + 'static {
    move |of, work| {
        let fence = work.fence.unwrap();
        if of == worker && (fence.step, fence.layer) >= from { act() } else { Act::Answer }
    }
}

#[test]
fn a_worker_that_dies_is_replaced_within_the_layer() {
    for (step, layer) in [(1, 1), (1, 3), (3, 2), (4, 1)] {
        for workers in [2, 3] {
            let counts = run(workers, 0, |w| w.copied(2), victim(1, (step, layer), || Act::Die));
            assert!(counts.same_bytes().resent > 0, "step {step}, layer {layer}");
            let counts =
                run(workers, 0, |w| w.standing_in(), victim(1, (step, layer), || Act::Die));
            let counts = counts.same_bytes();
            assert!(counts.resent > 0 && counts.adopted > 0, "{counts:?}");
        }
    }
}

#[test]
fn all_workers_but_one_may_die() {
    let script = |worker, work: &ExpertWork| match (worker, work.fence.unwrap().step) {
        (1, 2..) | (2, 3..) | (3, 4..) => Act::Die,
        _ => Act::Answer,
    };
    run(4, 0, |workers| workers.standing_in(), script).same_bytes();
    run(4, 0, |workers| workers.copied(3).standing_in(), script).same_bytes();
}

#[test]
fn the_own_copy_is_the_last_resort() {
    let die = |_: usize, work: &ExpertWork| {
        if work.fence.unwrap().step >= 3 { Act::Die } else { Act::Answer }
    };
    let counts = run(2, 0, |workers| workers.with_own_copy(), die).same_bytes();
    assert!(counts.own_copies > 0 && counts.unavailable_rows == 0, "{counts:?}");
}

#[test]
fn silence_is_answered_by_others_and_avoided_afterwards() {
    for arrange in
        [(|workers: TestWorkers| workers.copied(2)) as fn(TestWorkers) -> TestWorkers, |workers| {
            workers.standing_in()
        }]
    {
        let counts = run(2, 0, arrange, victim(1, (2, 2), || Act::Silence)).same_bytes();
        // The first late layer; then it is suspect and not asked.
        assert_eq!((counts.hedged, counts.hedges_won), (1, 1), "{counts:?}");
    }
}

#[test]
fn refused_work_goes_to_others() {
    for code in [ErrorCode::Load, ErrorCode::NotOwned, ErrorCode::StaleFence, ErrorCode::Internal] {
        let script = victim(0, (2, 1), move || Act::Refuse(code, Vec::new()));
        assert!(run(2, 0, |workers| workers.copied(2), script).same_bytes().resent > 0);
    }
    let script = victim(0, (2, 1), || Act::Refuse(ErrorCode::Checksum, Vec::new()));
    assert!(run(3, 0, |workers| workers.copied(2), script).same_bytes().resent > 0);
}

#[test]
fn an_overflow_is_believed_when_a_second_worker_says_so() {
    let lies = victim(0, (2, 1), || Act::Refuse(ErrorCode::Overflow, vec![0]));
    let counts = run(2, 0, |workers| workers.copied(2), lies).same_bytes();
    assert!(counts.mismatches > 0, "{counts:?}");
    let all = |_: usize, work: &ExpertWork| {
        if work.fence.unwrap().step == 2 {
            Act::Refuse(ErrorCode::Overflow, vec![0])
        } else {
            Act::Answer
        }
    };
    let ran = run(2, 0, |workers| workers.copied(2), all);
    assert!(ran.outcomes.iter().any(|outcome| outcome.failed.is_some()));
}

#[test]
fn audits_of_honest_workers_change_nothing() {
    for (workers, copies) in [(2, 2), (3, 2), (3, 3)] {
        let counts = run(workers, 10_000, |w| w.copied(copies), |_, _| Act::Answer).same_bytes();
        assert!(counts.audits > 0 && counts.mismatches == 0, "{counts:?}");
    }
    let alone = run(1, 10_000, |workers| workers, |_, _| Act::Answer).same_bytes();
    assert!(alone.audits == 0 && alone.audits_skipped > 0, "{alone:?}");
    let some = run(2, 1_000, |workers| workers.copied(2), |_, _| Act::Answer).same_bytes();
    assert!(some.audits > 0 && some.audits < 40, "{some:?}");
}

#[test]
fn a_liar_is_found_by_a_third_opinion_and_taken_out() {
    for arrange in [
        (|workers: TestWorkers| workers.copied(2).standing_in()) as fn(TestWorkers) -> TestWorkers,
        |workers| workers.copied(2).with_own_copy(),
    ] {
        for liar in 0..3 {
            let ran = run(3, 10_000, arrange, victim(liar, (2, 2), || Act::Lie));
            assert_eq!(ran.quarantined(), [liar]);
            assert!(ran.same_bytes().mismatches > 0);
        }
    }
}

#[test]
fn without_a_third_opinion_nothing_wrong_is_combined() {
    let ran = run(2, 10_000, |workers| workers.copied(2), victim(1, (2, 2), || Act::Lie));
    for outcome in &ran.outcomes {
        let failed = format!("{:?}", outcome.failed);
        assert!(failed.contains("nobody could tell which is right"), "{failed}");
    }
    assert!(ran.quarantined().is_empty());
}

#[test]
fn a_liar_is_not_its_own_third_opinion_when_the_third_refuses() {
    let script = |worker, work: &ExpertWork| match (worker, work.fence.unwrap().step) {
        (1, 2..) => Act::Lie,
        (2, 2..) => Act::Refuse(ErrorCode::Internal, Vec::new()),
        _ => Act::Answer,
    };
    let ran = run(3, 10_000, |workers| workers.copied(2).standing_in(), script);
    assert!(ran.counts.mismatches > 0, "{:?}", ran.counts);
    assert!(ran.quarantined().is_empty(), "the honest one is taken for the liar");
}

#[test]
fn a_death_during_an_audit_loses_nothing() {
    for worker in 0..3 {
        run(3, 10_000, |w| w.copied(2).standing_in(), victim(worker, (2, 1), || Act::Die))
            .same_bytes();
        run(3, 10_000, |w| w.copied(2).standing_in(), victim(worker, (2, 1), || Act::Silence))
            .same_bytes();
    }
}

#[test]
fn when_nobody_is_left_the_rows_fail_by_the_deadline() {
    let ran = run(
        2,
        0,
        |workers| workers.copied(2),
        |_, work| {
            if work.fence.unwrap().step >= 2 { Act::Silence } else { Act::Answer }
        },
    );
    for outcome in &ran.outcomes {
        let failed = format!("{:?}", outcome.failed);
        assert!(failed.contains("no result of layer") || failed.contains("no serving"), "{failed}");
    }
    assert!(ran.counts.unavailable_rows > 0);
    assert!(FaultPolicy::default().unknown < Duration::from_secs(1), "far below the deadline");
}
