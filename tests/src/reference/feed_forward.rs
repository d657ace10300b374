//! Dense and mixture-of-experts feed-forward layers with the gating rules of the four families.

use super::{Family, Model, ops};

/// A routed expert and its weight.
type Routed = Vec<(usize, f64)>;

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

    fn gate(&self, block: &str, logits: &[f64]) -> (Routed, f64) {
        let k = self.number("num_experts_per_tok");
        let sigmoid = self.family == Family::Glm4Moe;
        let scores: Vec<f64> = if sigmoid {
            logits.iter().map(|&x| ops::sigmoid(x)).collect()
        } else {
            ops::softmax(logits)
        };
        let mut keys = scores.clone();
        let mut margin = f64::INFINITY;
        if sigmoid {
            ops::add(
                &mut keys,
                &self.tensor(&format!("{block}.gate.e_score_correction_bias")).values,
            );
            margin = mask_groups(&mut keys, self.number("n_group"), self.number("topk_group"));
        }
        let order = descending(&keys);
        if let Some(&next) = order.get(k) {
            margin = margin.min(keys[order[k - 1]] - keys[next]);
        }
        let mut chosen: Routed =
            order[..k].iter().map(|&expert| (expert, scores[expert])).collect();
        if self.family == Family::Mixtral || self.flag("norm_topk_prob") {
            let sum: f64 = chosen.iter().map(|&(_, weight)| weight).sum();
            chosen.iter_mut().for_each(|(_, weight)| *weight /= sum);
        }
        if sigmoid {
            let scale = self.config["routed_scaling_factor"]
                .as_f64()
                .expect("routed_scaling_factor is a number");
            chosen.iter_mut().for_each(|(_, weight)| *weight *= scale);
        }
        (chosen, margin)
    }
}

/// Keeps the best groups by the sum of their two best keys; the others get minus infinity. Returns the margin.
fn mask_groups(keys: &mut [f64], groups: usize, kept: usize) -> f64 {
    if groups == 1 {
        return f64::INFINITY;
    }
    let size = keys.len() / groups;
    let scores: Vec<f64> = keys
        .chunks_exact(size)
        .map(|group| descending(group).iter().take(2).map(|&index| group[index]).sum())
        .collect();
    let order = descending(&scores);
    for &group in &order[kept..] {
        keys[group * size..][..size].fill(f64::NEG_INFINITY);
    }
    order.get(kept).map_or(f64::INFINITY, |&next| scores[order[kept - 1]] - scores[next])
}

/// Indices by descending value, ties by the lower index.
fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order
}
