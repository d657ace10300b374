//! The bytes of a journal's file: one record that says what was accepted, then tokens, then perhaps the end. A sans-I/O
//! core: whatever the bytes are, reading them ends with what they say or with where they are wrong.
//!
//! ```text
//! record   := payload length u32 | version u8 | kind u8 | 0 u16 | XXH3-64 of these eight bytes and the payload | payload
//! accepted := texts (container digest, MATH_ID, request id) | prompt ids | sampling | stop rules | output rules
//! tokens   := place of the first one among the generated u32 | ids
//! finished := reason u8 | matched stop string? | generated tokens u32 | digest over the logits?
//! ```
//!
//! Everything is little-endian; a text, a list and an optional field carry their length or a 0 or 1 in front. The first record is
//! whole before the file gets its name, so a file without one is damaged. Appending may be cut short at any byte, so a last record
//! that is not whole was never written; but a record with others behind it that does not fit its checksum is damage.

use xxhash_rust::xxh3::Xxh3;

use super::payload::{Reader, Short, Writer};
use crate::engine::FinishReason;
use crate::sampler::Sampling;
use crate::sequence::{Generation, Known, OutputRules, StopRules};

/// Version of the records that this build writes and reads.
const VERSION: u8 = 1;
/// Length, version, kind, two zeros, checksum.
const HEADER_BYTES: usize = 16;

const ACCEPTED: u8 = 1;
const TOKENS: u8 = 2;
const FINISHED: u8 = 3;

/// What has to be known to generate the same tokens again, on whatever machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Accepted {
    /// The weights.
    pub container_digest: String,
    /// The arithmetic.
    pub math_id: String,
    /// The request, with the limit of tokens in force and without known ones.
    pub generation: Generation,
}

/// How a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Why.
    pub reason: FinishReason,
    /// The stop string that matched, when one did.
    pub matched_stop: Option<String>,
    /// All generated tokens, those that the journal may lack included.
    pub completion_tokens: u32,
    /// 64 hex digits, when asked for.
    pub logits_sha256: Option<String>,
}

/// One record.
#[expect(clippy::large_enum_variant, reason = "one at a time, while a file is read or written")]
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Record {
    Accepted(Accepted),
    Tokens { first: u32, ids: Vec<u32> },
    Finished(Ending),
}

/// Everything that a file says.
#[derive(Clone, Debug, PartialEq)]
pub struct Recovered {
    /// The request.
    pub accepted: Accepted,
    /// Its generated tokens, as far as they were written.
    pub tokens: Vec<u32>,
    /// How it ended, when it did.
    pub ending: Option<Ending>,
}

/// Where a file is not what was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at byte {offset}: {what}")]
pub struct Damage {
    /// Of the record.
    pub offset: usize,
    /// What is wrong.
    pub what: String,
}

/// The bytes of a record.
pub(super) fn encode(record: &Record) -> Vec<u8> {
    let mut payload = Writer::default();
    let kind = match record {
        Record::Accepted(accepted) => {
            put_accepted(&mut payload, accepted);
            ACCEPTED
        }
        Record::Tokens { first, ids } => {
            payload.u32(*first);
            payload.ids(ids);
            TOKENS
        }
        Record::Finished(ending) => {
            payload.u8(reason_code(ending.reason));
            payload.optional(ending.matched_stop.as_deref(), Writer::text);
            payload.u32(ending.completion_tokens);
            payload.optional(ending.logits_sha256.as_deref(), Writer::text);
            FINISHED
        }
    };
    let payload = payload.into_bytes();
    let length = u32::try_from(payload.len()).expect("a request is far below 4 GiB");
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.extend(length.to_le_bytes());
    bytes.extend([VERSION, kind, 0, 0]);
    bytes.extend(checksum(&bytes, &payload).to_le_bytes());
    bytes.extend(payload);
    bytes
}

/// The whole file of a request that has come so far.
pub(super) fn file(recovered: &Recovered) -> Vec<u8> {
    let mut bytes = encode(&Record::Accepted(recovered.accepted.clone()));
    if !recovered.tokens.is_empty() {
        bytes.extend(encode(&Record::Tokens { first: 0, ids: recovered.tokens.clone() }));
    }
    if let Some(ending) = &recovered.ending {
        bytes.extend(encode(&Record::Finished(ending.clone())));
    }
    bytes
}

/// What a file says.
///
/// # Errors
/// It is damaged.
pub(super) fn read(bytes: &[u8]) -> Result<Recovered, Damage> {
    let mut offset = 0;
    let mut recovered: Option<Recovered> = None;
    while offset < bytes.len() {
        let damage = |what: String| Damage { offset, what };
        let (record, length) = match next(&bytes[offset..]).map_err(damage)? {
            Some(found) => found,
            None => break,
        };
        recovered = Some(join(recovered, record).map_err(damage)?);
        offset += length;
    }
    recovered.ok_or_else(|| Damage { offset: 0, what: "the first record is not whole".to_owned() })
}

