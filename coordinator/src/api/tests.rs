use std::collections::HashMap;

use shimmer_proto::v1;

use super::validate;
use crate::sampler::InvalidParameter;

const VOCAB: u32 = 269;

/// Compares the refused field; an empty name means accepted.
fn check<T>(result: Result<T, InvalidParameter>, refused: &str) {
    let field = result.err().map_or(String::new(), |error| error.field);
    assert_eq!(field, refused);
}

fn check_sampling(change: impl FnOnce(&mut v1::SamplingParams), refused: &str) {
    let mut params = v1::SamplingParams::default();
    change(&mut params);
    check(validate::sampling(Some(params), VOCAB), refused);
}

#[test]
fn zero_is_a_value_and_every_range_is_kept() {
    check(validate::sampling(None, VOCAB), "");
    check_sampling(|p| p.temperature = Some(0.0), "");
    check_sampling(|p| p.temperature = Some(100.5), "sampling.temperature");
    check_sampling(|p| p.temperature = Some(f32::NAN), "sampling.temperature");
    check_sampling(|p| p.top_k = Some(u32::MAX), "");
    check_sampling(|p| p.top_p = Some(0.0), "sampling.top_p");
    check_sampling(|p| p.top_p = Some(f32::NAN), "sampling.top_p");
    check_sampling(|p| p.min_p = Some(0.0), "");
    check_sampling(|p| p.min_p = Some(1.5), "sampling.min_p");
    check_sampling(|p| p.repetition_penalty = Some(0.0), "sampling.repetition_penalty");
    check_sampling(|p| p.presence_penalty = Some(f32::NEG_INFINITY), "sampling.presence_penalty");
    check_sampling(|p| p.frequency_penalty = Some(-2.5), "sampling.frequency_penalty");
    check_sampling(|p| p.logit_bias = HashMap::from([(268, -100.0)]), "");
    check_sampling(|p| p.logit_bias = HashMap::from([(269, 0.0)]), "sampling.logit_bias[269]");
    check_sampling(|p| p.logit_bias = HashMap::from([(1, 100.5)]), "sampling.logit_bias[1]");
    check_sampling(|p| p.logit_bias = HashMap::from([(1, f32::NAN)]), "sampling.logit_bias[1]");
}

#[test]
fn absent_fields_take_the_documented_defaults() {
    let sampling = validate::sampling(None, VOCAB).unwrap();
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (1.0, 0, 1.0));
    let zero = v1::SamplingParams {
        temperature: Some(0.0),
        seed: Some(0),
        ..v1::SamplingParams::default()
    };
    let sampling = validate::sampling(Some(zero), VOCAB).unwrap();
    assert_eq!((sampling.temperature, sampling.seed), (0.0, 0));
}

#[test]
fn drawn_seeds_differ() {
    let seed = || validate::sampling(None, VOCAB).unwrap().seed;
    assert_ne!(seed(), seed());
}

#[test]
fn logit_bias_is_sorted() {
    let bias = HashMap::from([(9, 1.0), (3, 2.0), (5, 3.0)]);
    let params = v1::SamplingParams { logit_bias: bias, ..v1::SamplingParams::default() };
    assert_eq!(
        validate::sampling(Some(params), VOCAB).unwrap().logit_bias,
        [(3, 2.0), (5, 3.0), (9, 1.0)]
    );
}

fn check_stop(change: impl FnOnce(&mut v1::StopParams), refused: &str) {
    let mut params = v1::StopParams::default();
    change(&mut params);
    check(validate::stop(Some(params), VOCAB), refused);
}

