//! The normalised description of a model: what the four supported families have in common, with every value spelled
//! out. A family is a mapping from its `config.json` to this type ([`read`]); nothing behind it asks for the family again.

mod families;
mod quantisation;
mod read;
mod rope;
mod validate;
mod value;

use std::fmt;

pub(crate) use read::{ReadConfig, read_config};
use serde::{Deserialize, Serialize};
use shimmer_kernels::gating::GatingRule;

pub(crate) use quantisation::{Quantisation, SCALE_SUFFIX as FP8_SCALE_SUFFIX};

/// A supported model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// GLM-4.5, GLM-4.5-Air, GLM-4.6.
    #[serde(rename = "glm4_moe")]
    Glm4Moe,
    /// Qwen3-30B-A3B, Qwen3-235B-A22B and their coders.
    #[serde(rename = "qwen3_moe")]
    Qwen3Moe,
    /// Mixtral 8x7B and 8x22B.
    Mixtral,
    /// OLMoE-1B-7B.
    Olmoe,
}

impl Family {
    /// All families, in the order of the documentation.
    pub const ALL: [Self; 4] = [Self::Glm4Moe, Self::Qwen3Moe, Self::Mixtral, Self::Olmoe];

    /// The `model_type` of its `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Glm4Moe => "glm4_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Mixtral => "mixtral",
            Self::Olmoe => "olmoe",
        }
    }

    /// The family of a `model_type`.
    #[must_use]
    pub fn from_model_type(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.model_type() == name)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

/// A model, completely described. Stored in the manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Where the description came from; for people and tensor names, not for arithmetic.
    pub family: Family,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Length of a hidden state.
    pub hidden_size: usize,
    /// Attention, the same in every layer.
    pub attention: AttentionConfig,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f32,
    /// One entry per decoder layer.
    pub layers: Vec<LayerConfig>,
    /// How experts are chosen; absent when no layer has any.
    pub gating: Option<GatingRule>,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// Positions that the model was made for.
    pub max_position: usize,
    /// Begin-of-text ids, possibly none.
    pub bos_token_ids: Vec<u32>,
    /// Ids that end a generation: those of `generation_config.json`, else those of `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// Padding id.
    pub pad_token_id: Option<u32>,
}

/// Grouped-query attention.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Length of one head. Scores are scaled by its inverse square root.
    pub head_dim: usize,
    /// The q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub o_bias: bool,
    /// Norms on queries and keys before the rotary embedding.
    pub qk_norm: QkNorm,
}

impl AttentionConfig {
    /// Rows of the q projection.
    #[must_use]
    pub fn q_rows(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rows of the k and of the v projection.
    #[must_use]
    pub fn kv_rows(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Norms on queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// There are none.
    None,
    /// Over each head, with one weight of `head_dim` for all heads.
    PerHead,
    /// Over the whole projection, before it is cut into heads.
    Whole,
}

/// Rotary embedding: half-split pairs on the first `rotary_dim` dimensions of each head, unscaled positions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions of a head; even, at most `head_dim`.
    pub rotary_dim: usize,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig {
    /// Its feed-forward part.
    pub ffn: Ffn,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ffn {
    /// One gated MLP.
    Dense {
        /// Its width.
        intermediate: usize,
    },
    /// Routed experts, and possibly a shared one that every token passes through.
    Moe {
        /// Routed experts of this layer, counted in the tensors.
        experts: usize,
        /// Width of each.
        intermediate: usize,
        /// Width of the shared expert.
        shared_intermediate: Option<usize>,
        /// A bias is added to the scores for the choice, not for the weights.
        correction_bias: bool,
    },
}

impl ModelConfig {
    /// Layers with routed experts, ascending, with their number of experts.
    pub fn moe_layers(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0u32..).zip(&self.layers).filter_map(|(index, layer)| match layer.ffn {
            Ffn::Moe { experts, .. } => Some((index, u32::try_from(experts).unwrap_or(u32::MAX))),
            Ffn::Dense { .. } => None,
        })
    }

    /// Routed experts of a layer; 0 for a dense one and for one that does not exist.
    #[must_use]
    pub fn experts(&self, layer: u32) -> u32 {
        let layer = usize::try_from(layer).ok().and_then(|index| self.layers.get(index));
        match layer.map(|layer| &layer.ffn) {
            Some(Ffn::Moe { experts, .. }) => u32::try_from(*experts).unwrap_or(u32::MAX),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests;
