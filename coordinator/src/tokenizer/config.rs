//! The part of `tokenizer_config.json` that changes ids or prompts.
//!
//! `add_bos_token` and `add_eos_token` are not part of it: the post-processor of `tokenizer.json` decides, as in
//! transformers.

use serde_json::{Map, Value};

use super::TextError;

pub(crate) const CONFIG_FILE: &str = "tokenizer_config.json";

/// Names under which a tokenizer config gives its special tokens, in the order in which missing ones are added.
pub(crate) const SPECIAL_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What `tokenizer_config.json` says, as far as it matters here.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenizerConfig {
    /// Named special tokens that are present, in the order of [`SPECIAL_NAMES`].
    pub(crate) special: Vec<(&'static str, String)>,
    /// Named special tokens given as objects with matching flags.
    pub(crate) special_objects: Vec<Map<String, Value>>,
    /// `added_tokens_decoder`, ascending by id.
    pub(crate) added: Vec<(u32, Map<String, Value>)>,
    /// `extra_special_tokens` or `additional_special_tokens`.
    pub(crate) extra_special: Vec<String>,
    /// `chat_template` as it stands: a string or a list of named templates.
    pub(crate) chat_template: Option<Value>,
}

impl TokenizerConfig {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, TextError> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| TextError::file(CONFIG_FILE, "", error.to_string()))?;
        let Value::Object(mut object) = value else {
            return Err(TextError::file(CONFIG_FILE, "", "expected a JSON object"));
        };
        let mut config = Self::default();
        for name in SPECIAL_NAMES {
            match object.remove(name) {
                None | Some(Value::Null) => {}
                Some(Value::String(text)) => config.special.push((name, text)),
                Some(Value::Object(token)) => {
                    config.special.push((name, content_of(&token, name)?));
                    config.special_objects.push(token);
                }
                Some(_) => {
                    return Err(TextError::file(
                        CONFIG_FILE,
                        name,
                        "expected a string or an object",
                    ));
                }
            }
        }
        config.added = added_tokens(object.remove("added_tokens_decoder"))?;
        for name in ["extra_special_tokens", "additional_special_tokens"] {
            if let Some(Value::Array(items)) = object.remove(name) {
                for item in items {
                    match item {
                        Value::String(text) => config.extra_special.push(text),
                        Value::Object(token) => {
                            config.extra_special.push(content_of(&token, name)?)
                        }
                        _ => {
                            return Err(TextError::file(
                                CONFIG_FILE,
                                name,
                                "expected strings or objects",
                            ));
                        }
                    }
                }
            }
        }
        config.chat_template =
            object.remove("chat_template").filter(|template| !template.is_null());
        Ok(config)
    }

    pub(crate) fn special_token(&self, name: &str) -> Option<&str> {
        self.special.iter().find(|(known, _)| *known == name).map(|(_, text)| text.as_str())
    }
}

fn content_of(token: &Map<String, Value>, field: &str) -> Result<String, TextError> {
    match token.get("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        _ => Err(TextError::file(CONFIG_FILE, format!("{field}.content"), "expected a string")),
    }
}

/// An id and what the file says about its token.
type AddedToken = (u32, Map<String, Value>);

fn added_tokens(value: Option<Value>) -> Result<Vec<AddedToken>, TextError> {
    const FIELD: &str = "added_tokens_decoder";
    let entries = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(entries)) => entries,
        Some(_) => return Err(TextError::file(CONFIG_FILE, FIELD, "expected an object")),
    };
    let mut added = Vec::with_capacity(entries.len());
    for (key, token) in entries {
        let id: u32 = key.parse().map_err(|_| {
            TextError::file(CONFIG_FILE, format!("{FIELD}.{key}"), "the key is not a token id")
        })?;
        let Value::Object(token) = token else {
            return Err(TextError::file(
                CONFIG_FILE,
                format!("{FIELD}.{key}"),
                "expected an object",
            ));
        };
        content_of(&token, &format!("{FIELD}.{key}"))?;
        added.push((id, token));
    }
    added.sort_by_key(|(id, _)| *id);
    Ok(added)
}
