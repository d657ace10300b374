//! Requests as they come from the wire into the engine's types. Absent fields take the documented defaults; present ones
//! are taken as they are, zero included, and checked before any work is done for them.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use shimmer_proto::{identity::shown, v1};

use crate::engine::{MAX_LOGPROBS, MAX_STOP_STRINGS};
use crate::sampler::{InvalidParameter, Sampling};
use crate::sequence::{OutputRules, StopRules};

/// Longest request id, bytes.
pub(super) const MAX_REQUEST_ID_BYTES: usize = 128;
/// Longest stop string, bytes. The matcher holds back as much text.
pub(super) const MAX_STOP_STRING_BYTES: usize = 1024;
/// Most stop tokens of one request.
pub(super) const MAX_STOP_TOKENS: usize = 256;
/// Most tokens of one prompt, or of one text to be made of tokens: four times the longest context that is known.
pub(super) const MAX_TOKEN_IDS: usize = 4 << 20;
/// Longest text of one request, all messages of a chat together, bytes: what so many tokens are made of.
pub(super) const MAX_TEXT_BYTES: usize = 16 << 20;
/// Most messages of one chat.
pub(super) const MAX_CHAT_MESSAGES: usize = 4096;
/// Most tokens with a bias of their own.
pub(super) const MAX_LOGIT_BIASES: usize = 4096;
/// Roles of chat messages.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// The sampling parameters with their defaults; an absent seed is drawn.
pub(super) fn sampling(
    params: Option<v1::SamplingParams>,
    vocab_size: u32,
) -> Result<Sampling, InvalidParameter> {
    let params = params.unwrap_or_default();
    let default = Sampling::default();
    if params.logit_bias.len() > MAX_LOGIT_BIASES {
        let description = format!("{} tokens; at most {MAX_LOGIT_BIASES}", params.logit_bias.len());
        return Err(InvalidParameter::new("sampling.logit_bias", description));
    }
    // The order of a map is not part of the request: by token.
    let mut logit_bias: Vec<(u32, f32)> = params.logit_bias.into_iter().collect();
    logit_bias.sort_unstable_by_key(|&(token, _)| token);
    let sampling = Sampling {
        temperature: params.temperature.unwrap_or(default.temperature),
        top_k: params.top_k.unwrap_or(default.top_k),
        top_p: params.top_p.unwrap_or(default.top_p),
        min_p: params.min_p.unwrap_or(default.min_p),
        repetition_penalty: params.repetition_penalty.unwrap_or(default.repetition_penalty),
        presence_penalty: params.presence_penalty.unwrap_or(default.presence_penalty),
        frequency_penalty: params.frequency_penalty.unwrap_or(default.frequency_penalty),
        logit_bias,
        seed: params.seed.unwrap_or_else(draw),
        ..default
    };
    sampling.validate(vocab_size as usize)?;
    Ok(sampling)
}

/// When the generation ends.
pub(super) fn stop(
    params: Option<v1::StopParams>,
    vocab_size: u32,
) -> Result<StopRules, InvalidParameter> {
    let params = params.unwrap_or_default();
    let refuse = |field: &str, description: String| Err(InvalidParameter::new(field, description));
    if params.max_tokens == Some(0) {
        return refuse("stop.max_tokens", "0 is below 1".to_owned());
    }
    let strings = &params.stop_strings;
    if strings.len() > MAX_STOP_STRINGS {
        return refuse(
            "stop.stop_strings",
            format!("{} strings; at most {MAX_STOP_STRINGS}", strings.len()),
        );
    }
    for (index, string) in strings.iter().enumerate() {
        let field = format!("stop.stop_strings[{index}]");
        if string.is_empty() {
            return refuse(&field, "is empty; it would end every answer at once".to_owned());
        }
        if string.len() > MAX_STOP_STRING_BYTES {
            return refuse(
                &field,
                format!("{} bytes; at most {MAX_STOP_STRING_BYTES}", string.len()),
            );
        }
    }
    let ids = &params.stop_token_ids;
    if ids.len() > MAX_STOP_TOKENS {
        return refuse(
            "stop.stop_token_ids",
            format!("{} tokens; at most {MAX_STOP_TOKENS}", ids.len()),
        );
    }
    token_ids("stop.stop_token_ids", ids, vocab_size)?;
    Ok(StopRules {
        max_tokens: params.max_tokens,
        stop_strings: params.stop_strings,
        stop_token_ids: params.stop_token_ids,
        ignore_eos: params.ignore_eos.unwrap_or(false),
    })
}

