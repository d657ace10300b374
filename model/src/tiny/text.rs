//! Tokenizer files of tiny checkpoints: every byte is a token of the same number, five special tokens follow, and the rest
//! of the vocabulary has no text, as the padding of real vocabularies.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::write_json;
use crate::error::Result;
use crate::files;

/// Special tokens from id 256 on.
const SPECIAL: [&str; 5] = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"];

const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}\
                        {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

pub(super) fn write(config: &Map<String, Value>, directory: &Path) -> Result<()> {
    let mut vocab = Map::new();
    for (id, character) in crate::byte_level::alphabet().into_iter().enumerate() {
        vocab.insert(character.to_string(), Value::from(id));
    }
    let added: Vec<Value> = (256..)
        .zip(SPECIAL)
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        })
        .collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    write_json(&directory.join("tokenizer.json"), &tokenizer)?;
    let max_position = config.get("max_position_embeddings").cloned().unwrap_or_default();
    let tokenizer_config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[1], "clean_up_tokenization_spaces": false, "model_max_length": max_position,
    });
    write_json(&directory.join("tokenizer_config.json"), &tokenizer_config)?;
    files::write_atomic(&directory.join("chat_template.jinja"), TEMPLATE.as_bytes())?;
    let generation = json!({ "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257 });
    write_json(&directory.join("generation_config.json"), &generation)
}
