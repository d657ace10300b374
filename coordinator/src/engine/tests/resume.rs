//! A generation that goes on from tokens of an earlier run gives the rest of the same events, wherever it was cut.

use shimmer_kernels::{Isa, WeightFormat};
use shimmer_model::tiny::Preset;

use crate::engine::{EngineHandle, Event, FinishReason, GenerationError, SubmitError, Timings};
use crate::sampler::Sampling;
use crate::sequence::{Generation, Known, OutputRules, StopRules};
use crate::test_support::{TestWorkers, config, kernels, start, tiny_model};

fn engine(rows: usize, chunk: usize) -> EngineHandle {
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    start(
        &tiny,
        TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), &[1.0, 1.0]),
        config(rows, chunk, 1),
    )
}

/// Every event of a generation, without the times, which are nobody's promise.
fn events(handle: &EngineHandle, generation: Generation) -> Vec<Event> {
    let mut stream = handle.submit(generation).unwrap();
    let mut events = Vec::new();
    while let Some(mut event) = stream.blocking_recv() {
        if let Event::Finished(finished) = &mut event {
            finished.timings = Timings::default();
        }
        events.push(event);
    }
    events
}

fn tokens(events: &[Event]) -> Vec<u32> {
    let of = |event: &Event| match event {
        Event::Delta { token_ids, .. } => token_ids.clone(),
        _ => Vec::new(),
    };
    events.iter().flat_map(of).collect()
}

fn text(events: &[Event]) -> String {
    let of = |event: &Event| match event {
        Event::Delta { text, .. } => text.clone(),
        _ => String::new(),
    };
    events.iter().map(of).collect()
}

fn finish(events: &[Event]) -> (FinishReason, Option<String>) {
    let Some(Event::Finished(finished)) = events.last() else { panic!("{events:?}") };
    (finished.reason, finished.matched_stop.clone())
}

/// A generation over a few tokens that make and cut characters of two and three bytes.
fn generation(max_tokens: u32) -> Generation {
    let likely = [u32::from(b'a'), u32::from(b'b'), 0xC3, 0xA9, 0xE4, 0xBD, 0xA0];
    Generation {
        id: "resumed".to_owned(),
        prompt: vec![5, 6, 7, 8, 9],
        sampling: Sampling {
            seed: 41,
            logit_bias: likely.iter().map(|&token| (token, 60.0)).collect(),
            ..Sampling::default()
        },
        stop: StopRules { max_tokens: Some(max_tokens), ignore_eos: true, ..StopRules::default() },
        ..Generation::default()
    }
}

/// Cuts a generation after every token; what follows, and what comes out again, are the events of the run without a cut.
fn check(generation: &Generation) -> Vec<Event> {
    let whole = events(&engine(64, 64), generation.clone());
    let tokens = tokens(&whole);
    assert!(tokens.len() > 8, "{whole:?}");
    // Another engine, whose steps are cut otherwise.
    let handle = engine(8, 3);
    let logits = generation.output.logprobs.is_some() || generation.output.logits_digest;
    for at in 0..=tokens.len() {
        let known = tokens[..at].to_vec();
        let again = Generation { known: Known::Again(known.clone()), ..generation.clone() };
        assert_eq!(events(&handle, again), whole, "again, cut at {at}");
        if !logits {
            let taken = Generation { known: Known::Taken(known), ..generation.clone() };
            let rest = events(&handle, taken);
            assert_eq!((&rest[0], &rest[1..]), (&whole[0], &whole[1 + at..]), "taken, cut at {at}");
        }
    }
    whole
}

#[test]
fn characters_that_are_split_over_tokens_stay_whole_at_every_cut() {
    let handle = engine(64, 64);
    let seeded = |seed| {
        let mut generation = generation(24);
        generation.sampling.seed = seed;
        generation
    };
    // Some seed draws the bytes of a whole character one after the other.
    let split = (0..64)
        .map(seeded)
        .find(|generation| {
            text(&events(&handle, generation.clone())).contains(['\u{e9}', '\u{4f60}'])
        })
        .unwrap();
    let whole = check(&split);
    let silent = |event: &Event| matches!(event, Event::Delta { text, .. } if text.is_empty());
    assert!(whole.iter().any(silent), "some token is the first byte of a character");
}

