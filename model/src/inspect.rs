//! What a container is, in numbers: the data behind `shimmer inspect`.

use serde::Serialize;

use crate::class::NumericClass;
use crate::config::{Ffn, ModelConfig};
use crate::container::Container;

/// Summary of a container.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Name of the model.
    pub name: String,
    /// Identity.
    pub digest: String,
    /// Arithmetic.
    pub math_id: String,
    /// Formats, spelled as in the handshake.
    pub numeric_class: String,
    /// The model.
    pub config: ModelConfig,
    /// Weights, padding not counted.
    pub parameters: u64,
    /// Weights that one token touches.
    pub active_parameters: u64,
    /// Bytes of the trunk.
    pub trunk_bytes: u64,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// Routed experts of all layers.
    pub experts: u64,
    /// Bytes of the key-value cache for one position.
    pub kv_bytes_per_position: u64,
    /// Each layer.
    pub layers: Vec<LayerSummary>,
    /// What the conversion had to say.
    pub notes: Vec<String>,
}

/// Summary of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerSummary {
    /// Its index.
    pub layer: u32,
    /// Routed experts; 0 in a dense layer.
    pub experts: u32,
    /// Width of the dense MLP or of each expert.
    pub intermediate: usize,
    /// Width of the shared expert.
    pub shared_intermediate: Option<usize>,
    /// Bytes of one expert.
    pub slab_bytes: u64,
    /// Whether the expert file is in this directory.
    pub present: bool,
}

impl Inspection {
    /// Summarises an opened container.
    #[must_use]
    pub fn of(container: &Container) -> Self {
        let manifest = container.manifest();
        let config = &manifest.config;
        let absent = container.absent_layers();
        let layers: Vec<LayerSummary> = (0u32..)
            .zip(&config.layers)
            .map(|(layer, layer_config)| {
                summary(container, layer, &layer_config.ffn, !absent.contains(&layer))
            })
            .collect();
        let (parameters, active_parameters) = parameters(container);
        Self {
            name: manifest.source.name.clone(),
            digest: manifest.digest.clone(),
            math_id: manifest.math_id.clone(),
            numeric_class: manifest.numeric_class.to_string(),
            config: config.clone(),
            parameters,
            active_parameters,
            trunk_bytes: manifest.tensors.iter().map(|entry| entry.bytes).sum(),
            expert_bytes: manifest.experts.iter().map(|entry| entry.bytes).sum(),
            experts: manifest.experts.len() as u64,
            kv_bytes_per_position: kv_bytes(config, &manifest.numeric_class),
            layers,
            notes: manifest.source.notes.clone(),
        }
    }
}

fn summary(container: &Container, layer: u32, ffn: &Ffn, present: bool) -> LayerSummary {
    let (intermediate, shared_intermediate) = match *ffn {
        Ffn::Dense { intermediate } => (intermediate, None),
        Ffn::Moe { intermediate, shared_intermediate, .. } => (intermediate, shared_intermediate),
    };
    LayerSummary {
        layer,
        experts: container.config().experts(layer),
        intermediate,
        shared_intermediate,
        slab_bytes: container.expert_layout(layer).map_or(0, |layout| layout.slab_bytes() as u64),
        present,
    }
}

/// All weights, and those that one token touches: the trunk but for the embedding's other rows, and `top_k` experts.
fn parameters(container: &Container) -> (u64, u64) {
    let config = container.config();
    let product = |shape: &[usize]| shape.iter().map(|&n| n as u64).product::<u64>();
    let trunk: u64 = container.manifest().tensors.iter().map(|entry| product(&entry.shape)).sum();
    let embedding = product(&[config.vocab_size, config.hidden_size]);
    let looked_up = if config.tie_word_embeddings { 0 } else { embedding };
    let top_k = config.gating.as_ref().map_or(0, |gating| gating.top_k as u64);
    let (mut all, mut active) = (trunk, trunk - looked_up.min(trunk));
    for layer in &config.layers {
        if let Ffn::Moe { experts, intermediate, .. } = layer.ffn {
            let one = 3 * product(&[intermediate, config.hidden_size]);
            all += experts as u64 * one;
            active += top_k * one;
        }
    }
    (all, active)
}

fn kv_bytes(config: &ModelConfig, class: &NumericClass) -> u64 {
    (2 * config.layers.len() * config.attention.kv_rows() * class.kv.element_bytes()) as u64
}
