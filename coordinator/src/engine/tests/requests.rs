//! What a client gets: text, ends, limits, cancelling.

use std::sync::Arc;

use shimmer_kernels::{Isa, WeightFormat};
use shimmer_model::tiny::{Preset, TinyOptions};

use crate::engine::{
    Engine, EngineConfig, EngineHandle, EngineParts, Event, FinishReason, GenerationError,
    SubmitError,
};
use crate::sampler::Sampling;
use crate::sequence::{Generation, OutputRules, StopRules};
use crate::test_support::{
    Outcome, TestWorkers, collect, config, kernels, make, start, tiny_model,
};

fn engine(config: EngineConfig) -> EngineHandle {
    let tiny = tiny_model(Preset::Mixtral, WeightFormat::Q8G64, WeightFormat::Q8G64);
    start(&tiny, TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), &[1.0]), config)
}

fn greedy(id: &str, prompt: &[u32], max_tokens: u32) -> Generation {
    Generation {
        id: id.to_owned(),
        prompt: prompt.to_vec(),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        stop: StopRules { max_tokens: Some(max_tokens), ignore_eos: true, ..StopRules::default() },
        ..Generation::default()
    }
}

fn run(handle: &EngineHandle, generation: Generation) -> Outcome {
    collect(handle.submit(generation).unwrap())
}

fn reason(outcome: &Outcome) -> FinishReason {
    outcome.finished.as_ref().unwrap_or_else(|| panic!("{outcome:?}")).reason
}

#[test]
fn a_generation_ends_at_its_limit_or_at_the_context() {
    let handle = engine(config(64, 64, 1));
    let outcome = run(&handle, greedy("a", &[5, 6, 7], 10));
    assert_eq!(
        (reason(&outcome), outcome.tokens.len(), outcome.max_tokens),
        (FinishReason::Length, 10, Some(10))
    );
    let usage = outcome.finished.unwrap().usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, 10));

    let small = engine(EngineConfig { context_length: Some(20), ..config(64, 64, 1) });
    assert_eq!(small.model_info().context_length, 20);
    let outcome = run(&small, greedy("a", &[5; 15], 4096));
    assert_eq!(
        (reason(&outcome), outcome.tokens.len(), outcome.max_tokens),
        (FinishReason::Length, 5, Some(5))
    );
    assert_eq!(run(&small, greedy("b", &[5; 19], 4096)).tokens.len(), 1);
    let refused = small.submit(greedy("c", &[5; 20], 1)).unwrap_err();
    assert_eq!(
        refused,
        SubmitError::ContextExceeded { prompt: 20, context: 20, max_tokens: Some(1) }
    );
}

#[test]
fn stop_tokens_and_stop_strings_end_the_text_before_them() {
    let handle = engine(config(64, 64, 1));
    let free = run(&handle, greedy("free", &[5, 6, 7], 24));
    let at = free
        .tokens
        .iter()
        .enumerate()
        .position(|(at, token)| at > 2 && !free.tokens[..at].contains(token))
        .unwrap();
    let mut stopped = greedy("token", &[5, 6, 7], 24);
    stopped.stop.stop_token_ids = vec![free.tokens[at]];
    let stopped = run(&handle, stopped);
    assert_eq!((reason(&stopped), &stopped.tokens[..]), (FinishReason::Stop, &free.tokens[..=at]));
    assert_eq!(stopped.finished.unwrap().matched_stop, None);

    let chars: Vec<char> = free.text.chars().collect();
    let stop: String = chars[chars.len() / 2..chars.len() / 2 + 2].iter().collect();
    let mut matched = greedy("string", &[5, 6, 7], 24);
    matched.stop.stop_strings = vec!["never seen".to_owned(), stop.clone()];
    let matched = run(&handle, matched);
    assert_eq!(matched.text, free.text[..free.text.find(&stop).unwrap()]);
    assert_eq!(
        (reason(&matched), matched.finished.unwrap().matched_stop),
        (FinishReason::Stop, Some(stop))
    );
}

