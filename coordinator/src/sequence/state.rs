//! A running generation: its tokens, the text they make, and when it ends. A sans-I/O core.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{Generation, Known, OutputRules, StopRules};
use crate::detokenizer::IncrementalDetokenizer;
use crate::engine::{Event, FinishReason, PositionLogprobs, TokenLogprob};
use crate::sampler::{History, SamplerError, SamplerScratch, Sampling, choose, log_probabilities};
use crate::stop::StopMatcher;
use crate::tokenizer::Tokenizer;

/// What one row of logits gave.
#[derive(Debug)]
pub(crate) struct Sampled {
    token: u32,
    logprobs: Option<PositionLogprobs>,
}

/// How a generation ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) reason: FinishReason,
    pub(crate) matched_stop: Option<String>,
}

/// What tokens of an earlier run lead to without any logits.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Replay {
    /// One for each token that was taken, without log-probabilities.
    pub(crate) events: Vec<Event>,
    /// Set when the last of them ended the generation.
    pub(crate) ended: Option<Ended>,
}

/// A token that came out otherwise than in an earlier run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Divergence {
    /// Its place among the generated ones.
    pub(crate) index: u32,
    pub(crate) earlier: u32,
    pub(crate) now: u32,
}

/// One running generation.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// Prompt, then generated tokens.
    tokens: Vec<u32>,
    prompt: usize,
    max_tokens: usize,
    sampling: Sampling,
    stop: StopRules,
    output: OutputRules,
    end_tokens: Arc<[u32]>,
    history: History,
    tokenizer: Arc<Tokenizer>,
    detokenizer: IncrementalDetokenizer,
    matcher: StopMatcher,
    digest: Option<Sha256>,
    scratch: SamplerScratch,
    /// What the first generated tokens must be.
    expected: Vec<u32>,
}

impl Sequence {
    /// `known` of the generation is left to [`Self::replay`], but for what must come out again.
    pub(crate) fn new(
        generation: Generation,
        max_tokens: u32,
        end_tokens: Arc<[u32]>,
        tokenizer: Arc<Tokenizer>,
    ) -> Self {
        let Generation { prompt, sampling, mut stop, output, known, id: _ } = generation;
        let expected = match known {
            Known::Again(tokens) => tokens,
            Known::Nothing | Known::Taken(_) => Vec::new(),
        };
        let detokenizer =
            IncrementalDetokenizer::new(Arc::clone(&tokenizer), output.skip_special_tokens);
        Self {
            prompt: prompt.len(),
            max_tokens: max_tokens as usize,
            history: History::new(&prompt),
            tokens: prompt,
            sampling,
            matcher: StopMatcher::new(std::mem::take(&mut stop.stop_strings)),
            stop,
            output,
            end_tokens,
            tokenizer,
            detokenizer,
            digest: output.logits_digest.then(Sha256::new),
            scratch: SamplerScratch::default(),
            expected,
        }
    }

    /// Takes tokens that were generated before, as far as the generation goes.
    pub(crate) fn replay(&mut self, tokens: &[u32]) -> Replay {
        let mut replay = Replay::default();
        for &token in tokens {
            let (event, ended) = self.push(Sampled { token, logprobs: None });
            replay.events.push(event);
            if ended.is_some() {
                replay.ended = ended;
                break;
            }
        }
        replay
    }

    /// Compares a token, before it is pushed, with the one of the earlier run.
    pub(crate) fn check(&self, sampled: &Sampled) -> Result<(), Divergence> {
        let index = self.generated();
        match self.expected.get(index) {
            Some(&earlier) if earlier != sampled.token => {
                let index = u32::try_from(index).expect("the context is counted in u32");
                Err(Divergence { index, earlier, now: sampled.token })
            }
            _ => Ok(()),
        }
    }

    /// Prompt, then generated tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    pub(crate) fn seed(&self) -> u64 {
        self.sampling.seed
    }

    /// Chooses the next token from the logits of the last one.
    pub(crate) fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SamplerError> {
        let position = u32::try_from(self.tokens.len()).expect("the context is counted in u32");
        let token = choose(&self.sampling, &self.history, logits, position, &mut self.scratch)?;
        if let Some(digest) = &mut self.digest {
            hash_logits(digest, logits);
            digest.update(token.to_le_bytes());
        }
        let logprobs = self.output.logprobs.map(|count| {
            let found = log_probabilities(logits, token, count as usize);
            let describe = |token_id: u32, logprob: f32| TokenLogprob {
                token_id,
                logprob: Some(logprob),
                token_bytes: self.tokenizer.token_bytes(token_id).to_vec(),
            };
            PositionLogprobs {
                chosen: describe(token, found.chosen),
                top: found
                    .top
                    .into_iter()
                    .map(|(token, logprob)| describe(token, logprob))
                    .collect(),
            }
        });
        Ok(Sampled { token, logprobs })
    }

    /// Appends the sampled token; returns the event to send and, when the generation is over, how it ended.
    pub(crate) fn push(&mut self, sampled: Sampled) -> (Event, Option<Ended>) {
        let Sampled { token, logprobs } = sampled;
        self.tokens.push(token);
        self.history.push(token);
        let ends = (!self.stop.ignore_eos && self.end_tokens.contains(&token))
            || self.stop.stop_token_ids.contains(&token);
        let mut text = String::new();
        let mut matched = None;
        if !ends {
            let piece = self.detokenizer.push(token);
            matched = self.show(&piece, &mut text);
        }
        let full = self.generated() >= self.max_tokens;
        if matched.is_none() && (ends || full) {
            matched = self.flush(&mut text);
        }
        let stopped = ends || matched.is_some();
        let ended = (stopped || full).then_some(Ended {
            reason: if stopped { FinishReason::Stop } else { FinishReason::Length },
            matched_stop: matched,
        });
        let event =
            Event::Delta { text, token_ids: vec![token], logprobs: logprobs.into_iter().collect() };
        (event, ended)
    }

    /// Text that was held back when the generation is ended from outside.
    pub(crate) fn flush_cancelled(&mut self) -> Option<Event> {
        let mut text = String::new();
        self.flush(&mut text);
        (!text.is_empty()).then(|| Event::Delta {
            text,
            token_ids: Vec::new(),
            logprobs: Vec::new(),
        })
    }

    /// Hex of the digest over all logits and tokens, when asked for.
    pub(crate) fn logits_sha256(&self) -> Option<String> {
        self.digest.as_ref().map(|digest| hex::encode(digest.clone().finalize()))
    }

    fn show(&mut self, piece: &str, text: &mut String) -> Option<String> {
        let step = self.matcher.push(piece);
        text.push_str(&step.emit);
        step.matched
    }

    /// Gives out what detokenizer and stop matcher hold.
    fn flush(&mut self, text: &mut String) -> Option<String> {
        let tail = self.detokenizer.finish();
        let matched = self.show(&tail, text);
        if matched.is_none() {
            text.push_str(&self.matcher.finish());
        }
        matched
    }
}

/// Feeds logits as little-endian f32.
fn hash_logits(digest: &mut Sha256, logits: &[f32]) {
    if cfg!(target_endian = "little") {
        digest.update(bytemuck::cast_slice::<f32, u8>(logits));
    } else {
        logits.iter().for_each(|logit| digest.update(logit.to_le_bytes()));
    }
}

#[cfg(test)]
mod tests;
