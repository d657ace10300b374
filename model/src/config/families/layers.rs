//! Which layers are dense and which have experts.

use crate::config::value::Block;
use crate::config::{Family, Ffn, LayerConfig};
use crate::error::Result;

/// More layers than this are a damaged file.
const LAYERS_MAX: usize = 4096;

/// What all layers with experts have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct MoeShape {
    pub(super) experts: usize,
    pub(super) width: usize,
    pub(super) shared: Option<usize>,
    pub(super) correction_bias: bool,
}

pub(super) fn read(family: Family, top: &Block<'_>, moe: &MoeShape) -> Result<Vec<LayerConfig>> {
    let count = top.positive("num_hidden_layers")?;
    if count > LAYERS_MAX {
        let problem = format!("{count} layers are more than the limit of {LAYERS_MAX}");
        return Err(top.error("num_hidden_layers", problem, "restore config.json"));
    }
    let by_count = match family {
        Family::Glm4Moe => top
            .opt_usize("first_k_dense_replace")?
            .map(|dense| (0..count).map(|i| i >= dense).collect()),
        Family::Qwen3Moe => sparse_step(top, count)?,
        Family::Mixtral | Family::Olmoe => Some(vec![true; count]),
    };
    let by_type = layer_types(top, count)?;
    let sparse = match (by_count, by_type) {
        (Some(a), Some(b)) if a != b => {
            return Err(top.error(
                "mlp_layer_types",
                "contradicts the keys that say which layers are dense",
                "remove the one that is wrong",
            ));
        }
        (Some(sparse), _) | (None, Some(sparse)) => sparse,
        (None, None) => {
            return Err(top.error(
                "first_k_dense_replace",
                "neither this nor mlp_layer_types says which layers are dense",
                "restore config.json from the model's publisher; no value is assumed",
            ));
        }
    };
    let dense_width =
        if sparse.iter().all(|&sparse| sparse) { 0 } else { top.positive("intermediate_size")? };
    let layer = |sparse| LayerConfig {
        ffn: if sparse {
            Ffn::Moe {
                experts: moe.experts,
                intermediate: moe.width,
                shared_intermediate: moe.shared,
                correction_bias: moe.correction_bias,
            }
        } else {
            Ffn::Dense { intermediate: dense_width }
        },
    };
    Ok(sparse.into_iter().map(layer).collect())
}

/// `decoder_sparse_step` and `mlp_only_layers`.
fn sparse_step(top: &Block<'_>, count: usize) -> Result<Option<Vec<bool>>> {
    let Some(step) = top.opt_usize("decoder_sparse_step")? else { return Ok(None) };
    if step == 0 {
        return Err(top.error("decoder_sparse_step", "is 0", "restore config.json"));
    }
    let mut sparse: Vec<bool> = (0..count).map(|layer| (layer + 1) % step == 0).collect();
    for value in top.list("mlp_only_layers")?.unwrap_or_default() {
        let layer = value
            .as_u64()
            .and_then(|layer| usize::try_from(layer).ok())
            .filter(|&layer| layer < count);
        let Some(layer) = layer else {
            let problem = format!("{value} is not the index of one of {count} layers");
            return Err(top.error("mlp_only_layers", problem, "restore config.json"));
        };
        sparse[layer] = false;
    }
    Ok(Some(sparse))
}

/// `mlp_layer_types`: a list of `dense` and `sparse`.
fn layer_types(top: &Block<'_>, count: usize) -> Result<Option<Vec<bool>>> {
    let key = "mlp_layer_types";
    let Some(list) = top.list(key)? else { return Ok(None) };
    if list.len() < count {
        let problem = format!("{} entries for {count} layers", list.len());
        return Err(top.error(key, problem, "restore config.json"));
    }
    let kind = |value: &serde_json::Value| match value.as_str() {
        Some("sparse") => Ok(true),
        Some("dense") => Ok(false),
        _ => Err(top.error(
            key,
            format!("{value} is neither dense nor sparse"),
            "a newer version may support it",
        )),
    };
    // A longer list describes the extra prediction layers as well.
    Ok(Some(list.iter().take(count).map(kind).collect::<Result<_>>()?))
}
