//! How long requests took and how large they were, as gateways and dashboards ask for it.
//!
//! Counted on the step thread at the moments that a request has anyway: it is admitted, a token is sampled, it ends. That
//! is one reading of the clock and a few additions per token; nothing is allocated.

use std::time::Duration;

use serde::Serialize;

use super::events::FinishReason;

/// Upper bounds of durations in milliseconds, from a token of a small model to minutes in a queue. One more bucket has no
/// bound.
pub const LATENCY_BOUNDS_MS: [u32; BOUNDS] = [
    1, 5, 10, 25, 50, 75, 100, 150, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000,
    160_000, 320_000, 640_000, 1_280_000,
];

/// Upper bounds of token counts, 2^0 to 2^20: longer than any context. One more bucket has no bound.
pub const TOKEN_BOUNDS: [u32; BOUNDS] = {
    let mut bounds = [1; BOUNDS];
    let mut at = 1;
    while at < BOUNDS {
        bounds[at] = bounds[at - 1] * 2;
        at += 1;
    }
    bounds
};

const BOUNDS: usize = 21;

/// How often a value fell into each bucket. The last one takes what is above all bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Spread {
    /// By bucket, not added up.
    pub counts: [u64; BOUNDS + 1],
    /// All values together: tokens, or microseconds.
    pub sum: u64,
}

impl Spread {
    fn count_time(&mut self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = LATENCY_BOUNDS_MS.partition_point(|&bound| u64::from(bound) * 1000 < us);
        self.counts[bucket] += 1;
        self.sum = self.sum.saturating_add(us);
    }

    fn count_tokens(&mut self, tokens: u32) {
        let bucket = TOKEN_BOUNDS.partition_point(|&bound| bound < tokens);
        self.counts[bucket] += 1;
        self.sum = self.sum.saturating_add(u64::from(tokens));
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn since(&self, earlier: &Self) -> Self {
        let counts = std::array::from_fn(|bucket| self.counts[bucket] - earlier.counts[bucket]);
        Self { counts, sum: self.sum - earlier.sum }
    }
}

/// Requests since the engine started. Scoring is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestStats {
    /// From the acceptance to a place in the batch.
    pub queue: Spread,
    /// From the acceptance to the first token.
    pub first_token: Spread,
    /// From a token to the next one of the same request.
    pub between_tokens: Spread,
    /// Mean of that over each request that had two tokens.
    pub per_token: Spread,
    /// From the place in the batch to the first token.
    pub prefill: Spread,
    /// From the first token to the end.
    pub decode: Spread,
    /// From the place in the batch to the end.
    pub inference: Spread,
    /// From the acceptance to the end.
    pub whole: Spread,
    /// Tokens of prompts.
    pub prompt: Spread,
    /// Tokens of answers.
    pub answer: Spread,
    /// Tokens of the prompts whose first token was sampled.
    pub prompt_tokens: u64,
    /// Ended by an end token, a stop string or a stop token.
    pub stopped: u64,
    /// Ended by their limit.
    pub full: u64,
    /// Ended because nobody wanted them any more.
    pub aborted: u64,
    /// Failed.
    pub failed: u64,
}

/// A request that ends, in numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndedRequest {
    pub(super) reason: FinishReason,
    pub(super) prompt_tokens: u32,
    pub(super) answer_tokens: u32,
    /// From its acceptance to the end.
    pub(super) whole: Duration,
    /// From its place in the batch to the end; none for one that never had a place.
    pub(super) inference: Option<Duration>,
    /// From its first token to the end; none without a token.
    pub(super) decode: Option<Duration>,
    /// Mean time between its tokens; none with fewer than two.
    pub(super) per_token: Option<Duration>,
}

impl RequestStats {
    /// A request got a place in the batch after this time.
    pub(super) fn admitted(&mut self, waited: Duration) {
        self.queue.count_time(waited);
    }

    /// The first token of a request with such a prompt was sampled.
    pub(super) fn first_token(&mut self, after: Duration, prompt_tokens: u32) {
        self.first_token.count_time(after);
        self.prompt_tokens += u64::from(prompt_tokens);
    }

