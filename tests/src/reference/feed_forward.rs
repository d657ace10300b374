//! Dense and mixture-of-experts feed-forward layers of the four families.

use super::{
    Family, Model,
    gating::{Chosen, Gating},
    ops,
};

impl Model {
    /// Adds one layer's feed-forward part to the residual rows. For a mixture: the chosen experts and selection margins.
    pub(super) fn feed_forward(
        &self,
        layer: &str,
        index: usize,
        hidden: &mut [Vec<f64>],
    ) -> Option<(Vec<Vec<usize>>, Vec<f64>)> {
        let norm = format!("{layer}.post_attention_layernorm.weight");
        let listed = self.config["mlp_only_layers"].as_array();
        let dense = index < self.optional_number("first_k_dense_replace").unwrap_or(0)
            || listed.is_some_and(|layers| {
                layers.iter().any(|layer| layer.as_u64() == u64::try_from(index).ok())
            });
        if dense {
            for row in hidden {
                let x = self.norm(&norm, row);
                ops::add(row, &self.ffn(&format!("{layer}.mlp"), &x));
            }
            return None;
        }
        let block = if self.family == Family::Mixtral {
            format!("{layer}.block_sparse_moe")
        } else {
            format!("{layer}.mlp")
        };
        let (mut chosen, mut margins) = (Vec::new(), Vec::new());
        for row in hidden {
            let x = self.norm(&norm, row);
            let logits = self.tensor(&format!("{block}.gate.weight")).apply(&x);
            let (experts, margin) = self.gate(&block, &logits);
            for &(expert, weight) in &experts {
                let out = self.ffn(&format!("{block}.experts.{expert}"), &x);
                ops::add(row, &out.iter().map(|value| value * weight).collect::<Vec<_>>());
            }
            if self.family == Family::Glm4Moe {
                ops::add(row, &self.ffn(&format!("{block}.shared_experts"), &x));
            }
            let mut ids: Vec<usize> = experts.iter().map(|&(expert, _)| expert).collect();
            ids.sort_unstable();
            chosen.push(ids);
            margins.push(margin);
        }
        Some((chosen, margins))
    }

    fn ffn(&self, at: &str, x: &[f64]) -> Vec<f64> {
        // Mixtral numbers its experts' matrices.
        let numbered = self.family == Family::Mixtral;
        let names =
            if numbered { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        let [gate, up, down] = names.map(|name| self.tensor(&format!("{at}.{name}.weight")));
        ops::swiglu_ffn(gate, up, down, x)
    }

    fn gate(&self, block: &str, logits: &[f64]) -> (Chosen, f64) {
        let glm = self.family == Family::Glm4Moe;
        let gating = Gating {
            sigmoid: glm,
            top_k: self.number("num_experts_per_tok"),
            groups: self.optional_number("n_group").unwrap_or(1),
            groups_kept: self.optional_number("topk_group").unwrap_or(1),
            normalise: self.family == Family::Mixtral || self.flag("norm_topk_prob"),
            scale: self.config["routed_scaling_factor"].as_f64().unwrap_or(1.0),
        };
        let bias =
            glm.then(|| &self.tensor(&format!("{block}.gate.e_score_correction_bias")).values[..]);
        gating.choose(logits, bias)
    }
}
