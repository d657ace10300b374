//! Checks of a normalised description. A manifest is as untrusted as a `config.json`: without these a crafted one could
//! ask for impossible sizes.

use super::{Ffn, ModelConfig};

/// No dimension of a model is believable above this, and products of two stay far below 2^64.
const DIMENSION_MAX: usize = 1 << 31;
const LAYERS_MAX: usize = 4096;
const EXPERTS_MAX: usize = 1 << 16;

impl ModelConfig {
    /// Says what is impossible about this description, if anything.
    pub(crate) fn fault(&self) -> Option<String> {
        self.dimension_fault().or_else(|| self.attention_fault()).or_else(|| self.layer_fault())
    }

    fn dimension_fault(&self) -> Option<String> {
        let dimensions = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("heads", self.attention.heads),
            ("kv_heads", self.attention.kv_heads),
            ("head_dim", self.attention.head_dim),
            ("max_position", self.max_position),
            ("layers", self.layers.len()),
        ];
        if let Some((name, value)) =
            dimensions.into_iter().find(|&(_, value)| value == 0 || value >= DIMENSION_MAX)
        {
            return Some(format!("{name} is {value}"));
        }
        if self.layers.len() > LAYERS_MAX {
            return Some(format!(
                "{} layers are more than the limit of {LAYERS_MAX}",
                self.layers.len()
            ));
        }
        let rows = self.attention.heads.checked_mul(self.attention.head_dim);
        if rows.is_none_or(|rows| rows >= DIMENSION_MAX) {
            return Some("heads times head_dim is too large".to_owned());
        }
        let id = |id: u32| usize::try_from(id).is_ok_and(|id| id < self.vocab_size);
        let mut ids =
            self.bos_token_ids.iter().chain(&self.eos_token_ids).chain(&self.pad_token_id);
        ids.find(|&&special| !id(special)).map(|special| {
            format!(
                "special token id {special} is not below the vocabulary size {}",
                self.vocab_size
            )
        })
    }

    fn attention_fault(&self) -> Option<String> {
        let attention = &self.attention;
        if !attention.heads.is_multiple_of(attention.kv_heads) {
            return Some(format!(
                "{} query heads are not a multiple of {}",
                attention.heads, attention.kv_heads
            ));
        }
        let rotary = self.rope.rotary_dim;
        if rotary == 0 || !rotary.is_multiple_of(2) || rotary > attention.head_dim {
            return Some(format!(
                "rotary_dim {rotary} does not fit head_dim {}",
                attention.head_dim
            ));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 1.0) {
            return Some(format!("rope theta {} is not above 1", self.rope.theta));
        }
        let eps = self.rms_norm_eps;
        if eps > 0.0 && eps < 1.0 {
            None
        } else {
            Some(format!("rms_norm_eps {eps} is not between 0 and 1"))
        }
    }

    fn layer_fault(&self) -> Option<String> {
        for (index, layer) in self.layers.iter().enumerate() {
            let fault = match layer.ffn {
                Ffn::Dense { intermediate } => width_fault(intermediate),
                Ffn::Moe { experts, intermediate, shared_intermediate, .. } => {
                    width_fault(intermediate)
                        .or_else(|| shared_intermediate.and_then(width_fault))
                        .or_else(|| self.gating_fault(experts))
                }
            };
            if let Some(fault) = fault {
                return Some(format!("layer {index}: {fault}"));
            }
        }
        None
    }

    fn gating_fault(&self, experts: usize) -> Option<String> {
        let Some(gating) = &self.gating else {
            return Some("experts without a gating rule".to_owned());
        };
        if experts == 0 || experts > EXPERTS_MAX {
            return Some(format!("{experts} experts are not between 1 and {EXPERTS_MAX}"));
        }
        if gating.groups == 0 || gating.groups_kept == 0 || gating.groups_kept > gating.groups {
            return Some(format!("{} of {} groups kept", gating.groups_kept, gating.groups));
        }
        if !experts.is_multiple_of(gating.groups) {
            return Some(format!("{experts} experts do not divide into {} groups", gating.groups));
        }
        let per_group = experts / gating.groups;
        // The score of a group is the sum of its two best.
        if gating.groups > 1 && per_group < 2 {
            return Some(format!("groups of {per_group} experts are too small"));
        }
        let choice = per_group * gating.groups_kept;
        if gating.top_k == 0 || gating.top_k > choice {
            return Some(format!("{} experts per token out of a choice of {choice}", gating.top_k));
        }
        let finite = gating.scale.is_finite() && gating.scale > 0.0 && gating.normalise_eps >= 0.0;
        if finite { None } else { Some("the gating scale is not a number above 0".to_owned()) }
    }
}

fn width_fault(width: usize) -> Option<String> {
    if width == 0 || width >= DIMENSION_MAX {
        Some(format!("intermediate size {width}"))
    } else {
        None
    }
}
