//! Which tensors a container has, in which order and with which shapes: derived from the configuration and the numeric
//! class alone, so that conversion, opening and verification cannot disagree.
//!
//! Names: `embed`, `head` (absent when tied), `norm`, and per layer `layers.N.` followed by `attn_norm`, `q`, `k`, `v`,
//! `o`, `q_bias`, `k_bias`, `v_bias`, `o_bias`, `q_norm`, `k_norm`, `ffn_norm`; `gate`, `up`, `down` of a dense layer;
//! `router`, `router_bias`, `shared_gate`, `shared_up`, `shared_down` of one with experts.

use shimmer_kernels::{ExpertLayout, MatrixLayout, WeightFormat};

use crate::class::NumericClass;
use crate::config::{Ffn, ModelConfig, QkNorm};
use crate::error::{Error, Result};

/// Name of the trunk file.
pub(crate) const TRUNK_FILE: &str = "trunk.safetensors";
/// Directory of the expert files.
pub(crate) const EXPERTS_DIRECTORY: &str = "experts";
/// Files that are copied as they are, where the checkpoint has them.
pub(crate) const TEXT_FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
];
/// Boundary of matrices in the trunk file: one vector operand.
const MATRIX_ALIGNMENT: u64 = 64;

/// Below the container directory, the file of a layer's experts.
pub(crate) fn expert_file(layer: u32) -> String {
    format!("{EXPERTS_DIRECTORY}/layer-{layer:03}.safetensors")
}

/// Name of an expert's slab in its file.
pub(crate) fn expert_name(layer: u32, expert: u32) -> String {
    format!("layers.{layer}.experts.{expert}")
}

/// A tensor of the trunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TrunkTensor {
    pub(crate) name: String,
    /// `[rows, columns]` or `[length]`.
    pub(crate) shape: Vec<usize>,
    /// Of a matrix; vectors are plain f32.
    pub(crate) format: WeightFormat,
}

impl TrunkTensor {
    /// Layout of a matrix; `None` for a vector.
    pub(crate) fn layout(&self) -> Result<Option<MatrixLayout>> {
        match self.shape.as_slice() {
            &[rows, cols] => MatrixLayout::new(self.format, rows, cols)
                .map(Some)
                .map_err(Error::layout(self.name.as_str())),
            _ => Ok(None),
        }
    }

    /// Bytes in the file, padding included.
    pub(crate) fn stored_bytes(&self) -> Result<u64> {
        Ok(match self.layout()? {
            Some(layout) => (layout.total_bytes() as u64).next_multiple_of(MATRIX_ALIGNMENT),
            None => self.shape.iter().product::<usize>() as u64 * 4,
        })
    }
}

/// All tensors of the trunk in file order: matrices first, since they are padded to the alignment, then vectors.
pub(crate) fn trunk_tensors(config: &ModelConfig, class: &NumericClass) -> Vec<TrunkTensor> {
    let mut list = List { matrices: Vec::new(), vectors: Vec::new() };
    let (hidden, vocab) = (config.hidden_size, config.vocab_size);
    let embed_format = if config.tie_word_embeddings { class.head } else { class.trunk };
    list.matrix("embed".to_owned(), vocab, hidden, embed_format);
    if !config.tie_word_embeddings {
        list.matrix("head".to_owned(), vocab, hidden, class.head);
    }
    list.vector("norm".to_owned(), hidden);
    for (index, layer) in config.layers.iter().enumerate() {
        let at = |part: &str| format!("layers.{index}.{part}");
        list.attention(config, class, &at);
        match layer.ffn {
            Ffn::Dense { intermediate } => {
                list.mlp([at("gate"), at("up"), at("down")], hidden, intermediate, class)
            }
            Ffn::Moe { experts, shared_intermediate, correction_bias, .. } => {
                list.matrix(at("router"), experts, hidden, WeightFormat::F32);
                if correction_bias {
                    list.vector(at("router_bias"), experts);
                }
                if let Some(width) = shared_intermediate {
                    list.mlp(
                        [at("shared_gate"), at("shared_up"), at("shared_down")],
                        hidden,
                        width,
                        class,
                    );
                }
            }
        }
    }
    list.matrices.append(&mut list.vectors);
    list.matrices
}

/// Layout of the experts of a layer; `None` for a dense layer and for one that does not exist.
pub(crate) fn expert_layout(
    config: &ModelConfig,
    class: &NumericClass,
    layer: u32,
) -> Result<Option<ExpertLayout>> {
    let layer_config = usize::try_from(layer).ok().and_then(|index| config.layers.get(index));
    match layer_config.map(|layer| &layer.ffn) {
        Some(&Ffn::Moe { intermediate, .. }) => {
            ExpertLayout::new(config.hidden_size, intermediate, class.experts)
                .map(Some)
                .map_err(Error::layout(format!("experts of layer {layer}")))
        }
        _ => Ok(None),
    }
}

struct List {
    matrices: Vec<TrunkTensor>,
    vectors: Vec<TrunkTensor>,
}

impl List {
    fn matrix(&mut self, name: String, rows: usize, cols: usize, format: WeightFormat) {
        self.matrices.push(TrunkTensor { name, shape: vec![rows, cols], format });
    }

    fn vector(&mut self, name: String, length: usize) {
        self.vectors.push(TrunkTensor { name, shape: vec![length], format: WeightFormat::F32 });
    }

    fn attention(
        &mut self,
        config: &ModelConfig,
        class: &NumericClass,
        at: &dyn Fn(&str) -> String,
    ) {
        let attention = &config.attention;
        let (hidden, q_rows, kv_rows) =
            (config.hidden_size, attention.q_rows(), attention.kv_rows());
        self.vector(at("attn_norm"), hidden);
        for (part, rows) in [("q", q_rows), ("k", kv_rows), ("v", kv_rows)] {
            self.matrix(at(part), rows, hidden, class.trunk);
            if attention.qkv_bias {
                self.vector(at(&format!("{part}_bias")), rows);
            }
        }
        self.matrix(at("o"), hidden, q_rows, class.trunk);
        if attention.o_bias {
            self.vector(at("o_bias"), hidden);
        }
        let norms = match attention.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some((attention.head_dim, attention.head_dim)),
            QkNorm::Whole => Some((q_rows, kv_rows)),
        };
        if let Some((q, k)) = norms {
            self.vector(at("q_norm"), q);
            self.vector(at("k_norm"), k);
        }
        self.vector(at("ffn_norm"), hidden);
    }

    fn mlp(
        &mut self,
        [gate, up, down]: [String; 3],
        hidden: usize,
        width: usize,
        class: &NumericClass,
    ) {
        self.matrix(gate, width, hidden, class.trunk);
        self.matrix(up, width, hidden, class.trunk);
        self.matrix(down, hidden, width, class.trunk);
    }
}
