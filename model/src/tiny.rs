//! Tiny seeded checkpoints of the four families: real files with every part a big model of the family has, made in
//! milliseconds from nothing.
//!
//! A value depends on the tensor's name, its shape and its index only, and is exactly representable in bfloat16, so that
//! other programs can make the same checkpoint. For tensor NAME (as spelled in files with one tensor per expert), element
//! i in row-major order:
//!
//! ```text
//! z     = splitmix64 output number i of the sequence that starts at fnv1a64(NAME)
//! u     = (z >> 40) / 2^23 - 1                                   in [-1, 1), exact
//! value = bf16(f32(center + u * amplitude))                      f64 until it is rounded, both times half to even
//!
//! NAME ends with        center  amplitude
//! norm.weight           1       0.25
//! .bias                 0       0.25                             also e_score_correction_bias
//! embed_tokens.weight   0       1, or 2 / sqrt(columns) if tied
//! lm_head.weight        0       2 / sqrt(columns)
//! .gate.weight          0       3.5 / sqrt(columns)              the router
//! otherwise             0       1.75 / sqrt(columns)
//! ```
//!
//! Norms and biases are far from 1 and 0, so that a dropped one shows; logits spread by about 1.2.

mod shapes;
mod text;
mod values;

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use crate::config::Family;
use crate::error::Result;
use crate::files;
use crate::safetensors::{DType, HeaderEntry, TensorWriter};
use values::Planned;
pub use values::{Tensor, tensors};

/// A tiny model; several per family, so that every part that is optional in a family is there once and absent once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Preset {
    /// GLM-4.5 with attention biases, one shared expert, older configuration keys.
    Glm4Moe,
    /// GLM-4.5 with expert groups, per-head norms and newer configuration keys.
    Glm4MoeGroups,
    /// Qwen3 with 13 experts in every layer.
    Qwen3Moe,
    /// Qwen3 with a tied head and a dense layer in the middle.
    Qwen3MoeTied,
    /// Mixtral.
    Mixtral,
    /// OLMoE.
    Olmoe,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 6] = [
        Self::Glm4Moe,
        Self::Glm4MoeGroups,
        Self::Qwen3Moe,
        Self::Qwen3MoeTied,
        Self::Mixtral,
        Self::Olmoe,
    ];

    /// Its name, as the files of reference results have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Glm4Moe => "glm4_moe",
            Self::Glm4MoeGroups => "glm4_moe_groups",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Qwen3MoeTied => "qwen3_moe_tied",
            Self::Mixtral => "mixtral",
            Self::Olmoe => "olmoe",
        }
    }

    /// The preset of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }

    /// The plain preset of a family.
    #[must_use]
    pub fn of(family: Family) -> Self {
        match family {
            Family::Glm4Moe => Self::Glm4Moe,
            Family::Qwen3Moe => Self::Qwen3Moe,
            Family::Mixtral => Self::Mixtral,
            Family::Olmoe => Self::Olmoe,
        }
    }

    /// Its `config.json`.
    #[must_use]
    pub fn config(self) -> Map<String, Value> {
        let text = match self {
            Self::Glm4Moe => include_str!("tiny/glm4_moe.json"),
            Self::Glm4MoeGroups => include_str!("tiny/glm4_moe_groups.json"),
            Self::Qwen3Moe => include_str!("tiny/qwen3_moe.json"),
            Self::Qwen3MoeTied => include_str!("tiny/qwen3_moe_tied.json"),
            Self::Mixtral => include_str!("tiny/mixtral.json"),
            Self::Olmoe => include_str!("tiny/olmoe.json"),
        };
        serde_json::from_str(text).expect("the presets are valid JSON, as their tests show")
    }
}

/// Element type of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TinyType {
    /// Exact.
    #[default]
    Bf16,
    /// Rounded where a value is too small for it.
    F16,
    /// Exact.
    F32,
}

/// Variations of a tiny checkpoint.
#[derive(Debug, Clone, Default)]
pub struct TinyOptions {
    /// Element type.
    pub dtype: TinyType,
    /// Number of files; 0 or 1 for a single one without index.
    pub shards: usize,
    /// Experts of a layer as two tensors instead of three per expert.
    pub fused: bool,
    /// Experts of some layers, where they differ from the configuration's number.
    pub experts: BTreeMap<usize, usize>,
    /// Keys of `config.json` to set, or to remove with `null`.
    pub config: Map<String, Value>,
}

impl TinyOptions {
    fn config(&self, preset: Preset) -> Map<String, Value> {
        let mut config = preset.config();
        for (key, value) in &self.config {
            if value.is_null() {
                config.remove(key);
            } else {
                config.insert(key.clone(), value.clone());
            }
        }
        config
    }
}

/// Writes a whole checkpoint directory: configuration, weights, byte-level tokenizer, chat template.
pub fn write_checkpoint(preset: Preset, options: &TinyOptions, directory: &Path) -> Result<()> {
    files::create_directory(directory)?;
    let config = options.config(preset);
    write_json(&directory.join("config.json"), &Value::Object(config.clone()))?;
    text::write(&config, directory)?;
    let tensors = values::arranged(&config, options);
    let shards = options.shards.max(1);
    if shards == 1 {
        let all: Vec<&Planned> = tensors.iter().collect();
        return write_tensors(&directory.join("model.safetensors"), &all, options.dtype);
    }
    // Round robin, as if the writer had filled its files in parallel: experts of a layer end up in different files.
    let file = |shard: usize| format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
    (0..shards).into_par_iter().try_for_each(|shard| {
        let part: Vec<&Planned> = tensors.iter().skip(shard).step_by(shards).collect();
        write_tensors(&directory.join(file(shard)), &part, options.dtype)
    })?;
    let weight_map: Map<String, Value> = tensors
        .iter()
        .enumerate()
        .map(|(index, tensor)| (tensor.name.clone(), Value::from(file(index % shards))))
        .collect();
    let total: usize = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
    let index = json!({ "metadata": { "total_size": total * 2 }, "weight_map": weight_map });
    write_json(&directory.join("model.safetensors.index.json"), &index)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let bytes = serde_json::to_vec_pretty(value).expect("a value is valid JSON");
    files::write_atomic(path, &bytes)
}

/// Writes one file; the correction bias stays f32, as published files have it.
fn write_tensors(path: &Path, tensors: &[&Planned], dtype: TinyType) -> Result<()> {
    let wide = |name: &str| dtype == TinyType::F32 || name.ends_with("e_score_correction_bias");
    let entries: Vec<HeaderEntry> = tensors
        .iter()
        .map(|tensor| HeaderEntry {
            name: tensor.name.clone(),
            dtype: match dtype {
                _ if wide(&tensor.name) => DType::F32,
                TinyType::F16 => DType::F16,
                _ => DType::BF16,
            },
            shape: tensor.shape.iter().map(|&n| n as u64).collect(),
        })
        .collect();
    let mut writer = TensorWriter::create(path, &entries)?;
    for (tensor, entry) in tensors.iter().zip(&entries) {
        let values = tensor.values();
        let values = values.iter();
        let bytes: Vec<u8> = match entry.dtype {
            DType::F32 => values.flat_map(|value| value.to_le_bytes()).collect(),
            DType::F16 => values.flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
            // The values are bf16 already: the lower half is zero.
            _ => values.flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect(),
        };
        writer.write(&bytes)?;
    }
    writer.finish().map(|_| ())
}

#[cfg(test)]
mod tests;
