//! Log-probabilities under the raw logits, before bias, penalties and temperature.

use shimmer_kernels::math;

/// Log-probabilities of one position.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most likely tokens, best first; ties by the lower id.
    pub top: Vec<(u32, f32)>,
}

/// Log-softmax of finite logits at the chosen token and at the `count` best. The sum is f64 in ascending order of id; the
/// logarithm is the pure-Rust one.
pub fn log_probabilities(logits: &[f32], chosen: u32, count: usize) -> LogProbabilities {
    let largest = math::max(logits);
    let mut sum = 0.0_f64;
    for &logit in logits {
        sum += f64::from(math::exp(logit - largest));
    }
    let log_sum = libm::log(sum);
    #[expect(clippy::cast_possible_truncation, reason = "reported in f32")]
    let log_probability =
        |token: u32| (f64::from(logits[token as usize] - largest) - log_sum) as f32;
    let mut ranked: Vec<u32> = (0_u32..).zip(logits).map(|(token, _)| token).collect();
    let by_rank = |a: &u32, b: &u32| {
        let (left, right) = (logits[*a as usize], logits[*b as usize]);
        right.partial_cmp(&left).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b))
    };
    if count > 0 && count < ranked.len() {
        ranked.select_nth_unstable_by(count - 1, by_rank);
    }
    ranked.truncate(count);
    ranked.sort_unstable_by(by_rank);
    LogProbabilities {
        chosen: log_probability(chosen),
        top: ranked.into_iter().map(|token| (token, log_probability(token))).collect(),
    }
}
