//! A fault ends the requests that it touches, changes no byte of the others, and the engine lives on.

use std::time::{Duration, Instant};

use shimmer_kernels::{Isa, WeightFormat};
use shimmer_model::tiny::Preset;
use shimmer_proto::expert::v1::{ErrorCode, ExpertWork};

use crate::engine::GenerationError;
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

/// Runs two generations together over scripted workers.
fn run(
    weights: &[f64],
    script: impl FnMut(usize, &ExpertWork) -> Act + Send + 'static,
) -> [Outcome; 2] {
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let workers = TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), weights).script(script);
    let handle = start(&tiny, workers, config(64, 64, 1));
    let first = handle.submit(generation("a", &[1, 2, 3])).unwrap();
    let second = handle.submit(generation("b", &[9; 20])).unwrap();
    [collect(first), collect(second)]
}

fn undisturbed() -> [String; 2] {
    run(&[1.0], |_, _| Act::Answer).map(|outcome| outcome.sha256().to_owned())
}

/// Both generations end well with the bytes of an undisturbed run.
fn check_harmless(script: impl FnMut(usize, &ExpertWork) -> Act + Send + 'static) {
    let outcomes = run(&[1.0, 1.0], script);
    assert_eq!(outcomes.map(|outcome| outcome.sha256().to_owned()), undisturbed());
}

#[test]
fn single_outputs_give_the_same_bytes_as_sums() {
    check_harmless(|_, _| Act::AnswerOutputs);
}

#[test]
fn stale_replies_never_enter_a_sum() {
    let mut calls = 0;
    check_harmless(move |_, _| {
        calls += 1;
        if calls % 3 == 1 { Act::Stale } else { Act::Answer }
    });
}

#[test]
fn a_damaged_frame_is_sent_again() {
    check_harmless(|_, work| match work.fence.unwrap().attempt {
        0 | 1 => Act::Refuse(ErrorCode::Checksum, Vec::new()),
        _ => Act::Answer,
    });
}

#[test]
fn an_overflow_fails_only_the_sequence_of_its_row() {
    // In the first step both prompts share the message; sequence a has rows 0 to 2.
    let mut done = false;
    let outcomes = run(&[1.0], move |_, work| {
        let shared = work.row_count == 23 && work.fence.unwrap().layer == 2;
        if shared && !std::mem::replace(&mut done, true) {
            Act::Refuse(ErrorCode::Overflow, vec![1])
        } else {
            Act::Answer
        }
    });
    let [a, b] = outcomes;
    if let Some(failed) = a.failed {
        let expected = GenerationError::Arithmetic {
            what: "Overflow by the test".to_owned(),
            layer: Some(2),
            position: 1,
        };
        assert_eq!(failed, expected);
    } else {
        // The prompts were admitted in different steps, so the message was never shared.
        assert_eq!(a.sha256(), undisturbed()[0]);
    }
    assert_eq!(b.sha256(), undisturbed()[1]);
}

#[test]
fn a_refusal_ends_its_rows_with_the_workers_reason() {
    let [a, b] = run(&[1.0], |_, _| Act::Refuse(ErrorCode::NotOwned, Vec::new()));
    for outcome in [a, b] {
        let detail = "worker w0: NotOwned by the test".to_owned();
        assert_eq!(outcome.failed, Some(GenerationError::Unavailable { detail }));
    }
}

#[test]
fn damage_without_end_is_given_up() {
    let [a, _] = run(&[1.0], |_, _| Act::Refuse(ErrorCode::Checksum, Vec::new()));
    assert!(matches!(a.failed, Some(GenerationError::Unavailable { .. })), "{a:?}");
}

#[test]
fn a_silent_worker_ends_its_requests_at_the_deadline() {
    let [a, b] = run(&[1.0, 1.0], |worker, _| if worker == 1 { Act::Silence } else { Act::Answer });
    for outcome in [a, b] {
        let Some(GenerationError::Unavailable { detail }) = outcome.failed else {
            panic!("{outcome:?}")
        };
        assert!(
            detail.starts_with("worker w1: no result of layer")
                || detail.contains("no serving worker"),
            "{detail}"
        );
    }
}

#[test]
fn a_lost_worker_ends_requests_and_later_ones_are_refused_at_once() {
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let workers = TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), &[1.0, 1.0]);
    let workers = workers.script(|worker, work| {
        if worker == 1 && work.fence.unwrap().step == 3 { Act::Die } else { Act::Answer }
    });
    let handle = start(&tiny, workers, config(64, 64, 1));
    let first = collect(handle.submit(generation("a", &[1, 2, 3])).unwrap());
    assert!(!first.tokens.is_empty() && first.tokens.len() < 6, "{first:?}");
    let Some(GenerationError::Unavailable { detail }) = first.failed else { panic!("{first:?}") };
    assert_eq!(detail, "worker w1: killed by the test");
    let second = collect(handle.submit(generation("b", &[1, 2, 3])).unwrap());
    assert_eq!(second.max_tokens, None, "never started");
    let Some(GenerationError::Unavailable { detail }) = second.failed else { panic!("{second:?}") };
    assert!(detail.contains("has no serving worker"), "{detail}");
    assert!(handle.score(&[1, 2]).is_err());
}

#[test]
fn the_end_of_the_step_thread_is_seen() {
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let workers = TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), &[1.0])
        .script(|_, _| panic!("by the test"));
    let handle = start(&tiny, workers, config(64, 64, 1));
    assert!(!handle.has_ended());
    let stream = handle.submit(generation("a", &[1, 2, 3])).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !handle.has_ended() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(handle.has_ended());
    drop(stream);
    handle.shutdown();
    assert!(!handle.has_ended(), "a shutdown is no fault");
}
