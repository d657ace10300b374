//! Text to token ids and ids to bytes, over a Hugging Face `tokenizer.json`.
//!
//! Ids equal those of transformers. Decoding goes by bytes and not by tokens: [`Tokenizer::token_bytes`] gives what one
//! token stands for, and [`IncrementalDetokenizer`](crate::detokenizer::IncrementalDetokenizer) makes text of it.
//!
//! Deliberate differences from transformers, each because the other way loses data:
//! - Added tokens are literal text. The library runs them through the byte table too, and turns a `č` into a carriage
//!   return (T3).
//! - Invalid bytes of byte-fallback tokens become U+FFFD as in any UTF-8 decoder, not one per byte.
//! - `clean_up_tokenization_spaces` is not applied: it deletes blanks that the model wrote.

mod config;
mod error;
mod load;
mod markers;
mod pieces;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::HashSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::normalizer::Range as Referential;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Token,
};

pub(crate) use config::{CONFIG_FILE, TokenizerConfig};
pub use error::TextError;
use markers::{AddedToken, Trie};
use pieces::{Decoder, LeadingRule};

/// How a text is turned into ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Adds what the post-processor adds, a start token for some models.
    pub add_special: bool,
    /// Recognises control markers (special tokens and other added tokens such as `<think>`) in the text. Without it
    /// they are ordinary text. Added tokens of nothing but blanks are recognised in either case.
    pub parse_special: bool,
}

impl Default for EncodeOptions {
    /// As transformers encodes a text.
    fn default() -> Self {
        Self { add_special: true, parse_special: true }
    }
}

/// A loaded tokenizer. Immutable; shared by all requests.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    added: Vec<AddedToken>,
    control_ids: HashSet<u32>,
    /// Tokens searched for in the raw text, and in the normalized text.
    raw_trie: Trie,
    normalized_trie: Trie,
    /// Control markers by content.
    control_trie: Trie,
    /// Start of each token's bytes in `piece_data`; one more than there are ids.
    piece_starts: Vec<usize>,
    piece_data: Vec<u8>,
    special_ids: HashSet<u32>,
    decoder: Decoder,
    config: TokenizerConfig,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .finish_non_exhaustive()
    }
}

/// Which occurrences of control markers are tokens.
enum Recognition<'a> {
    None,
    /// Those that start at one of these byte offsets, ascending.
    At(&'a [usize]),
}

impl Tokenizer {
    /// Loads from the bytes of `tokenizer.json` and, when there is one, of `tokenizer_config.json`.
    ///
    /// # Errors
    /// Names the file and the field that cannot be used.
    pub fn from_bytes(
        tokenizer_json: &[u8],
        tokenizer_config: Option<&[u8]>,
    ) -> Result<Self, TextError> {
        load::load(tokenizer_json, tokenizer_config)
    }

