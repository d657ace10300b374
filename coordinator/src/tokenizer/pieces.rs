//! The bytes that each token stands for, and what the decoder does at the start of a text.
//!
//! Decoding works on bytes: a token may hold a part of a character (field reports T4 and T5 of every engine that
//! decodes token by token). So the decoder of `tokenizer.json` is resolved at load into one byte string per token, and
//! a rule for the beginning of the text. Decoders that cannot be resolved so are refused by name.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::TextError;

pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";

/// What is taken away at the start of a decoded text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LeadingRule {
    /// Nothing.
    Keep,
    /// Up to `count` leading repetitions of `content` (the SentencePiece decoders of Llama and Mixtral).
    Strip { content: char, count: usize },
    /// Every blank that stands for a `▁` in the first token (the `Metaspace` decoder).
    FirstToken,
}

/// How token strings become bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PieceRule {
    /// Each character stands for a byte (GPT-2's table). A token with any other character is literal text.
    ByteLevel,
    /// Literal text after these replacements; `<0xNN>` stands for a byte when `byte_fallback` is set.
    Text { replace: Vec<(String, String)>, byte_fallback: bool },
}

/// A decoder of `tokenizer.json`, resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decoder {
    pub(crate) piece: PieceRule,
    pub(crate) leading: LeadingRule,
    /// The metaspace, when `leading` is [`LeadingRule::FirstToken`].
    pub(crate) metaspace: char,
}

impl Decoder {
    /// Reads the `decoder` field of `tokenizer.json`.
    pub(crate) fn parse(decoder: &Value) -> Result<Self, TextError> {
        let mut resolved = Self {
            piece: PieceRule::Text { replace: Vec::new(), byte_fallback: false },
            leading: LeadingRule::Keep,
            metaspace: '\u{2581}',
        };
        let Value::Object(object) = decoder else {
            return Err(TextError::file(TOKENIZER_FILE, "decoder", "a decoder is required"));
        };
        let mut fused = false;
        match object.get("type").and_then(Value::as_str) {
            Some("Sequence") => {
                let Some(Value::Array(steps)) = object.get("decoders") else {
                    return Err(TextError::file(
                        TOKENIZER_FILE,
                        "decoder.decoders",
                        "expected a list",
                    ));
                };
                for (index, step) in steps.iter().enumerate() {
                    let field = format!("decoder.decoders[{index}]");
                    let Value::Object(step) = step else {
                        return Err(TextError::file(TOKENIZER_FILE, field, "expected an object"));
                    };
                    resolved.apply(step, &field, &mut fused)?;
                }
            }
            _ => resolved.apply(object, "decoder", &mut fused)?,
        }
        Ok(resolved)
    }

    fn apply(
        &mut self,
        step: &Map<String, Value>,
        field: &str,
        fused: &mut bool,
    ) -> Result<(), TextError> {
        let refuse = |detail: &str| Err(TextError::file(TOKENIZER_FILE, field, detail));
        let kind = step.get("type").and_then(Value::as_str).unwrap_or("");
        let untouched = self.piece == PieceRule::Text { replace: Vec::new(), byte_fallback: false };
        match (kind, &mut self.piece) {
            ("Fuse", _) => *fused = true,
            ("ByteLevel", _) if untouched && !*fused => self.piece = PieceRule::ByteLevel,
            ("Metaspace", PieceRule::Text { replace, .. }) if !*fused => {
                let mut mark =
                    step.get("replacement").and_then(Value::as_str).unwrap_or("\u{2581}").chars();
                let (Some(metaspace), None) = (mark.next(), mark.next()) else {
                    return refuse("replacement is not one character");
                };
                replace.push((metaspace.to_string(), " ".to_owned()));
                self.metaspace = metaspace;
                if prepends(step) {
                    self.leading = LeadingRule::FirstToken;
                }
            }
            ("Replace", PieceRule::Text { replace, .. }) if !*fused => {
                let pattern = step
                    .get("pattern")
                    .and_then(|pattern| pattern.get("String"))
                    .and_then(Value::as_str);
                let (Some(pattern), Some(content)) =
                    (pattern, step.get("content").and_then(Value::as_str))
                else {
                    return refuse("only replacements of one string by another are supported");
                };
                if pattern.is_empty() {
                    return refuse("the pattern is empty");
                }
                replace.push((pattern.to_owned(), content.to_owned()));
            }
            ("ByteFallback", PieceRule::Text { byte_fallback, .. }) if !*fused => {
                *byte_fallback = true
            }
            ("Strip", _) if *fused => {
                let count = |name: &str| step.get(name).and_then(Value::as_u64).unwrap_or(0);
                let mut content = step.get("content").and_then(Value::as_str).unwrap_or("").chars();
                let (Some(content), None) = (content.next(), content.next()) else {
                    return refuse("content is not one character");
                };
                if count("stop") != 0 {
                    return refuse("stripping at the end of a text is not supported");
                }
                let count = usize::try_from(count("start")).unwrap_or(usize::MAX);
                if count > 0 {
                    self.leading = LeadingRule::Strip { content, count };
                }
            }
            _ => return refuse(&format!("decoder {kind:?} is not supported here")),
        }
        Ok(())
    }

    /// The bytes of an ordinary vocabulary entry.
    pub(crate) fn bytes(&self, token: &str, table: &HashMap<char, u8>) -> Vec<u8> {
        match &self.piece {
            PieceRule::ByteLevel => {
                let mapped: Option<Vec<u8>> =
                    token.chars().map(|c| table.get(&c).copied()).collect();
                mapped.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            PieceRule::Text { replace, byte_fallback } => {
                let mut text = token.to_owned();
                for (pattern, content) in replace {
                    text = text.replace(pattern.as_str(), content);
                }
                match byte_value(&text) {
                    Some(byte) if *byte_fallback => vec![byte],
                    _ => text.into_bytes(),
                }
            }
        }
    }
}

/// Whether a `Metaspace` decoder drops the blank it prepended; older files say `add_prefix_space` instead.
fn prepends(step: &Map<String, Value>) -> bool {
    match step.get("prepend_scheme").and_then(Value::as_str) {
        Some(scheme) => scheme != "never",
        None => step.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true),
    }
}

/// The byte of a `<0xNN>` token.
fn byte_value(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

/// GPT-2's table from characters to bytes: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100.
pub(crate) fn byte_level_table() -> HashMap<char, u8> {
    let mut table = HashMap::with_capacity(256);
    let mut next = 0x100_u32;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable { u32::from(byte) } else { next };
        if !printable {
            next += 1;
        }
        table.insert(char::from_u32(code).expect("below 0x144, far from the surrogates"), byte);
    }
    table
}
