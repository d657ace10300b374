use super::*;
use crate::sequence::{OutputRules, StopRules};

fn handle(max_waiting: usize) -> (EngineHandle, Receiver<Command>) {
    let info = ModelInfo { vocab_size: 10, context_length: 8, ..ModelInfo::default() };
    EngineHandle::new(info, &EngineConfig { max_waiting, ..EngineConfig::default() })
}

fn generation(prompt: &[u32], stop: StopRules) -> Generation {
    Generation { id: "a".to_owned(), prompt: prompt.to_vec(), stop, ..Generation::default() }
}

/// Submits and compares the clamped limit or the error's text.
fn check(generation: Generation, expected: Result<u32, &str>) {
    let (handle, queue) = handle(4);
    let stream = handle.submit(generation).map_err(|error| error.to_string());
    let got = stream.as_ref().map_err(String::as_str).map(|_| match queue.try_recv().unwrap() {
        Command::Submit(accepted) => accepted.max_tokens,
        other => panic!("{other:?}"),
    });
    assert_eq!(got, expected);
}

#[test]
fn max_tokens_is_clamped_and_bad_fields_are_named() {
    let limit = |max_tokens| StopRules { max_tokens, ..StopRules::default() };
    check(generation(&[1; 3], limit(None)), Ok(5));
    check(generation(&[1; 3], limit(Some(4096))), Ok(5));
    check(generation(&[1; 3], limit(Some(2))), Ok(2));
    check(generation(&[1; 7], limit(Some(2))), Ok(1));
    check(
        generation(&[1; 8], limit(Some(2))),
        Err(
            "context length exceeded: the prompt has 8 tokens, the context 8, so nothing is left for 2 generated tokens",
        ),
    );
    check(generation(&[1], limit(Some(0))), Err("stop.max_tokens: 0 is below 1"));
    check(generation(&[], limit(None)), Err("input: the prompt has no tokens"));
    check(
        generation(&[1, 10], limit(None)),
        Err("input.token_ids[1]: 10 is not below the vocabulary's 10"),
    );
    let stop = StopRules { stop_strings: vec!["x".into(), String::new()], ..StopRules::default() };
    check(generation(&[1], stop), Err("stop.stop_strings[1]: is empty"));
    let stop = StopRules { stop_strings: vec!["x".into(); 17], ..StopRules::default() };
    check(generation(&[1], stop), Err("stop.stop_strings: 17 are more than 16"));
    let stop = StopRules { stop_token_ids: vec![10], ..StopRules::default() };
    check(
        generation(&[1], stop),
        Err("stop.stop_token_ids[0]: 10 is not below the vocabulary's 10"),
    );
    let output = OutputRules { logprobs: Some(21), ..OutputRules::default() };
    check(
        Generation { output, ..generation(&[1], limit(None)) },
        Err("output.logprobs: 21 is above 20"),
    );
}

#[test]
fn a_full_queue_and_a_used_id_are_refused_until_tickets_are_dropped() {
    let (handle, queue) = handle(1);
    let first = handle.submit(generation(&[1], StopRules::default())).unwrap();
    let full =
        handle.submit(Generation { id: "b".to_owned(), ..generation(&[1], StopRules::default()) });
    assert_eq!(full.unwrap_err(), SubmitError::QueueFull { limit: 1 });
    let Command::Submit(mut accepted) = queue.recv().unwrap() else { panic!("not a submission") };
    accepted.ticket.admitted();
    let same = handle.submit(generation(&[1], StopRules::default()));
    assert_eq!(same.unwrap_err(), SubmitError::DuplicateId { id: "a".to_owned() });
    assert!(handle.cancel("a"));
    assert!(!handle.cancel("b"));
    drop(accepted);
    assert!(!handle.cancel("a"));
    drop(first);
    handle.submit(generation(&[1], StopRules::default())).unwrap();
    drop(queue);
    let gone =
        handle.submit(Generation { id: "c".to_owned(), ..generation(&[1], StopRules::default()) });
    assert!(matches!(gone, Err(SubmitError::QueueFull { .. } | SubmitError::ShuttingDown)));
}