/// What the events carry.
pub(super) fn output(params: Option<v1::OutputParams>) -> Result<OutputRules, InvalidParameter> {
    let params = params.unwrap_or_default();
    if let Some(count) = params.logprobs.filter(|&count| count > MAX_LOGPROBS) {
        return Err(InvalidParameter::new(
            "output.logprobs",
            format!("{count} is above {MAX_LOGPROBS}"),
        ));
    }
    Ok(OutputRules {
        logprobs: params.logprobs,
        logits_digest: params.logits_digest.unwrap_or(false),
        skip_special_tokens: params.skip_special_tokens.unwrap_or(true),
    })
}

/// The client's name for its request, or a new one.
pub(super) fn request_id(id: Option<String>) -> Result<String, InvalidParameter> {
    let Some(id) = id else { return Ok(format!("gen-{:016x}", draw())) };
    let refuse = |description: String| Err(InvalidParameter::new("request_id", description));
    if id.is_empty() || id.len() > MAX_REQUEST_ID_BYTES {
        return refuse(format!("{} bytes; 1 to {MAX_REQUEST_ID_BYTES} are allowed", id.len()));
    }
    if id.chars().any(char::is_control) {
        return refuse("has control characters, which would break logs".to_owned());
    }
    Ok(id)
}

/// Refuses text that takes minutes to tokenize and fits into no context.
pub(super) fn text(field: &str, bytes: usize) -> Result<(), InvalidParameter> {
    if bytes <= MAX_TEXT_BYTES {
        return Ok(());
    }
    Err(InvalidParameter::new(field, format!("{bytes} bytes; at most {MAX_TEXT_BYTES}")))
}

/// Refuses ids that the model has no row for, and more of them than any context takes.
pub(super) fn token_ids(field: &str, ids: &[u32], vocab_size: u32) -> Result<(), InvalidParameter> {
    if ids.len() > MAX_TOKEN_IDS {
        let description = format!("{} tokens; at most {MAX_TOKEN_IDS}", ids.len());
        return Err(InvalidParameter::new(field, description));
    }
    match ids.iter().position(|&id| id >= vocab_size) {
        None => Ok(()),
        Some(index) => {
            let description =
                format!("token {} is not below the vocabulary's {vocab_size}", ids[index]);
            Err(InvalidParameter::new(format!("{field}[{index}]"), description))
        }
    }
}

/// Refuses a chat that no template can render as it is meant.
pub(super) fn chat(chat: &v1::Chat) -> Result<(), InvalidParameter> {
    if chat.messages.is_empty() {
        return Err(InvalidParameter::new("chat.messages", "is empty"));
    }
    let count = chat.messages.len();
    if count > MAX_CHAT_MESSAGES {
        let description = format!("{count} messages; at most {MAX_CHAT_MESSAGES}");
        return Err(InvalidParameter::new("chat.messages", description));
    }
    text("chat.messages", chat.messages.iter().map(|message| message.content.len()).sum())?;
    for (index, message) in chat.messages.iter().enumerate() {
        if !ROLES.contains(&message.role.as_str()) {
            let description =
                format!("{:?} is not one of {}", shown(&message.role), ROLES.join(", "));
            return Err(InvalidParameter::new(format!("chat.messages[{index}].role"), description));
        }
    }
    Ok(())
}

/// A number that nobody can foresee: the keys of the standard library's hash maps come from the system.
pub(super) fn draw() -> u64 {
    RandomState::new().build_hasher().finish()
}