#[test]
fn log_probabilities_come_with_every_token() {
    let handle = engine(config(64, 64, 1));
    let output = OutputRules { logprobs: Some(3), ..OutputRules::default() };
    let outcome = run(&handle, Generation { output, ..greedy("a", &[5, 6, 7], 5) });
    assert_eq!(outcome.logprobs.len(), 5);
    for (token, logprobs) in outcome.tokens.iter().zip(&outcome.logprobs) {
        assert_eq!((logprobs.chosen.token_id, logprobs.top.len()), (*token, 3));
        assert_eq!(logprobs.top[0], logprobs.chosen, "greedy takes the best");
        assert!(logprobs.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
    }
}

#[test]
fn cancelling_ends_a_running_or_queued_generation() {
    let handle = engine(EngineConfig { max_running: 1, ..config(64, 64, 1) });
    let mut running = handle.submit(greedy("running", &[5; 30], 900)).unwrap();
    let queued = handle.submit(greedy("queued", &[5; 30], 900)).unwrap();
    assert!(matches!(running.blocking_recv(), Some(Event::Started { .. })));
    assert!(handle.cancel("queued"));
    let queued = collect(queued);
    assert_eq!((reason(&queued), queued.max_tokens), (FinishReason::Cancelled, None));
    assert!(handle.cancel("running"));
    let mut last = None;
    while let Some(event) = running.blocking_recv() {
        last = Some(event);
    }
    let Some(Event::Finished(finished)) = last else { panic!("{last:?}") };
    assert_eq!(finished.reason, FinishReason::Cancelled);
    assert!(finished.usage.completion_tokens < 900);
    // The place and the pages are free again.
    assert_eq!(run(&handle, greedy("next", &[5; 30], 3)).tokens.len(), 3);
    assert!(!handle.cancel("next"));
}

#[test]
fn a_client_that_goes_frees_its_place() {
    let handle = engine(EngineConfig { max_running: 1, ..config(64, 64, 1) });
    let mut stream = handle.submit(greedy("gone", &[5; 30], 900)).unwrap();
    assert!(matches!(stream.blocking_recv(), Some(Event::Started { .. })));
    drop(stream);
    assert_eq!(run(&handle, greedy("next", &[5; 30], 3)).tokens.len(), 3);
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_told_why() {
    let handle = engine(EngineConfig { max_unread_events: 5, ..config(64, 64, 1) });
    let slow = handle.submit(greedy("slow", &[5; 3], 900)).unwrap();
    let other = run(&handle, greedy("other", &[5; 3], 1));
    assert_eq!(other.tokens.len(), 1);
    while handle.cancel("no such id") || handle.submit(greedy("slow", &[5; 3], 1)).is_err() {
        std::thread::yield_now();
    }
    let slow = collect(slow);
    assert_eq!(slow.failed, Some(GenerationError::SlowConsumer { unread: 5 }));
}

#[test]
fn shutdown_ends_everything_with_a_reason() {
    let handle = engine(config(64, 64, 1));
    let stream = handle.submit(greedy("a", &[5; 3], 900)).unwrap();
    handle.shutdown();
    assert_eq!(collect(stream).failed, Some(GenerationError::ShuttingDown));
    let stats = handle.stats();
    assert_eq!((stats.failed, stats.requests.failed, stats.running), (1, 1, 0));
    assert_eq!(handle.submit(greedy("b", &[5; 3], 1)).unwrap_err(), SubmitError::ShuttingDown);
}

#[test]
fn a_model_without_routed_experts_needs_no_worker() {
    let config_json = serde_json::json!({ "first_k_dense_replace": 3 });
    let options =
        TinyOptions { config: config_json.as_object().unwrap().clone(), ..TinyOptions::default() };
    let tiny = make(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64, &options);
    let handle = start(
        &tiny,
        TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), &[]),
        config(64, 64, 1),
    );
    assert_eq!((handle.model_info().moe_layers, handle.model_info().experts), (0, 0));
    assert_eq!(run(&handle, greedy("a", &[5, 6], 4)).tokens.len(), 4);
}

#[test]
fn a_budget_without_a_page_is_refused() {
    let tiny = tiny_model(Preset::Mixtral, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let kernels = kernels(Isa::Scalar).unwrap();
    let parts = EngineParts {
        container: Arc::clone(&tiny.container),
        kernels,
        tokenizer: Arc::clone(&tiny.tokenizer),
        transport: Box::new(TestWorkers::new(&tiny, kernels, &[1.0])),
        config: EngineConfig { kv_budget_bytes: 100, ..config(64, 64, 1) },
        thread_start: None,
    };
    let error = Engine::start(parts).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "a KV budget of 100 bytes holds no page: 64 positions of this model take "
        ),
        "{error}"
    );
}

#[test]
fn requests_are_counted_with_their_times_and_their_ends() {
    let handle = engine(EngineConfig { max_running: 1, max_waiting: 1, ..config(64, 64, 1) });
    run(&handle, greedy("a", &[5, 6, 7], 10));
    let one = handle.stats().requests;
    assert_eq!((one.full, one.stopped, one.aborted, one.failed), (1, 0, 0, 0));
    assert_eq!((one.prompt_tokens, one.prompt.sum, one.answer.sum), (3, 3, 10));
    assert_eq!((one.first_token.count(), one.between_tokens.count()), (1, 9));
    for spread in [one.queue, one.prefill, one.decode, one.inference, one.whole, one.per_token] {
        assert_eq!(spread.count(), 1);
    }
    // A microsecond is lost in each rounding.
    let parts = one.queue.sum + one.prefill.sum + one.decode.sum;
    assert!(one.whole.sum.abs_diff(parts) <= 4, "{one:?}");
    assert!(one.first_token.sum <= one.whole.sum && one.between_tokens.sum <= one.decode.sum);

    // One that is cancelled in the queue had no place and no token; one that nobody reads ends the same way.
    let mut running = handle.submit(greedy("running", &[5; 30], 900)).unwrap();
    assert!(matches!(running.blocking_recv(), Some(Event::Started { .. })));
    let queued = handle.submit(greedy("queued", &[5; 30], 900)).unwrap();
    let full = handle.submit(greedy("third", &[5; 30], 900)).unwrap_err();
    assert_eq!(full, SubmitError::QueueFull { limit: 1 });
    handle.submit(greedy("empty", &[], 1)).unwrap_err();
    assert!(handle.cancel("queued"));
    collect(queued);
    drop(running);
    let last = run(&handle, greedy("last", &[5], 1));
    assert_eq!(reason(&last), FinishReason::Length);
    let stats = handle.stats();
    let since = stats.requests.since(&one);
    assert_eq!((since.full, since.aborted, since.failed), (1, 2, 0));
    assert_eq!((since.whole.count(), since.queue.count()), (3, 2));
    assert_eq!(since.per_token.count(), u64::from(since.answer.sum > 2), "one token has no pace");
    assert_eq!((stats.finished, stats.cancelled, stats.waiting_limit), (2, 2, 1));
    assert_eq!((stats.refused.queue_full, stats.refused.invalid), (1, 1));
}