#[test]
fn stop_strings_are_matched_over_every_cut() {
    let free = events(&engine(64, 64), generation(24));
    let chars: Vec<char> = text(&free).chars().collect();
    let stop: String = chars[6..9].iter().collect();
    let mut stopped = generation(24);
    stopped.stop.stop_strings = vec!["aaaaaaaa".to_owned(), stop.clone()];
    let whole = check(&stopped);
    assert_eq!(finish(&whole), (FinishReason::Stop, Some(stop)));
    // Held back over the end: a stop string that began and never came.
    let mut held = generation(12);
    held.stop.stop_strings = vec![format!("{}\u{1}", text(&check(&generation(12))))];
    assert_eq!(finish(&check(&held)), (FinishReason::Length, None));
}

#[test]
fn penalties_and_seeds_continue_where_they_were() {
    for seed in [0, 7, u64::MAX] {
        let mut penalised = generation(20);
        penalised.sampling = Sampling {
            temperature: 1.3,
            top_k: 40,
            top_p: 0.95,
            repetition_penalty: 1.2,
            presence_penalty: 0.5,
            frequency_penalty: 0.7,
            seed,
            ..Sampling::default()
        };
        check(&penalised);
    }
}

#[test]
fn log_probabilities_and_digests_come_out_again() {
    let mut asked = generation(12);
    asked.output = OutputRules { logprobs: Some(2), logits_digest: true, ..OutputRules::default() };
    let whole = check(&asked);
    let Some(Event::Finished(finished)) = whole.last() else { panic!("{whole:?}") };
    assert_eq!(finished.logits_sha256.as_ref().map(String::len), Some(64));
}

#[test]
fn a_token_that_does_not_come_out_again_is_an_error() {
    let handle = engine(64, 64);
    let whole = events(&handle, generation(10));
    let mut known = tokens(&whole);
    let (earlier, now) = (known[4] + 1, known[4]);
    known[4] = earlier;
    let again = Generation { known: Known::Again(known), ..generation(10) };
    let seen = events(&handle, again);
    assert_eq!(seen[..5], whole[..5], "what is right so far");
    assert_eq!(seen[5..], [Event::Failed(GenerationError::Diverged { index: 4, earlier, now })]);
}

#[test]
fn known_tokens_are_checked_like_any_input() {
    let handle = engine(64, 64);
    let refused = |known: Vec<u32>| {
        let generation = Generation { known: Known::Taken(known), ..generation(4) };
        match handle.submit(generation).unwrap_err() {
            SubmitError::Invalid(error) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let vocab = handle.model_info().vocab_size;
    let text = format!("known[1]: {vocab} is not below the vocabulary's {vocab}");
    assert_eq!(refused(vec![1, vocab]), text);
    assert_eq!(refused(vec![1; 5]), "known: 5 tokens are above the limit of 4");
}

#[test]
fn whoever_resumes_displaces_the_first_stream() {
    let handle = engine(64, 64);
    let mut first = handle.submit(generation(900)).unwrap();
    assert!(matches!(first.blocking_recv(), Some(Event::Started { .. })));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(handle.displace("resumed"));
    // The id is free as soon as the call returns.
    let second = events(&handle, generation(3));
    assert_eq!(tokens(&second).len(), 3);
    let mut last = None;
    while let Some(event) = first.blocking_recv() {
        last = Some(event);
    }
    assert_eq!(last, Some(Event::Failed(GenerationError::Displaced)));
    runtime.block_on(handle.displace("never there"));
    handle.shutdown();
    runtime.block_on(handle.displace("nobody answers"));
}
