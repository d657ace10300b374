//! Keys that would change the arithmetic and are not implemented: accepted only with the value that changes nothing.
//! And the keys that are known to have no effect here; all others are reported.

use crate::config::Family;
use crate::config::value::Block;
use crate::error::Result;

/// Keys that other families use to scale or cap numbers, with the value that does nothing.
const MUST_BE: [(&str, f64); 9] = [
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("embedding_multiplier", 1.0),
    ("residual_multiplier", 1.0),
    ("attention_multiplier", 1.0),
    ("final_logit_softcapping", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("attention_chunk_size", 0.0),
    ("router_temperature", 1.0),
];

/// Keys that are read elsewhere or concern training and other programs.
#[rustfmt::skip]
const KNOWN: &[&str] = &[
    "_name_or_path", "architectures", "attention_bias", "attention_dropout", "auto_map", "bos_token_id", "clip_qkv",
    "compression_config", "decoder_sparse_step", "dtype", "eos_token_id", "first_k_dense_replace", "head_dim",
    "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings",
    "max_window_layers", "mlp_layer_types", "mlp_only_layers", "model_type", "moe_intermediate_size", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_attention_heads", "num_experts",
    "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "partial_rotary_factor", "pretraining_tp", "quantization_config", "return_dict", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise",
    "scoring_func", "sliding_window", "tie_word_embeddings", "topk_group", "topk_method", "torch_dtype",
    "transformers_version", "use_cache", "use_qk_norm", "use_sliding_window", "vocab_size",
];

pub(super) fn check(family: Family, top: &Block<'_>, warnings: &mut Vec<String>) -> Result<()> {
    activation(top)?;
    windows(family, top)?;
    scoring(family, top)?;
    if let Some(limit) = top.get("clip_qkv") {
        return Err(top.error(
            "clip_qkv",
            format!("clipping of queries, keys and values to {limit} is not implemented"),
            "this model cannot be run exactly; use one without clip_qkv",
        ));
    }
    for (key, neutral) in MUST_BE {
        let Some(value) = top.get(key) else { continue };
        if value.as_f64().is_none_or(|value| value.to_bits() != neutral.to_bits()) {
            return Err(top.error(
                key,
                format!("{value} is not implemented"),
                "a newer version may support it",
            ));
        }
    }
    for key in top
        .keys()
        .filter(|key| !KNOWN.contains(key) && !MUST_BE.iter().any(|(known, _)| known == key))
    {
        warnings.push(format!("config.json: {key} is not understood and has no effect"));
    }
    Ok(())
}

fn activation(top: &Block<'_>) -> Result<()> {
    match top.opt_str("hidden_act")? {
        Some("silu" | "swish") => Ok(()),
        Some(other) => Err(top.error(
            "hidden_act",
            format!("{other:?} is not implemented"),
            "only silu is; the family always uses it",
        )),
        None => Err(top.error(
            "hidden_act",
            "the key is missing",
            "restore config.json; no activation is assumed",
        )),
    }
}

/// A sliding window is fine where it is off or never shorter than the context.
fn windows(family: Family, top: &Block<'_>) -> Result<()> {
    let on = match family {
        Family::Qwen3Moe => top.opt_bool("use_sliding_window")?.unwrap_or(false),
        _ => true,
    };
    if let Some(window) = top.opt_usize("sliding_window")?
        && on
        && window < top.positive("max_position_embeddings")?
    {
        return Err(top.error(
            "sliding_window",
            format!("attention limited to {window} positions is not implemented"),
            "this model cannot be run exactly; use a release without a window",
        ));
    }
    for value in top.list("layer_types")?.unwrap_or_default() {
        if value.as_str() != Some("full_attention") {
            return Err(top.error(
                "layer_types",
                format!("{value} is not implemented"),
                "only full_attention is",
            ));
        }
    }
    Ok(())
}

/// The scoring function is a property of the family; a file that says otherwise is another model.
fn scoring(family: Family, top: &Block<'_>) -> Result<()> {
    let (function, method) = match family {
        Family::Glm4Moe => ("sigmoid", "noaux_tc"),
        _ => ("softmax", "greedy"),
    };
    for (key, expected) in [("scoring_func", function), ("topk_method", method)] {
        if let Some(found) = top.opt_str(key)?.filter(|found| *found != expected) {
            let problem =
                format!("{found:?} is not implemented for {family}, which has {expected:?}");
            return Err(top.error(key, problem, "restore config.json, or use a supported model"));
        }
    }
    Ok(())
}
