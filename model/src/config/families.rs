//! One mapping per family from the keys of its `config.json` to [`ModelConfig`].
//!
//! A value that changes the arithmetic is read or refused, never assumed; a key that this version does not know is
//! reported. Defaults are taken only where the family's own reference implementation has one and where the shapes of
//! the tensors would show a wrong one.

mod layers;
mod neutral;

use shimmer_kernels::gating::{GatingRule, Score};

use super::value::Block;
use super::{AttentionConfig, Family, ModelConfig, QkNorm, rope};
use crate::error::Result;
use layers::MoeShape;

/// The description and the number of extra prediction layers.
pub(super) fn normalise(
    family: Family,
    top: &Block<'_>,
    warnings: &mut Vec<String>,
) -> Result<(ModelConfig, usize)> {
    neutral::check(family, top, warnings)?;
    let hidden_size = top.positive("hidden_size")?;
    let attention = attention(family, top, hidden_size)?;
    let default_partial = if family == Family::Glm4Moe { 0.5 } else { 1.0 };
    let rope = rope::read(top, attention.head_dim, default_partial, warnings)?;
    let moe = moe_shape(family, top)?;
    let layers = layers::read(family, top, &moe)?;
    let gating = gating(family, top)?;
    let config = ModelConfig {
        family,
        vocab_size: top.positive("vocab_size")?,
        hidden_size,
        attention,
        rope,
        rms_norm_eps: f32_of(top.f64("rms_norm_eps")?),
        layers,
        gating: Some(gating),
        tie_word_embeddings: top.opt_bool("tie_word_embeddings")?.unwrap_or(false),
        max_position: top.positive("max_position_embeddings")?,
        bos_token_ids: top.token_ids("bos_token_id")?.unwrap_or_default(),
        eos_token_ids: top.token_ids("eos_token_id")?.unwrap_or_default(),
        pad_token_id: top.token_ids("pad_token_id")?.and_then(|ids| ids.first().copied()),
    };
    if !(config.rms_norm_eps > 0.0 && config.rms_norm_eps < 1.0) {
        return Err(top.error("rms_norm_eps", "not between 0 and 1", "restore config.json"));
    }
    let extra_layers = top.opt_usize("num_nextn_predict_layers")?.unwrap_or(0);
    Ok((config, extra_layers))
}

fn attention(family: Family, top: &Block<'_>, hidden_size: usize) -> Result<AttentionConfig> {
    let heads = top.positive("num_attention_heads")?;
    let kv_heads = top.positive("num_key_value_heads")?;
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("{heads} query heads are not a multiple of {kv_heads}");
        return Err(top.error("num_key_value_heads", problem, "restore config.json"));
    }
    let head_dim = match top.opt_usize("head_dim")? {
        Some(0) => return Err(top.error("head_dim", "is 0", "restore config.json")),
        Some(dim) => dim,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            return Err(top.error(
                "head_dim",
                "the key is missing and hidden_size is not a multiple of the heads",
                "restore config.json",
            ));
        }
    };
    let bias = match family {
        Family::Mixtral => false,
        _ => top.opt_bool("attention_bias")?.unwrap_or(false),
    };
    let qk_norm = match family {
        Family::Glm4Moe if top.opt_bool("use_qk_norm")?.unwrap_or(false) => QkNorm::PerHead,
        Family::Glm4Moe | Family::Mixtral => QkNorm::None,
        Family::Qwen3Moe => QkNorm::PerHead,
        Family::Olmoe => QkNorm::Whole,
    };
    // In GLM-4 the bias is on q, k and v only.
    let o_bias = bias && family != Family::Glm4Moe;
    Ok(AttentionConfig { heads, kv_heads, head_dim, qkv_bias: bias, o_bias, qk_norm })
}

fn moe_shape(family: Family, top: &Block<'_>) -> Result<MoeShape> {
    const COUNTS: [&str; 3] = ["n_routed_experts", "num_local_experts", "num_experts"];
    let experts = match top.one_of(&COUNTS, Block::opt_usize)? {
        Some(0) | None => {
            return Err(top.error(
                "n_routed_experts / num_local_experts / num_experts",
                "no number of experts above 0",
                "this is a dense model or a damaged config.json; only mixture-of-experts models are supported",
            ));
        }
        Some(count) => count,
    };
    let width = match family {
        Family::Glm4Moe | Family::Qwen3Moe => top.positive("moe_intermediate_size")?,
        Family::Mixtral | Family::Olmoe => top.positive("intermediate_size")?,
    };
    let shared = match family {
        Family::Glm4Moe => match top.usize("n_shared_experts")? {
            0 => None,
            count => Some(count * width),
        },
        _ => None,
    };
    Ok(MoeShape { experts, width, shared, correction_bias: family == Family::Glm4Moe })
}

fn gating(family: Family, top: &Block<'_>) -> Result<GatingRule> {
    let top_k = top.positive("num_experts_per_tok")?;
    let softmax = |normalise| GatingRule {
        score: Score::Softmax,
        top_k,
        groups: 1,
        groups_kept: 1,
        normalise,
        normalise_eps: 0.0,
        scale: 1.0,
    };
    let gating = match family {
        Family::Glm4Moe => GatingRule {
            score: Score::Sigmoid,
            top_k,
            groups: top.positive("n_group")?,
            groups_kept: top.positive("topk_group")?,
            normalise: top.bool("norm_topk_prob")?,
            normalise_eps: 1e-20,
            scale: f32_of(top.f64("routed_scaling_factor")?),
        },
        Family::Qwen3Moe | Family::Olmoe => softmax(top.bool("norm_topk_prob")?),
        // Renormalises always, and has no key for it.
        Family::Mixtral => softmax(true),
    };
    if gating.groups_kept > gating.groups {
        let problem = format!("{} of {} groups", gating.groups_kept, gating.groups);
        return Err(top.error("topk_group", problem, "restore config.json"));
    }
    if !(gating.scale.is_finite() && gating.scale > 0.0) {
        return Err(top.error(
            "routed_scaling_factor",
            "not a number above 0",
            "restore config.json",
        ));
    }
    Ok(gating)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "config numbers are meant as f32; rounding is the rule"
)]
fn f32_of(value: f64) -> f32 {
    value as f32
}