/// Adds a record to what the ones before it said.
fn join(so_far: Option<Recovered>, record: Record) -> Result<Recovered, String> {
    let Some(mut so_far) = so_far else {
        return match record {
            Record::Accepted(accepted) => {
                Ok(Recovered { accepted, tokens: Vec::new(), ending: None })
            }
            _ => Err("the first record does not say what was accepted".to_owned()),
        };
    };
    if so_far.ending.is_some() {
        return Err("a record stands behind the end".to_owned());
    }
    match record {
        Record::Accepted(_) => return Err("a second request".to_owned()),
        Record::Tokens { first, ids } => {
            if first as usize != so_far.tokens.len() {
                return Err(format!("token {first} follows {} tokens", so_far.tokens.len()));
            }
            so_far.tokens.extend(ids);
            let limit = so_far.accepted.generation.stop.max_tokens.unwrap_or(u32::MAX);
            if so_far.tokens.len() > limit as usize {
                return Err(format!("{} tokens of at most {limit}", so_far.tokens.len()));
            }
        }
        Record::Finished(ending) => {
            if so_far.tokens.len() > ending.completion_tokens as usize {
                return Err(format!(
                    "{} tokens of {} in all",
                    so_far.tokens.len(),
                    ending.completion_tokens
                ));
            }
            so_far.ending = Some(ending);
        }
    }
    Ok(so_far)
}

/// The record at the beginning of `bytes` and its length; none where the file was cut.
fn next(bytes: &[u8]) -> Result<Option<(Record, usize)>, String> {
    let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES) else { return Ok(None) };
    let length = u32::from_le_bytes(header[..4].try_into().expect("four bytes")) as usize;
    let Some(payload) = rest.get(..length) else { return Ok(None) };
    let expected = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
    if checksum(&header[..8], payload) != expected {
        // A host that lost its power may leave the length of the file without its last bytes.
        let last = rest.len() == length || bytes.iter().all(|&byte| byte == 0);
        return if last { Ok(None) } else { Err("the checksum does not fit".to_owned()) };
    }
    let (version, kind) = (header[4], header[5]);
    if version != VERSION {
        return Err(format!("version {version}; this build reads version {VERSION}"));
    }
    let record = decode(kind, payload)
        .map_err(|Short| format!("a record of kind {kind} that says nothing"))?;
    Ok(Some((record, HEADER_BYTES + length)))
}

fn decode(kind: u8, payload: &[u8]) -> Result<Record, Short> {
    let mut reader = Reader::new(payload);
    let record = match kind {
        ACCEPTED => Record::Accepted(get_accepted(&mut reader)?),
        TOKENS => Record::Tokens { first: reader.u32()?, ids: reader.ids()? },
        FINISHED => Record::Finished(Ending {
            reason: reason(reader.u8()?)?,
            matched_stop: reader.optional(Reader::text)?,
            completion_tokens: reader.u32()?,
            logits_sha256: reader.optional(Reader::text)?,
        }),
        _ => return Err(Short),
    };
    reader.end()?;
    Ok(record)
}

fn checksum(head: &[u8], payload: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(head);
    hash.update(payload);
    hash.digest()
}

fn put_accepted(out: &mut Writer, accepted: &Accepted) {
    let Accepted { container_digest, math_id, generation } = accepted;
    let Generation { id, prompt, sampling, stop, output, known: _ } = generation;
    for text in [container_digest, math_id, id] {
        out.text(text);
    }
    out.ids(prompt);
    let Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed,
        choice,
    } = sampling;
    for value in
        [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty]
    {
        out.f32(*value);
    }
    out.u32(*top_k);
    out.list(logit_bias, |out, &(token, bias)| {
        out.u32(token);
        out.f32(bias);
    });
    out.u64(*seed);
    out.u32(*choice);
    let StopRules { max_tokens, stop_strings, stop_token_ids, ignore_eos } = stop;
    out.optional(*max_tokens, Writer::u32);
    out.list(stop_strings, |out, text| out.text(text));
    out.ids(stop_token_ids);
    out.flag(*ignore_eos);
    let OutputRules { logprobs, logits_digest, skip_special_tokens } = output;
    out.optional(*logprobs, Writer::u32);
    out.flag(*logits_digest);
    out.flag(*skip_special_tokens);
}

fn get_accepted(from: &mut Reader<'_>) -> Result<Accepted, Short> {
    let (container_digest, math_id, id) = (from.text()?, from.text()?, from.text()?);
    let prompt = from.ids()?;
    let mut numbers = [0.0; 6];
    for number in &mut numbers {
        *number = from.f32()?;
    }
    let [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty] =
        numbers;
    let sampling = Sampling {
        temperature,
        top_k: from.u32()?,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias: from.list(|from| Ok((from.u32()?, from.f32()?)))?,
        seed: from.u64()?,
        choice: from.u32()?,
    };
    let stop = StopRules {
        max_tokens: from.optional(Reader::u32)?,
        stop_strings: from.list(Reader::text)?,
        stop_token_ids: from.ids()?,
        ignore_eos: from.flag()?,
    };
    let output = OutputRules {
        logprobs: from.optional(Reader::u32)?,
        logits_digest: from.flag()?,
        skip_special_tokens: from.flag()?,
    };
    let generation = Generation { id, prompt, sampling, stop, output, known: Known::Nothing };
    Ok(Accepted { container_digest, math_id, generation })
}

fn reason_code(reason: FinishReason) -> u8 {
    match reason {
        FinishReason::Stop => 1,
        FinishReason::Length => 2,
        FinishReason::Cancelled => 3,
    }
}

fn reason(code: u8) -> Result<FinishReason, Short> {
    match code {
        1 => Ok(FinishReason::Stop),
        2 => Ok(FinishReason::Length),
        3 => Ok(FinishReason::Cancelled),
        _ => Err(Short),
    }
}

#[cfg(test)]
mod tests;
