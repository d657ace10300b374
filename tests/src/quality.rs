//! How far one set of logits is from another: Kullback-Leibler divergence, agreement of the best token, perplexity.

#![expect(
    clippy::disallowed_methods,
    reason = "a measurement within bounds may use the platform's functions"
)]

use crate::reference::ops::count;

/// How a set of logits compares with a better one.
#[derive(Debug, Clone, Copy)]
pub struct Comparison {
    /// Mean over positions of KL(better || worse), nats.
    pub mean_kl: f64,
    /// Share of positions whose best token is the same.
    pub top1: f64,
    /// Largest difference of a logit.
    pub max_difference: f64,
}

/// Compares position by position.
///
/// # Panics
/// The sets have different shapes.
pub fn compare(better: &[Vec<f32>], worse: &[Vec<f32>]) -> Comparison {
    assert_eq!(better.len(), worse.len(), "both sets have every position");
    let positions = count(better.len());
    let pairs = || better.iter().zip(worse);
    let differences =
        pairs().flat_map(|(p, q)| p.iter().zip(q).map(|(p, q)| f64::from((p - q).abs())));
    Comparison {
        mean_kl: pairs().map(|(p, q)| kl(p, q)).sum::<f64>() / positions,
        top1: count(pairs().filter(|(p, q)| best(p) == best(q)).count()) / positions,
        max_difference: differences.fold(0.0, f64::max),
    }
}

/// KL(p || q) of the distributions of two rows of logits, nats.
pub fn kl(p: &[f32], q: &[f32]) -> f64 {
    assert_eq!(p.len(), q.len(), "both rows have the whole vocabulary");
    let (of_p, of_q) = (log_sum_exp(p), log_sum_exp(q));
    let term = |(p, q): (&f32, &f32)| {
        let (p, q) = (f64::from(*p) - of_p, f64::from(*q) - of_q);
        p.exp() * (p - q)
    };
    p.iter().zip(q).map(term).sum()
}

/// e to the mean negative log-likelihood of each token after the first.
pub fn perplexity(logits: &[Vec<f32>], ids: &[u32]) -> f64 {
    let surprise =
        |(row, &next): (&Vec<f32>, &u32)| log_sum_exp(row) - f64::from(row[next as usize]);
    let total: f64 = logits.iter().zip(&ids[1..]).map(surprise).sum();
    (total / count(ids.len() - 1)).exp()
}

/// log of the sum of e^x.
pub fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(max) + row.iter().map(|x| f64::from(x - max).exp()).sum::<f64>().ln()
}

/// Index of the largest value, the lowest among equals.
pub fn best(row: &[f32]) -> usize {
    let better = |best: usize, index: usize| if row[index] > row[best] { index } else { best };
    (1..row.len()).fold(0, better)
}
