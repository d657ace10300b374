//! Values of tiny checkpoints.

use std::{borrow::Cow, collections::BTreeMap};

use half::bf16;
use serde_json::{Map, Value};

use super::{Preset, TinyOptions, shapes};
use crate::splitmix;

/// A tensor of a tiny checkpoint; every value is representable in bfloat16.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Name as in the file.
    pub name: String,
    /// Dimensions, the slowest first.
    pub shape: Vec<usize>,
    /// Row-major.
    pub values: Vec<f32>,
}

/// All tensors of a preset, one per expert matrix.
#[must_use]
pub fn tensors(preset: Preset, options: &TinyOptions) -> Vec<Tensor> {
    one_by_one(&options.config(preset), &options.experts)
}

/// A tensor that is going to be written. Its values are made then, so that a checkpoint may be larger than memory.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    tied: bool,
    /// Values that are joined from those of several tensors.
    joined: Option<Vec<f32>>,
}

impl Planned {
    pub(super) fn values(&self) -> Cow<'_, [f32]> {
        match &self.joined {
            Some(values) => Cow::Borrowed(values),
            None => Cow::Owned(values(&self.name, &self.shape, self.tied)),
        }
    }
}

/// All tensors as the options want them.
pub(super) fn arranged(config: &Map<String, Value>, options: &TinyOptions) -> Vec<Planned> {
    if options.fused {
        let fused = fuse(one_by_one(config, &options.experts)).into_iter();
        let planned = |Tensor { name, shape, values }| Planned {
            name,
            shape,
            tied: false,
            joined: Some(values),
        };
        return fused.map(planned).collect();
    }
    let tied = is_tied(config);
    let planned = |(name, shape)| Planned { name, shape, tied, joined: None };
    shapes::list(config, &options.experts).into_iter().map(planned).collect()
}

fn is_tied(config: &Map<String, Value>) -> bool {
    config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false)
}

fn one_by_one(config: &Map<String, Value>, experts: &BTreeMap<usize, usize>) -> Vec<Tensor> {
    let tied = is_tied(config);
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let values = values(&name, &shape, tied);
        Tensor { name, shape, values }
    };
    shapes::list(config, experts).into_iter().map(tensor).collect()
}

fn values(name: &str, shape: &[usize], tied: bool) -> Vec<f32> {
    let cols = shape.last().copied().unwrap_or(1);
    let (center, amplitude) = center_and_amplitude(name, cols, tied);
    let seed = fnv1a64(name.as_bytes());
    let value = |index| {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "rounding to f32 is a step of the recipe"
        )]
        let value = (center + splitmix::unit(seed, index) * amplitude) as f32;
        bf16::from_f32(value).to_f32()
    };
    (0..shape.iter().product::<usize>() as u64).map(value).collect()
}

fn center_and_amplitude(name: &str, cols: usize, tied: bool) -> (f64, f64) {
    #[expect(clippy::cast_precision_loss, reason = "a tiny number of columns is exact")]
    let over_root = |gain: f64| gain / (cols as f64).sqrt();
    if name.ends_with("norm.weight") {
        (1.0, 0.25)
    } else if name.ends_with(".bias") || name.ends_with("e_score_correction_bias") {
        (0.0, 0.25)
    } else if name == "model.embed_tokens.weight" && !tied {
        (0.0, 1.0)
    } else if name == "model.embed_tokens.weight" || name == "lm_head.weight" {
        (0.0, over_root(2.0))
    } else if name.ends_with(".gate.weight") {
        (0.0, over_root(3.5))
    } else {
        (0.0, over_root(1.75))
    }
}

fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// Joins the experts of each layer: gate rows then up rows, and down rows, the expert as the first dimension.
fn fuse(tensors: Vec<Tensor>) -> Vec<Tensor> {
    let mut out: Vec<Tensor> = Vec::new();
    for tensor in tensors {
        let Some((prefix, rest)) = tensor.name.split_once(".experts.") else {
            out.push(tensor);
            continue;
        };
        let matrix = rest.split('.').nth(1).unwrap_or_default();
        let down = matches!(matrix, "down_proj" | "w2");
        let name = format!("{prefix}.experts.{}", if down { "down_proj" } else { "gate_up_proj" });
        let begins_expert = matches!(matrix, "gate_proj" | "w1" | "down_proj" | "w2");
        match out.iter_mut().find(|fused| fused.name == name) {
            None => {
                let shape = vec![1, tensor.shape[0], tensor.shape[1]];
                out.push(Tensor { name, shape, values: tensor.values });
            }
            Some(fused) => {
                if begins_expert {
                    fused.shape[0] += 1;
                } else if fused.shape[0] == 1 {
                    fused.shape[1] += tensor.shape[0];
                }
                fused.values.extend(tensor.values);
            }
        }
    }
    out
}
