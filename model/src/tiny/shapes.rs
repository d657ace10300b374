//! Names and shapes of all tensors of a tiny checkpoint, as Hugging Face files have them.
//!
//! Written independently of the reader's own list on purpose: one mistake in both would be two mistakes.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Names, shapes, in a stable order.
pub(super) type Shapes = Vec<(String, Vec<usize>)>;

/// Lists the tensors; `experts` replaces the number of experts of some layers.
pub(super) fn list(config: &Map<String, Value>, experts: &BTreeMap<usize, usize>) -> Shapes {
    let model = Model { config, experts };
    let (hidden, vocab) = (model.number("hidden_size"), model.number("vocab_size"));
    let mut out = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !model.flag("tie_word_embeddings") {
        out.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
    }
    for layer in 0..model.number("num_hidden_layers") {
        model.attention(layer, &mut out);
        model.feed_forward(layer, &mut out);
    }
    out
}

struct Model<'a> {
    config: &'a Map<String, Value>,
    experts: &'a BTreeMap<usize, usize>,
}

impl Model<'_> {
    fn optional(&self, key: &str) -> Option<usize> {
        self.config.get(key)?.as_u64().and_then(|number| usize::try_from(number).ok())
    }

    fn number(&self, key: &str) -> usize {
        self.optional(key).unwrap_or(0)
    }

    fn flag(&self, key: &str) -> bool {
        self.config.get(key).and_then(Value::as_bool).unwrap_or(false)
    }

    fn is(&self, family: &str) -> bool {
        self.config.get("model_type").and_then(Value::as_str) == Some(family)
    }

    fn attention(&self, layer: usize, out: &mut Shapes) {
        let hidden = self.number("hidden_size");
        let heads = self.number("num_attention_heads");
        let head_dim = self.optional("head_dim").unwrap_or(hidden / heads);
        let (q_rows, kv_rows) = (heads * head_dim, self.number("num_key_value_heads") * head_dim);
        let at = format!("model.layers.{layer}");
        out.push((format!("{at}.input_layernorm.weight"), vec![hidden]));
        out.push((format!("{at}.post_attention_layernorm.weight"), vec![hidden]));
        let bias = self.flag("attention_bias");
        for (part, rows) in [("q", q_rows), ("k", kv_rows), ("v", kv_rows)] {
            out.push((format!("{at}.self_attn.{part}_proj.weight"), vec![rows, hidden]));
            if bias {
                out.push((format!("{at}.self_attn.{part}_proj.bias"), vec![rows]));
            }
        }
        out.push((format!("{at}.self_attn.o_proj.weight"), vec![hidden, q_rows]));
        if bias && !self.is("glm4_moe") {
            out.push((format!("{at}.self_attn.o_proj.bias"), vec![hidden]));
        }
        let norms = if self.is("qwen3_moe") || self.flag("use_qk_norm") {
            Some([head_dim, head_dim])
        } else if self.is("olmoe") {
            Some([q_rows, kv_rows])
        } else {
            None
        };
        for (part, length) in ["q", "k"].into_iter().zip(norms.into_iter().flatten()) {
            out.push((format!("{at}.self_attn.{part}_norm.weight"), vec![length]));
        }
    }

    fn feed_forward(&self, layer: usize, out: &mut Shapes) {
        let at = format!("model.layers.{layer}");
        let listed = |key: &str| {
            let list = self.config.get(key).and_then(Value::as_array);
            list.is_some_and(|list| list.iter().any(|value| value.as_u64() == Some(layer as u64)))
        };
        if layer < self.number("first_k_dense_replace") || listed("mlp_only_layers") {
            self.mlp(
                &format!("{at}.mlp"),
                self.number("intermediate_size"),
                ["gate_proj", "up_proj", "down_proj"],
                out,
            );
            return;
        }
        let of_config = ["n_routed_experts", "num_experts", "num_local_experts"]
            .iter()
            .find_map(|key| self.optional(key));
        let experts = self.experts.get(&layer).copied().or(of_config).unwrap_or(0);
        let mixtral = self.is("mixtral");
        let width = self.number(if mixtral || self.is("olmoe") {
            "intermediate_size"
        } else {
            "moe_intermediate_size"
        });
        let block = format!("{at}.{}", if mixtral { "block_sparse_moe" } else { "mlp" });
        let parts =
            if mixtral { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        out.push((format!("{block}.gate.weight"), vec![experts, self.number("hidden_size")]));
        for expert in 0..experts {
            self.mlp(&format!("{block}.experts.{expert}"), width, parts, out);
        }
        if self.is("glm4_moe") {
            out.push((format!("{block}.gate.e_score_correction_bias"), vec![experts]));
            let shared = self.number("n_shared_experts") * width;
            if shared > 0 {
                self.mlp(
                    &format!("{block}.shared_experts"),
                    shared,
                    ["gate_proj", "up_proj", "down_proj"],
                    out,
                );
            }
        }
    }

    fn mlp(&self, prefix: &str, width: usize, [gate, up, down]: [&str; 3], out: &mut Shapes) {
        let hidden = self.number("hidden_size");
        out.push((format!("{prefix}.{gate}.weight"), vec![width, hidden]));
        out.push((format!("{prefix}.{up}.weight"), vec![width, hidden]));
        out.push((format!("{prefix}.{down}.weight"), vec![hidden, width]));
    }
}
