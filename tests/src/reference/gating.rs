//! Which experts a row goes to, and with what weight.

use super::ops;

/// The rule of one model.
#[derive(Debug, Clone, Copy)]
pub struct Gating {
    /// Scores by sigmoid instead of softmax.
    pub sigmoid: bool,
    pub top_k: usize,
    pub groups: usize,
    pub groups_kept: usize,
    /// Divides the chosen weights by their sum.
    pub normalise: bool,
    /// Factor on every weight.
    pub scale: f64,
}

/// Experts and weights in rank order.
pub type Chosen = Vec<(usize, f64)>;

impl Gating {
    /// The chosen experts, and by how much the last one beat the best one left out.
    ///
    /// `bias` counts for the choice, not for the weights.
    pub fn choose(&self, logits: &[f64], bias: Option<&[f64]>) -> (Chosen, f64) {
        let scores: Vec<f64> = if self.sigmoid {
            logits.iter().map(|&x| ops::sigmoid(x)).collect()
        } else {
            ops::softmax(logits)
        };
        let mut keys = scores.clone();
        if let Some(bias) = bias {
            ops::add(&mut keys, bias);
        }
        let mut margin = mask_groups(&mut keys, self.groups, self.groups_kept);
        let order = descending(&keys);
        if let Some(&next) = order.get(self.top_k) {
            margin = margin.min(keys[order[self.top_k - 1]] - keys[next]);
        }
        let mut chosen: Chosen =
            order[..self.top_k].iter().map(|&expert| (expert, scores[expert])).collect();
        let sum: f64 =
            if self.normalise { chosen.iter().map(|&(_, weight)| weight).sum() } else { 1.0 };
        chosen.iter_mut().for_each(|(_, weight)| *weight *= self.scale / sum);
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
