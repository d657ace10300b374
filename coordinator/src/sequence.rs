//! What a client asks of one generation, and its state while it runs.

mod state;

use crate::sampler::Sampling;

pub(crate) use state::{Divergence, Ended, Sampled, Sequence};

/// One generation as the engine takes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// Name for cancelling and for logs; unique among queued and running generations.
    pub id: String,
    /// Token ids of the prompt; never empty.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When the generation ends.
    pub stop: StopRules,
    /// What the events carry.
    pub output: OutputRules,
    /// The tokens that an earlier run of the same generation gave.
    pub known: Known,
}

/// Tokens of an earlier run of the same generation. They are a function of prompt, parameters and seed, so that none of
/// them is ever missed: they only save time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Known {
    /// There was no earlier run, or it gave nothing.
    #[default]
    Nothing,
    /// Computed together with the prompt; the events begin after them.
    Taken(Vec<u32>),
    /// Generated again with all their events, where these need the logits. Each must come out as it stands here.
    Again(Vec<u32>),
}

/// When a generation ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopRules {
    /// At least 1; lowered to what the context leaves. None takes all of it.
    pub max_tokens: Option<u32>,
    /// Text that ends the generation and is not part of the output. At most 16, none empty.
    pub stop_strings: Vec<String>,
    /// Tokens that end the generation besides the model's own end tokens.
    pub stop_token_ids: Vec<u32>,
    /// Generates through the model's end tokens.
    pub ignore_eos: bool,
}

/// What the events of a generation carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputRules {
    /// Log-probabilities of the chosen token and of this many best tokens, at most 20.
    pub logprobs: Option<u32>,
    /// SHA-256 over all logits and chosen tokens.
    pub logits_digest: bool,
    /// Leaves out the text of special tokens.
    pub skip_special_tokens: bool,
}

impl Default for OutputRules {
    fn default() -> Self {
        Self { logprobs: None, logits_digest: false, skip_special_tokens: true }
    }
}
