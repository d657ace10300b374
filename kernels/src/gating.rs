//! Choice of experts from router logits: scores, groups, ties and weights in one documented order.

use serde::{Deserialize, Serialize};

use crate::math;

/// How a logit becomes a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Score {
    /// exp(l - max) / sum over all experts.
    Softmax,
    /// 1 / (1 + exp(-l)).
    Sigmoid,
}

/// The rule of one model family.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatingRule {
    /// How a logit becomes a score.
    pub score: Score,
    /// Experts chosen for a row.
    pub top_k: usize,
    /// Equal groups into which the experts are cut; 1 for none.
    pub groups: usize,
    /// Groups that stay in the choice; the others count as -infinity.
    pub groups_kept: usize,
    /// Whether the weights of the chosen are divided by their sum.
    pub normalise: bool,
    /// Added to that sum (1e-20 in some families, else 0).
    pub normalise_eps: f32,
    /// Factor on every weight.
    pub scale: f32,
}

/// A chosen expert and its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Selected {
    /// Expert index within the layer.
    pub expert: u32,
    /// Gate weight.
    pub weight: f32,
}

/// Scores that cannot be chosen from.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GatingError {
    /// NaN or infinite router logit, score or bias; never becomes an expert index.
    #[error("router score of expert {expert} is not finite")]
    NonFinite {
        /// The first such expert.
        expert: usize,
    },
    /// The rule does not fit the number of experts.
    #[error(
        "gating rule (top {top_k}, {groups} groups, {groups_kept} kept) does not fit {experts} experts"
    )]
    Rule {
        /// Experts of the layer.
        experts: usize,
        /// Experts asked for.
        top_k: usize,
        /// Groups of the rule.
        groups: usize,
        /// Kept groups of the rule.
        groups_kept: usize,
    },
    /// As many biases as experts are needed.
    #[error("{found} correction biases for {experts} experts")]
    BiasLength {
        /// Experts of the layer.
        experts: usize,
        /// Biases given.
        found: usize,
    },
}

impl GatingRule {
    /// Refuses a rule that cannot choose `top_k` of `experts`.
    pub fn check(&self, experts: usize) -> Result<(), GatingError> {
        let fits = self.groups > 0
            && experts > 0
            && experts.is_multiple_of(self.groups)
            && (1..=self.groups).contains(&self.groups_kept)
            && self.top_k > 0
            && self.top_k <= experts / self.groups * self.groups_kept;
        if fits {
            return Ok(());
        }
        let Self { top_k, groups, groups_kept, .. } = *self;
        Err(GatingError::Rule { experts, top_k, groups, groups_kept })
    }
}

/// Buffers of [`select`], reused from row to row.
#[derive(Debug, Default)]
pub struct GatingScratch {
    scores: Vec<f32>,
    choice: Vec<f32>,
    groups: Vec<f32>,
}

/// Chooses experts for one row. `out` receives them in rank order: descending choice score, ties to the lowest id.
///
/// `bias` is added to the scores for the choice only; weights come from the plain scores.
pub fn select(
    rule: &GatingRule,
    logits: &[f32],
    bias: Option<&[f32]>,
    scratch: &mut GatingScratch,
    out: &mut Vec<Selected>,
) -> Result<(), GatingError> {
    out.clear();
    rule.check(logits.len())?;
    if let Some(bias) = bias
        && bias.len() != logits.len()
    {
        return Err(GatingError::BiasLength { experts: logits.len(), found: bias.len() });
    }
    if let Some(expert) = logits.iter().position(|l| !l.is_finite()) {
        return Err(GatingError::NonFinite { expert });
    }
    let GatingScratch { scores, choice, groups } = scratch;
    scores.clear();
    scores.extend_from_slice(logits);
    match rule.score {
        Score::Softmax => math::softmax(scores),
        Score::Sigmoid => scores.iter_mut().for_each(|s| *s = math::sigmoid(*s)),
    }
    choice.clear();
    match bias {
        Some(bias) => choice.extend(scores.iter().zip(bias).map(|(s, b)| s + b)),
        None => choice.extend_from_slice(scores),
    }
    if let Some(expert) = choice.iter().position(|c| !c.is_finite()) {
        return Err(GatingError::NonFinite { expert });
    }
    if rule.groups_kept < rule.groups {
        mask_groups(rule, choice, groups);
    }
    for _ in 0..rule.top_k {
        let expert = take_largest(choice);
        let id = u32::try_from(expert).expect("experts of a layer are counted in u32");
        out.push(Selected { expert: id, weight: scores[expert] });
    }
    weigh(rule, out);
    Ok(())
}

/// Index of the largest value, the lowest one among equals; it is struck out.
fn take_largest(values: &mut [f32]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    values[best] = f32::NEG_INFINITY;
    best
}

/// Strikes out every expert of the groups that are not kept. A group scores the sum of its two best choices.
fn mask_groups(rule: &GatingRule, choice: &mut [f32], groups: &mut Vec<f32>) {
    let size = choice.len() / rule.groups;
    groups.clear();
    groups.extend(choice.chunks(size).map(|group| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &c in group {
            if c > first {
                (first, second) = (c, first);
            } else if c > second {
                second = c;
            }
        }
        if size == 1 { first } else { first + second }
    }));
    for _ in 0..rule.groups_kept {
        take_largest(groups);
    }
    // The kept ones are now -infinity; no other can be, since every choice is finite.
    for (group, score) in choice.chunks_mut(size).zip(groups.iter()) {
        if *score > f32::NEG_INFINITY {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

fn weigh(rule: &GatingRule, chosen: &mut [Selected]) {
    if rule.normalise {
        let mut total = 0.0;
        for selected in chosen.iter() {
            total += selected.weight;
        }
        total += rule.normalise_eps;
        for selected in chosen.iter_mut() {
            selected.weight /= total;
        }
    }
    for selected in chosen.iter_mut() {
        selected.weight *= rule.scale;
    }
}

#[cfg(test)]
mod tests;
