//! Token ids to text, one token at a time, in whole characters.
//!
//! Works on bytes: a token may end in the middle of a character, so its bytes are held until the character is complete
//! or can no longer become one. Nothing here fails: bytes that are not UTF-8 become U+FFFD, as
//! [`String::from_utf8_lossy`] over the whole stream would have it, whatever the model samples (T4 to T7).

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::tokenizer::{LeadingState, Tokenizer};

/// Turns a stream of token ids into text.
#[derive(Debug, Clone)]
pub struct IncrementalDetokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    leading: LeadingState,
    /// At most three bytes between calls: the beginning of a character.
    held: Vec<u8>,
}

impl IncrementalDetokenizer {
    /// Starts a text of its own: SentencePiece tokenizers drop the blank in front of its first word, as
    /// [`Tokenizer::decode`] does.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let leading = tokenizer.leading_state();
        Self { tokenizer, skip_special, leading, held: Vec::new() }
    }

    /// Continues a text that others hold: the blank in front of the first word stays.
    #[must_use]
    pub fn continuing(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, leading: LeadingState::Done, held: Vec::new() }
    }

    /// Takes one token and returns the text that it completes, perhaps none.
    #[must_use]
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        self.leading.append(&self.tokenizer, id, &mut self.held);
        let mut text = String::new();
        let mut done = 0;
        while done < self.held.len() {
            match std::str::from_utf8(&self.held[done..]) {
                Ok(valid) => {
                    text.push_str(valid);
                    done = self.held.len();
                }
                Err(error) => {
                    let valid = done + error.valid_up_to();
                    text.push_str(
                        std::str::from_utf8(&self.held[done..valid])
                            .expect("checked by the first attempt"),
                    );
                    done = valid;
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done += invalid;
                }
            }
        }
        self.held.drain(..done);
        text
    }

    /// Ends the stream: an incomplete character becomes U+FFFD.
    #[must_use]
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }
}
