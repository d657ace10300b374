use shimmer_kernels::WeightFormat;
use shimmer_model::tiny::Preset;

use super::*;
use crate::test_support::tiny_model;

const END: u32 = 257;

/// Feeds tokens by logits that have one clear winner; returns the text, the tokens taken, and the end.
fn feed(generation: Generation, max_tokens: u32, tokens: &[u32]) -> (String, usize, Option<Ended>) {
    let tiny = tiny_model(Preset::Mixtral, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let mut sequence =
        Sequence::new(generation, max_tokens, [END].into(), Arc::clone(&tiny.tokenizer));
    let mut text = String::new();
    for (index, token) in tokens.iter().enumerate() {
        let mut logits = vec![0.0; 269];
        logits[*token as usize] = 100.0;
        let sampled = sequence.sample(&logits).unwrap();
        let (event, ended) = sequence.push(sampled);
        let Event::Delta { text: piece, token_ids, .. } = event else { panic!("{event:?}") };
        assert_eq!(token_ids, [*token]);
        text.push_str(&piece);
        if ended.is_some() {
            return (text, index + 1, ended);
        }
    }
    (text, tokens.len(), None)
}

fn generation(stop: StopRules) -> Generation {
    Generation { prompt: vec![1], stop, ..Generation::default() }
}

/// Token ids of bytes: the tiny vocabulary begins with them.
fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn ends_and_what_they_leave_of_the_text() {
    let ended = |reason, matched: Option<&str>| {
        Some(Ended { reason, matched_stop: matched.map(str::to_owned) })
    };
    let stops =
        |stop: &str| StopRules { stop_strings: vec![stop.to_owned()], ..StopRules::default() };
    let check = |stop: StopRules, max, tokens: Vec<u32>, text: &str, count, end| {
        assert_eq!(feed(generation(stop), max, &tokens), (text.to_owned(), count, end));
    };
    let with_end = |text: &str| [bytes(text), vec![END]].concat();
    check(StopRules::default(), 9, bytes("abc"), "abc", 3, None);
    check(StopRules::default(), 3, bytes("abc"), "abc", 3, ended(FinishReason::Length, None));
    check(StopRules::default(), 9, with_end("ab"), "ab", 3, ended(FinishReason::Stop, None));
    // The end token and the limit at once: the model's own end is the better reason.
    check(StopRules::default(), 3, with_end("ab"), "ab", 3, ended(FinishReason::Stop, None));
    let through = StopRules { ignore_eos: true, ..StopRules::default() };
    check(through, 9, with_end("ab"), "ab", 3, None);
    let token = StopRules { stop_token_ids: vec![u32::from(b'b')], ..StopRules::default() };
    check(token, 9, bytes("abc"), "a", 2, ended(FinishReason::Stop, None));
    check(stops("bc"), 9, bytes("abcd"), "a", 3, ended(FinishReason::Stop, Some("bc")));
    // Held back for a stop string that never came: given out at the end.
    check(stops("bx"), 2, bytes("ab"), "ab", 2, ended(FinishReason::Length, None));
    check(stops("bx"), 9, with_end("ab"), "ab", 3, ended(FinishReason::Stop, None));
    // A character that stays incomplete becomes U+FFFD.
    check(
        StopRules::default(),
        2,
        bytes("a\u{e9}")[..2].to_vec(),
        "a\u{fffd}",
        2,
        ended(FinishReason::Length, None),
    );
}
