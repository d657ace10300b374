//! Which tokens a sequence holds, for penalties.

use std::collections::BTreeMap;

/// Tokens of prompt and output, with how often each was generated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    generated: BTreeMap<u32, u32>,
}

impl History {
    /// The history of a sequence that has generated nothing.
    pub fn new(prompt: &[u32]) -> Self {
        Self { generated: prompt.iter().map(|&token| (token, 0)).collect() }
    }

    /// Adds a generated token.
    pub fn push(&mut self, token: u32) {
        *self.generated.entry(token).or_insert(0) += 1;
    }

    /// Every token seen, ascending, with the times it was generated.
    pub fn tokens(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.generated.iter().map(|(&token, &count)| (token, count))
    }
}