    /// A later token was sampled.
    pub(super) fn next_token(&mut self, after: Duration) {
        self.between_tokens.count_time(after);
    }

    /// A request ended in a way that its client is told as an end.
    pub(super) fn ended(&mut self, request: &EndedRequest) {
        match request.reason {
            FinishReason::Stop => self.stopped += 1,
            FinishReason::Length => self.full += 1,
            FinishReason::Cancelled => self.aborted += 1,
        }
        self.whole.count_time(request.whole);
        self.prompt.count_tokens(request.prompt_tokens);
        self.answer.count_tokens(request.answer_tokens);
        if let Some(inference) = request.inference {
            self.inference.count_time(inference);
            let decode = request.decode.unwrap_or_default();
            self.prefill.count_time(inference.saturating_sub(decode));
        }
        if let Some(decode) = request.decode {
            self.decode.count_time(decode);
        }
        if let Some(per_token) = request.per_token {
            self.per_token.count_time(per_token);
        }
    }

    /// What happened after an earlier moment of the same engine.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            queue: self.queue.since(&earlier.queue),
            first_token: self.first_token.since(&earlier.first_token),
            between_tokens: self.between_tokens.since(&earlier.between_tokens),
            per_token: self.per_token.since(&earlier.per_token),
            prefill: self.prefill.since(&earlier.prefill),
            decode: self.decode.since(&earlier.decode),
            inference: self.inference.since(&earlier.inference),
            whole: self.whole.since(&earlier.whole),
            prompt: self.prompt.since(&earlier.prompt),
            answer: self.answer.since(&earlier.answer),
            prompt_tokens: self.prompt_tokens - earlier.prompt_tokens,
            stopped: self.stopped - earlier.stopped,
            full: self.full - earlier.full,
            aborted: self.aborted - earlier.aborted,
            failed: self.failed - earlier.failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(spread: Spread) -> usize {
        assert_eq!(spread.count(), 1);
        spread.counts.iter().position(|&count| count == 1).unwrap()
    }

    fn check_time(us: u64, expected: usize) {
        let mut spread = Spread::default();
        spread.count_time(Duration::from_micros(us));
        assert_eq!((bucket(spread), spread.sum), (expected, us), "{us}");
    }

    fn check_tokens(tokens: u32, expected: usize) {
        let mut spread = Spread::default();
        spread.count_tokens(tokens);
        assert_eq!((bucket(spread), spread.sum), (expected, u64::from(tokens)), "{tokens}");
    }

    #[test]
    fn bounds_belong_to_their_bucket_and_reach_into_minutes() {
        check_time(0, 0);
        check_time(1_000, 0);
        check_time(1_001, 1);
        check_time(640_000_000, 19);
        check_time(1_280_000_000, 20);
        check_time(1_280_000_001, 21);
        check_tokens(0, 0);
        check_tokens(1, 0);
        check_tokens(2, 1);
        check_tokens(3, 2);
        check_tokens(1 << 20, 20);
        check_tokens((1 << 20) + 1, 21);
        assert!(LATENCY_BOUNDS_MS.is_sorted_by(|a, b| a < b));
        assert!(TOKEN_BOUNDS.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn what_never_was_is_not_counted() {
        let mut stats = RequestStats::default();
        let second = Duration::from_secs(1);
        let queued = EndedRequest {
            reason: FinishReason::Cancelled,
            prompt_tokens: 3,
            answer_tokens: 0,
            whole: second,
            inference: None,
            decode: None,
            per_token: None,
        };
        stats.ended(&queued);
        assert_eq!((stats.aborted, stats.whole.count()), (1, 1));
        assert_eq!((stats.inference.count(), stats.decode.count()), (0, 0));
        let before = stats;
        stats.ended(&EndedRequest {
            reason: FinishReason::Length,
            answer_tokens: 1,
            whole: second * 6,
            inference: Some(second * 5),
            decode: Some(second * 2),
            ..queued
        });
        let between = stats.since(&before);
        assert_eq!((between.full, between.aborted), (1, 0));
        assert_eq!(between.prefill.sum, 3_000_000);
        assert_eq!((between.decode.sum, between.per_token.count()), (2_000_000, 0));
    }
}
