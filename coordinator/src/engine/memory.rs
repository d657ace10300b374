//! What an engine takes of a process's memory, known before it is started.

use shimmer_kernels::{KvLayout, PAGE_POSITIONS};
use shimmer_model::{Container, Ffn, ModelConfig};

use super::{EngineConfig, MAX_LOGIT_ROWS};
use crate::kv_cache::KvCache;

/// Memory of the tokenizer for each byte of `tokenizer.json`, what the allocator keeps from parsing it included: 13 measured
/// with the demo model's vocabulary of 49,152 tokens.
const TOKENIZER_FACTOR: u64 = 13;

/// Bytes by what they are for. KV pages and buffers are address space until they are used, so these are upper bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineMemory {
    /// Weights of the trunk.
    pub trunk: u64,
    /// Pages of keys and values.
    pub kv: u64,
    /// Rows of the largest step, and logits.
    pub buffers: u64,
    /// Vocabulary and merges.
    pub tokenizer: u64,
}

impl EngineMemory {
    /// Of an engine with these limits.
    pub fn of(container: &Container, config: &EngineConfig) -> Self {
        let manifest = container.manifest();
        let model = container.config();
        let page = kv_layout(container).page_bytes().saturating_mul(model.layers.len()) as u64;
        let tokenizer = manifest.files.iter().find(|file| file.file == "tokenizer.json");
        Self {
            trunk: manifest.tensors.iter().map(|tensor| tensor.bytes).sum(),
            kv: page.saturating_mul(u64::from(pages(container, config))),
            buffers: buffers(model, config),
            tokenizer: tokenizer.map_or(0, |file| file.bytes.saturating_mul(TOKENIZER_FACTOR)),
        }
    }
}

/// Pages that the budget holds, and not more than all running sequences together can fill.
pub(super) fn pages(container: &Container, config: &EngineConfig) -> u32 {
    let model = container.config();
    let held = KvCache::pages_in(config.kv_budget_bytes, kv_layout(container), model.layers.len());
    let longest = config.context_length.map_or(usize::MAX, |positions| positions as usize);
    let of_one = model.max_position.min(longest).div_ceil(PAGE_POSITIONS);
    held.min(u32::try_from(of_one.saturating_mul(config.max_running)).unwrap_or(u32::MAX))
}

/// Shape of one layer's pages.
pub(super) fn kv_layout(container: &Container) -> KvLayout {
    let attention = &container.config().attention;
    KvLayout {
        format: container.manifest().numeric_class.kv,
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
    }
}

fn buffers(model: &ModelConfig, config: &EngineConfig) -> u64 {
    let attention = &model.attention;
    let (mut experts, mut dense) = (0, 0);
    for layer in &model.layers {
        match layer.ffn {
            Ffn::Moe { experts: routed, shared_intermediate, .. } => {
                experts = experts.max(routed);
                dense = dense.max(shared_intermediate.unwrap_or(0));
            }
            Ffn::Dense { intermediate } => dense = dense.max(intermediate),
        }
    }
    // The residual stream and its copies, exact sums of twice the width, rows as matrices, experts and the router take
    // them, and what a dense layer has between its matrices.
    let row = 9 * model.hidden_size
        + 2 * (attention.q_rows() + attention.kv_rows())
        + 3 * dense
        + 2 * experts;
    let logits = config.max_running.min(MAX_LOGIT_ROWS).saturating_mul(model.vocab_size);
    let values = config.max_batch_rows.saturating_mul(row).saturating_add(logits);
    (values as u64).saturating_mul(size_of::<f32>() as u64)
}

#[cfg(test)]
mod tests;