#[test]
fn stop_rules_have_limits() {
    check_stop(|_| {}, "");
    check_stop(|p| p.max_tokens = Some(0), "stop.max_tokens");
    check_stop(|p| p.max_tokens = Some(u32::MAX), "");
    check_stop(|p| p.stop_strings = vec!["x".to_owned(); 16], "");
    check_stop(|p| p.stop_strings = vec!["x".to_owned(); 17], "stop.stop_strings");
    check_stop(|p| p.stop_strings = vec!["x".to_owned(), String::new()], "stop.stop_strings[1]");
    check_stop(|p| p.stop_strings = vec!["x".repeat(1025)], "stop.stop_strings[0]");
    check_stop(|p| p.stop_token_ids = vec![0, 268], "");
    check_stop(|p| p.stop_token_ids = vec![0, 269], "stop.stop_token_ids[1]");
    check_stop(|p| p.stop_token_ids = vec![0; 257], "stop.stop_token_ids");
}

#[test]
fn output_and_request_id_have_limits() {
    let output = |count| {
        validate::output(Some(v1::OutputParams { logprobs: Some(count), ..Default::default() }))
    };
    check(output(0), "");
    check(output(20), "");
    check(output(21), "output.logprobs");
    check(validate::request_id(Some("a".repeat(128))), "");
    check(validate::request_id(Some("a".repeat(129))), "request_id");
    check(validate::request_id(Some(String::new())), "request_id");
    check(validate::request_id(Some("a\nb".to_owned())), "request_id");
    assert_ne!(validate::request_id(None).unwrap(), validate::request_id(None).unwrap());
}

fn check_chat(roles: &[&str], refused: &str) {
    let message =
        |role: &&str| v1::ChatMessage { role: (*role).to_owned(), content: "x".to_owned() };
    let chat =
        v1::Chat { messages: roles.iter().map(message).collect(), add_generation_prompt: None };
    check(validate::chat(&chat), refused);
}

#[test]
fn chats_have_messages_of_known_roles() {
    check_chat(&["system", "user", "assistant", "tool", "user"], "");
    check_chat(&[], "chat.messages");
    check_chat(&["user", "User"], "chat.messages[1].role");
}

#[test]
fn every_count_of_a_request_has_a_limit() {
    use validate::{MAX_CHAT_MESSAGES, MAX_LOGIT_BIASES, MAX_TEXT_BYTES, MAX_TOKEN_IDS};
    let biases = |count: usize| (0..).take(count).map(|token| (token, 0.0)).collect();
    let biased = |count: usize| {
        let params =
            v1::SamplingParams { logit_bias: biases(count), ..v1::SamplingParams::default() };
        validate::sampling(Some(params), u32::MAX)
    };
    check(biased(MAX_LOGIT_BIASES), "");
    check(biased(MAX_LOGIT_BIASES + 1), "sampling.logit_bias");
    check_chat(&vec!["user"; MAX_CHAT_MESSAGES], "");
    check_chat(&vec!["user"; MAX_CHAT_MESSAGES + 1], "chat.messages");
    check(validate::text("text", MAX_TEXT_BYTES), "");
    check(validate::text("text", MAX_TEXT_BYTES + 1), "text");
    let half = "x".repeat(MAX_TEXT_BYTES / 2 + 1);
    let message =
        |content: &str| v1::ChatMessage { role: "user".to_owned(), content: content.to_owned() };
    let chat =
        v1::Chat { messages: vec![message(&half), message(&half)], add_generation_prompt: None };
    check(validate::chat(&chat), "chat.messages");
    let ids = vec![0; MAX_TOKEN_IDS + 1];
    check(validate::token_ids("token_ids.ids", &ids[1..], VOCAB), "");
    check(validate::token_ids("token_ids.ids", &ids, VOCAB), "token_ids.ids");
}

#[test]
fn a_refusal_does_not_repeat_megabytes() {
    let role = "r".repeat(1 << 20);
    let message = v1::ChatMessage { role, content: String::new() };
    let chat = v1::Chat { messages: vec![message], add_generation_prompt: None };
    let error = validate::chat(&chat).unwrap_err();
    assert!(error.to_string().len() < 4096, "{} bytes", error.to_string().len());
}
