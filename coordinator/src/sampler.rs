//! Choice of the next token from logits: a pure function of logits, history, parameters, seed and position.
//!
//! The order of operations, which is part of the product's contract:
//!
//! 1. `logit_bias` is added.
//! 2. Repetition penalty on every token of prompt and output: a positive logit is divided by it, another multiplied.
//!    Then `presence_penalty` is subtracted once and `frequency_penalty` once per occurrence, for generated tokens.
//! 3. `temperature` 0: the largest logit wins, ties go to the lowest id, and nothing below happens.
//! 4. `p = exp((logit - largest) / temperature)`, from the canonical exponential, widened to f64.
//! 5. `top_k` keeps the k largest logits, ties by the lower id. With `top_k` 1 the greedy token is left.
//! 6. `top_p` keeps the shortest run of what is left, most likely first, that holds that share of its probability.
//! 7. `min_p` drops what is less likely than that share of the most likely token.
//! 8. One random number, a function of (seed, choice, position) alone, picks from the rest in ascending order of id.
//!
//! Candidates are ranked by (logit descending, id ascending). This is the order of (probability descending, id ascending)
//! except where two logits round to one probability; there the finer order keeps `top_k` 1 equal to greedy.

mod history;
mod logprobs;
mod params;

use shimmer_kernels::{math, philox};

pub use history::History;
pub use logprobs::{LogProbabilities, log_probabilities};
pub use params::{InvalidParameter, Sampling};

/// Why no token could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplerError {
    /// A NaN or an infinity; it never becomes a token.
    #[error("the logit of token {token} is not finite")]
    NonFinite {
        /// The first such token.
        token: u32,
    },
    /// Bias or penalties pushed a finite logit out of the range of f32.
    #[error("bias and penalties make the logit of token {token} infinite")]
    Penalised {
        /// The first such token.
        token: u32,
    },
}

/// Buffers of one vocabulary's size, reused from token to token.
#[derive(Debug, Default)]
pub struct SamplerScratch {
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: u32,
    logit: f32,
    probability: f64,
}

/// Chooses the token at absolute position `position` of a sequence.
pub fn choose(
    sampling: &Sampling,
    history: &History,
    logits: &[f32],
    position: u32,
    scratch: &mut SamplerScratch,
) -> Result<u32, SamplerError> {
    check_finite(logits)?;
    let adjusted = adjust(sampling, history, logits, &mut scratch.logits)?;
    let best = argmax(adjusted);
    if sampling.temperature == 0.0 || sampling.top_k == 1 {
        return Ok(best);
    }
    let largest = adjusted[best as usize];
    let candidates = &mut scratch.candidates;
    candidates.clear();
    candidates.extend((0_u32..).zip(adjusted).map(|(token, &logit)| {
        let probability = f64::from(math::exp((logit - largest) / sampling.temperature));
        Candidate { token, logit, probability }
    }));
    cut(sampling, candidates);
    Ok(draw(candidates, random(sampling, position)))
}

/// Refuses logits that are not all finite.
pub fn check_finite(logits: &[f32]) -> Result<(), SamplerError> {
    first_non_finite(logits).map_or(Ok(()), |token| Err(SamplerError::NonFinite { token }))
}

fn first_non_finite(logits: &[f32]) -> Option<u32> {
    // Without a branch per element the common, clean case is one pass at the speed of memory.
    if logits.iter().fold(true, |finite, logit| finite & logit.is_finite()) {
        return None;
    }
    (0_u32..).zip(logits).find(|(_, logit)| !logit.is_finite()).map(|(token, _)| token)
}

/// Steps 1 and 2. Without any of them the logits are used where they are.
fn adjust<'a>(
    sampling: &Sampling,
    history: &History,
    logits: &'a [f32],
    buffer: &'a mut Vec<f32>,
) -> Result<&'a [f32], SamplerError> {
    #[expect(clippy::float_cmp, reason = "defaults are named values, not the result of arithmetic")]
    let penalised = sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0;
    if !penalised && sampling.logit_bias.is_empty() {
        return Ok(logits);
    }
    buffer.clear();
    buffer.extend_from_slice(logits);
    for &(token, bias) in &sampling.logit_bias {
        buffer[token as usize] += bias;
    }
    if penalised {
        for (token, generated) in history.tokens() {
            let logit = &mut buffer[token as usize];
            let penalty = sampling.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            if generated > 0 {
                #[expect(clippy::cast_precision_loss, reason = "occurrences are far below 2^24")]
                let occurrences = generated as f32;
                *logit -= sampling.presence_penalty;
                *logit -= sampling.frequency_penalty * occurrences;
            }
        }
    }
    first_non_finite(buffer).map_or(Ok(&buffer[..]), |token| Err(SamplerError::Penalised { token }))
}

/// The largest logit; ties go to the lowest id.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0_u32, f32::NEG_INFINITY);
    for (token, &logit) in (0_u32..).zip(logits) {
        if logit > best.1 {
            best = (token, logit);
        }
    }
    best.0
}

/// Steps 5 to 7. Leaves the candidates in ascending order of id.
fn cut(sampling: &Sampling, candidates: &mut Vec<Candidate>) {
    let top_k = usize::try_from(sampling.top_k).unwrap_or(usize::MAX);
    let by_rank = |a: &Candidate, b: &Candidate| {
        b.logit
            .partial_cmp(&a.logit)
            .unwrap_or(std::cmp::Ordering::Equal)
            .then(a.token.cmp(&b.token))
    };
    let mut ascending = true;
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, by_rank);
        candidates.truncate(top_k);
        ascending = false;
    }
    if sampling.top_p < 1.0 {
        candidates.sort_unstable_by(by_rank);
        ascending = false;
        keep_share(candidates, f64::from(sampling.top_p));
    }
    if sampling.min_p > 0.0 {
        // The most likely token has probability exp(0) = 1.
        let floor = f64::from(sampling.min_p);
        candidates.retain(|candidate| candidate.probability >= floor);
    }
    if !ascending {
        candidates.sort_unstable_by_key(|candidate| candidate.token);
    }
}

/// Keeps the shortest run of ranked candidates that holds `share` of their sum; never fewer than one.
fn keep_share(ranked: &mut Vec<Candidate>, share: f64) {
    let mut total = 0.0;
    for candidate in ranked.iter() {
        total += candidate.probability;
    }
    let wanted = total * share;
    let mut held = 0.0;
    let mut kept = 0;
    for candidate in ranked.iter() {
        held += candidate.probability;
        kept += 1;
        if held >= wanted {
            break;
        }
    }
    ranked.truncate(kept);
}

/// Step 8: the first candidate, in ascending order of id, whose running sum passes `unit` times the sum of all.
fn draw(candidates: &[Candidate], unit: f64) -> u32 {
    let mut total = 0.0;
    for candidate in candidates {
        total += candidate.probability;
    }
    let point = unit * total;
    let mut sum = 0.0;
    let mut last = candidates[0].token;
    for candidate in candidates.iter().filter(|candidate| candidate.probability > 0.0) {
        sum += candidate.probability;
        last = candidate.token;
        if sum > point {
            break;
        }
    }
    last
}

/// A number in [0, 1): Philox keyed by the seed, counting choice and position.
fn random(sampling: &Sampling, position: u32) -> f64 {
    let [low, high] = halves(sampling.seed);
    let bits = philox::philox4x32_10([low, high], [position, sampling.choice, 0, 0]);
    philox::unit_f64(bits[0], bits[1])
}

#[expect(clippy::cast_possible_truncation, reason = "the two halves are what is wanted")]
fn halves(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

#[cfg(test)]
mod tests;
