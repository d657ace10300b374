//! The forward pass of every supported family in float64, written from the papers' formulas and sharing no code with the
//! engine: what the engine's logits are compared with where no recorded ones exist.
//!
//! It reads a Hugging Face checkpoint directly. Clarity before speed: one position after the other, no cache, no batch.

mod attention;
mod feed_forward;
pub mod gating;
pub mod ops;

use std::{collections::BTreeMap, fs, path::Path};

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

pub use ops::Matrix;

/// A model family, by the `model_type` of its configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Glm4Moe,
    Qwen3Moe,
    Mixtral,
    Olmoe,
}

/// A checkpoint in memory, every tensor widened to f64.
#[derive(Debug)]
pub struct Model {
    family: Family,
    config: Value,
    tensors: BTreeMap<String, Matrix>,
}

/// What a forward pass gives.
#[derive(Debug)]
pub struct Forward {
    /// One row per position.
    pub logits: Vec<Vec<f64>>,
    /// Chosen experts by MoE layer and position, ascending.
    pub routed: Vec<Vec<Vec<usize>>>,
    /// By MoE layer and position: by how much the worst chosen expert beat the best one left out.
    pub margins: Vec<Vec<f64>>,
}

impl Model {
    /// Reads `config.json` and every safetensors file of a directory.
    ///
    /// # Panics
    /// The checkpoint is not one of the supported families or not readable.
    pub fn open(directory: &Path) -> Self {
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read(&path)
                .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
        };
        let config: Value =
            serde_json::from_slice(&read("config.json")).expect("config.json is JSON");
        let family = match config["model_type"].as_str() {
            Some("glm4_moe") => Family::Glm4Moe,
            Some("qwen3_moe") => Family::Qwen3Moe,
            Some("mixtral") => Family::Mixtral,
            Some("olmoe") => Family::Olmoe,
            other => panic!("no reference for the model type {other:?}"),
        };
        let mut tensors = BTreeMap::new();
        let files = fs::read_dir(directory).expect("the checkpoint is a directory");
        for entry in files {
            let name =
                entry.expect("a directory entry").file_name().into_string().expect("an UTF-8 name");
            if name.ends_with(".safetensors") {
                let bytes = read(&name);
                let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
                tensors.extend(file.iter().map(|(name, view)| {
                    let (rows, cols) = match *view.shape() {
                        [cols] => (1, cols),
                        [rows, cols] => (rows, cols),
                        ref shape => panic!("{name} has the shape {shape:?}"),
                    };
                    (
                        name.to_owned(),
                        Matrix { rows, cols, values: widen(view.dtype(), view.data()) },
                    )
                }));
            }
        }
        Self { family, config, tensors }
    }

    /// Logits of every position of `ids`, and what was routed where.
    ///
    /// # Panics
    /// A tensor is missing or an id is outside the vocabulary.
    pub fn forward(&self, ids: &[u32]) -> Forward {
        let embed = self.tensor("model.embed_tokens.weight");
        let mut hidden: Vec<Vec<f64>> =
            ids.iter().map(|&id| embed.row(id as usize).to_vec()).collect();
        let (mut routed, mut margins) = (Vec::new(), Vec::new());
        for layer in 0..self.number("num_hidden_layers") {
            let at = format!("model.layers.{layer}");
            self.attention(&at, &mut hidden);
            if let Some((chosen, margin)) = self.feed_forward(&at, layer, &mut hidden) {
                routed.push(chosen);
                margins.push(margin);
            }
        }
        let head =
            if self.flag("tie_word_embeddings") { embed } else { self.tensor("lm_head.weight") };
        let logits =
            hidden.iter().map(|row| head.apply(&self.norm("model.norm.weight", row))).collect();
        Forward { logits, routed, margins }
    }

    fn norm(&self, name: &str, row: &[f64]) -> Vec<f64> {
        let eps = self.config["rms_norm_eps"].as_f64().expect("rms_norm_eps is a number");
        ops::rms_norm(row, &self.tensor(name).values, eps)
    }

    fn tensor(&self, name: &str) -> &Matrix {
        self.optional(name).unwrap_or_else(|| panic!("the checkpoint has no {name}"))
    }

    fn optional(&self, name: &str) -> Option<&Matrix> {
        self.tensors.get(name)
    }

    fn number(&self, key: &str) -> usize {
        self.optional_number(key).unwrap_or_else(|| panic!("the configuration has no {key}"))
    }

    fn optional_number(&self, key: &str) -> Option<usize> {
        self.config[key].as_u64().map(|value| usize::try_from(value).expect("a count fits usize"))
    }

    fn flag(&self, key: &str) -> bool {
        self.config[key].as_bool().unwrap_or(false)
    }

    /// A rope setting: at the top level in older files, under `rope_parameters` in newer ones.
    fn rope_setting(&self, key: &str) -> Option<f64> {
        self.config["rope_parameters"][key].as_f64().or_else(|| self.config[key].as_f64())
    }
}

fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        Dtype::BF16 => pairs().map(|pair| bf16::from_le_bytes(pair).to_f64()).collect(),
        Dtype::F16 => pairs().map(|pair| f16::from_le_bytes(pair).to_f64()).collect(),
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(|quad| f64::from(f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]])))
            .collect(),
        other => panic!("no reference for tensors of {other:?}"),
    }
}
