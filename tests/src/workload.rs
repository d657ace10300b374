//! The mixed workload whose bytes must never change, and its digest.

use sha2::{Digest, Sha256};
use shimmer_coordinator::{
    sampler::Sampling,
    sequence::{Generation as EngineGeneration, OutputRules, StopRules},
};
use shimmer_proto::v1::{GenerateRequest, SamplingParams};

use crate::{client, random};

/// One generation of a workload: exactly `max_tokens` tokens.
#[derive(Debug, Clone)]
pub struct Job {
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub sampling: Sampling,
}

/// What a job gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub tokens: Vec<u32>,
    pub logits_sha256: String,
}

/// Prompts of 1, 17 and 300 tokens, each generated greedily and with seeded sampling.
pub fn mixed(vocabulary: u32) -> Vec<Job> {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let nucleus = Sampling { temperature: 0.8, top_p: 0.9, seed: 11, ..Sampling::default() };
    let penalised = Sampling {
        temperature: 1.3,
        top_k: 40,
        repetition_penalty: 1.1,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(3, 2.0), (5, -100.0)],
        seed: 12,
        ..Sampling::default()
    };
    let floor = Sampling { temperature: 1.0, min_p: 0.02, seed: u64::MAX, ..Sampling::default() };
    let job = |seed, length, max_tokens, sampling: &Sampling| Job {
        prompt: random::tokens(seed, length, vocabulary),
        max_tokens,
        sampling: sampling.clone(),
    };
    vec![
        job(1, 1, 24, &greedy),
        job(2, 17, 16, &greedy),
        job(3, 300, 12, &greedy),
        job(4, 1, 24, &nucleus),
        job(5, 17, 16, &penalised),
        job(6, 300, 12, &floor),
    ]
}

/// `count` sampled generations with prompts of their own, for batches of exactly that many decode rows.
pub fn decode_rows(vocabulary: u32, count: usize) -> Vec<Job> {
    let sampling = |seed| Sampling { temperature: 0.9, seed, ..Sampling::default() };
    let prompt = |seed| random::tokens(seed, 3, vocabulary);
    (100..)
        .take(count)
        .map(|seed| Job { prompt: prompt(seed), max_tokens: 6, sampling: sampling(seed) })
        .collect()
}

/// SHA-256 over the tokens and logits of every outcome in order.
pub fn digest(outcomes: &[Outcome]) -> String {
    let mut hasher = Sha256::new();
    for outcome in outcomes {
        hasher.update(&outcome.logits_sha256);
        outcome.tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    }
    hex::encode(hasher.finalize())
}

impl Job {
    /// As a request of the public API.
    pub fn request(&self) -> GenerateRequest {
        let sampling = &self.sampling;
        let params = SamplingParams {
            temperature: Some(sampling.temperature),
            top_k: Some(sampling.top_k),
            top_p: Some(sampling.top_p),
            min_p: Some(sampling.min_p),
            repetition_penalty: Some(sampling.repetition_penalty),
            presence_penalty: Some(sampling.presence_penalty),
            frequency_penalty: Some(sampling.frequency_penalty),
            logit_bias: sampling.logit_bias.iter().copied().collect(),
            seed: Some(sampling.seed),
        };
        client::sampled(&self.prompt, self.max_tokens, params)
    }

    /// As the engine takes it.
    pub fn generation(&self, id: String) -> EngineGeneration {
        EngineGeneration {
            id,
            prompt: self.prompt.clone(),
            sampling: self.sampling.clone(),
            stop: StopRules {
                max_tokens: Some(self.max_tokens),
                ignore_eos: true,
                ..StopRules::default()
            },
            output: OutputRules { logits_digest: true, ..OutputRules::default() },
            ..EngineGeneration::default()
        }
    }
}

impl From<client::Generation> for Outcome {
    fn from(generation: client::Generation) -> Self {
        Self { tokens: generation.tokens, logits_sha256: generation.logits_sha256 }
    }
}