    /// Encodes a text.
    ///
    /// # Errors
    /// When the tokenizer's model cannot express the text.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, TextError> {
        if !options.parse_special {
            return self.encode_with(text, &Recognition::None, options.add_special);
        }
        let encoding = guarded(|| self.inner.encode_fast(text, options.add_special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes a text in which only the control markers that start at `starts` (ascending byte offsets) are tokens.
    pub(crate) fn encode_marked(
        &self,
        text: &str,
        starts: &[usize],
    ) -> Result<Vec<u32>, TextError> {
        self.encode_with(text, &Recognition::At(starts), false)
    }

    /// Decodes a whole sequence.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut state = self.leading_state();
        let mut bytes = Vec::new();
        for id in ids {
            if !(skip_special && self.is_special(*id)) {
                state.append(self, *id, &mut bytes);
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that a token stands for: a part of a character perhaps, and none for ids between the tokenizer's
    /// vocabulary and the rows of the embedding.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let Ok(index) = usize::try_from(id) else { return &[] };
        match (self.piece_starts.get(index), self.piece_starts.get(index + 1)) {
            (Some(start), Some(end)) => &self.piece_data[*start..*end],
            _ => &[],
        }
    }

    /// Whether the token is special: left out of text when special tokens are skipped.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// The id of a token given by its exact content.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// One more than the largest id. The embedding may have more rows.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.piece_starts.len() - 1
    }

    /// A special token by its name in `tokenizer_config.json`, such as `bos_token`.
    #[must_use]
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.config.special_token(name)
    }

    pub(crate) fn control_occurrences(&self, text: &str) -> Vec<Range<usize>> {
        self.control_trie.occurrences(text).into_iter().map(|(_, range)| range).collect()
    }

    pub(crate) fn has_control_marker(&self, text: &str) -> bool {
        (0..text.len()).any(|at| self.control_trie.longest_at(text.as_bytes(), at).is_some())
    }

    /// Contents of all control markers.
    pub(crate) fn control_markers(&self) -> impl Iterator<Item = &str> {
        self.added.iter().filter(|token| token.is_control()).map(|token| token.content.as_str())
    }

    pub(crate) fn leading_state(&self) -> LeadingState {
        match &self.decoder.leading {
            LeadingRule::Keep => LeadingState::Done,
            LeadingRule::Strip { content, count } => {
                LeadingState::Strip { content: *content, left: *count }
            }
            LeadingRule::FirstToken => LeadingState::FirstToken,
        }
    }

    fn encode_with(
        &self,
        text: &str,
        recognition: &Recognition<'_>,
        add_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        let allowed = |token: usize, start: usize| {
            !self.added[token].is_control()
                || match recognition {
                    Recognition::None => false,
                    Recognition::At(starts) => starts.binary_search(&start).is_ok(),
                }
        };
        let encoding = guarded(|| {
            let mut text = PreTokenizedString::from(text);
            text.split(|_, piece| Ok(self.cut(&piece, &self.raw_trie, &allowed)))?;
            text.split(|_, mut piece| {
                if let Some(normalizer) = self.inner.get_normalizer() {
                    normalizer.normalize(&mut piece)?;
                }
                Ok(self.cut(&piece, &self.normalized_trie, &allowed))
            })?;
            if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut text)?;
            }
            text.tokenize(|piece| self.tokenize_text(piece.get()))?;
            let encoding = text.into_encoding(None, 0, OffsetType::None)?;
            self.inner.post_process(encoding, None, add_special)
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Cuts a piece at the added tokens that are allowed there, by their place in the original text.
    fn cut(
        &self,
        piece: &NormalizedString,
        trie: &Trie,
        allowed: &impl Fn(usize, usize) -> bool,
    ) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
        let slice = |range: Range<usize>| piece.slice(Referential::Normalized(range));
        let admitted = |token: usize, range: Range<usize>| {
            slice(range).is_some_and(|found| allowed(token, found.offsets_original().0))
        };
        let mut cut = Vec::new();
        for stretch in markers::split(piece.get(), trie, &self.added, admitted) {
            let Some(text) = slice(stretch.range) else { continue };
            let tokens = stretch.token.map(|token| {
                let value = text.get().to_owned();
                let end = value.len();
                vec![Token::new(self.added[token].id, value, (0, end))]
            });
            cut.push((text, tokens));
        }
        cut
    }

    /// Tokenizes text of which nothing may become a control token, even where the model's own vocabulary has an entry
    /// with the marker's letters: such an entry is split behind its first character.
    fn tokenize_text(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let attempt = self.inner.get_model().tokenize(rest)?;
            let forged = attempt.iter().find(|token| {
                let spelled = rest.get(token.offsets.0..token.offsets.1).unwrap_or("");
                self.control_ids.contains(&token.id)
                    && self.spells(token.id, spelled)
                    && spelled.chars().nth(1).is_some()
            });
            let Some(forged) = forged else {
                tokens.extend(attempt);
                break;
            };
            let first = rest[forged.offsets.0..].chars().next().map_or(0, char::len_utf8);
            let (head, tail) = rest.split_at(forged.offsets.0 + first);
            tokens.extend(self.inner.get_model().tokenize(head)?);
            rest = tail;
        }
        Ok(tokens)
    }

    fn spells(&self, id: u32, text: &str) -> bool {
        self.added
            .iter()
            .any(|token| token.id == id && (token.content == text || token.pattern == text))
    }
}

/// Where the beginning of a decoded text stands with the [`LeadingRule`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LeadingState {
    Done,
    Strip { content: char, left: usize },
    FirstToken,
}

impl LeadingState {
    /// Appends a token's bytes, less what the rule takes away.
    pub(crate) fn append(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut Vec<u8>) {
        let bytes = tokenizer.token_bytes(id);
        match self {
            Self::Done => out.extend_from_slice(bytes),
            Self::Strip { content, left } => {
                let mut encoded = [0; 4];
                let blank = content.encode_utf8(&mut encoded).as_bytes();
                let mut rest = bytes;
                while *left > 0 {
                    let Some(shorter) = rest.strip_prefix(blank) else { break };
                    rest = shorter;
                    *left -= 1;
                }
                out.extend_from_slice(rest);
                if !rest.is_empty() || *left == 0 {
                    *self = Self::Done;
                }
            }
            Self::FirstToken => {
                if bytes.is_empty()
                    && id >= u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX)
                {
                    return;
                }
                match tokenizer.inner.get_model().id_to_token(id) {
                    Some(token)
                        if token.contains(tokenizer.decoder.metaspace)
                            && !tokenizer.added.iter().any(|added| added.id == id) =>
                    {
                        out.extend(token.replace(tokenizer.decoder.metaspace, "").into_bytes());
                    }
                    _ => out.extend_from_slice(bytes),
                }
                *self = Self::Done;
            }
        }
    }
}

/// Runs the tokenizer library on input that nobody vouches for. A panic inside it is this request's error.
fn guarded<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TextError> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(TextError::Encode { detail: error.to_string() }),
        Err(_) => Err(TextError::Encode { detail: "the tokenizer failed on this text".to_owned() }),
    }
}
