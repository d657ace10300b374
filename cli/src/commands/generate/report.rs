//! What a generation gave, as JSON and as a line for people.

use serde_json::{Value, json};
use shimmer_proto::v1::{
    Delta, Fingerprint, FinishReason, Finished, PositionLogprobs, Started, Timings, TokenLogprob,
    Usage,
};

/// Everything a generation said.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Events so far.
    pub events: u64,
    pub started: Started,
    pub tokens: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<PositionLogprobs>,
    pub finished: Option<Finished>,
}

impl Report {
    pub(super) fn add(&mut self, delta: Delta) {
        self.tokens.extend(delta.token_ids);
        self.text.push_str(&delta.text);
        self.logprobs.extend(delta.logprobs);
    }

    pub(crate) fn usage(&self) -> Usage {
        self.finished.as_ref().and_then(|finished| finished.usage).unwrap_or_default()
    }

    pub(crate) fn timings(&self) -> Timings {
        self.finished.as_ref().and_then(|finished| finished.timings.clone()).unwrap_or_default()
    }

    /// Digest over all logits and tokens; empty when it was not asked for.
    pub fn logits_sha256(&self) -> &str {
        self.finished
            .as_ref()
            .and_then(|finished| finished.logits_sha256.as_deref())
            .unwrap_or_default()
    }

    /// Prompt tokens per second until the first generated token.
    pub fn prefill_rate(&self) -> Option<f64> {
        rate(self.usage().prompt_tokens, self.timings().prefill_ms)
    }

    /// Generated tokens per second after the first, which prefill gives.
    pub fn decode_rate(&self) -> Option<f64> {
        rate(self.usage().completion_tokens.saturating_sub(1), self.timings().decode_ms)
    }

    /// One object with everything.
    pub fn json(&self) -> Value {
        let finished = self.finished.clone().unwrap_or_default();
        let (usage, timings) = (self.usage(), self.timings());
        let Fingerprint { container_digest, math_id, build } =
            self.started.fingerprint.clone().unwrap_or_default();
        let mut value = json!({
            "request_id": self.started.request_id,
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": reason(finished.reason()),
            "matched_stop": finished.matched_stop,
            "logits_sha256": finished.logits_sha256,
            "fingerprint": { "container_digest": container_digest, "math_id": math_id, "build": build },
            "seed": self.started.seed,
            "max_tokens": self.started.max_tokens,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "timings": {
                "queue_ms": timings.queue_ms,
                "prefill_ms": timings.prefill_ms,
                "decode_ms": timings.decode_ms,
                "prefill_tokens_per_s": self.prefill_rate(),
                "decode_tokens_per_s": self.decode_rate(),
            },
            "workers": timings.workers.iter().map(|worker| json!({
                "worker_id": worker.worker_id,
                "results": worker.results,
                "expert_rows": worker.expert_rows,
                "compute_ms": worker.compute_ms,
                "wait_ms": worker.wait_ms,
            })).collect::<Vec<_>>(),
        });
        if !self.logprobs.is_empty() {
            value["logprobs"] = self.logprobs.iter().map(position).collect();
        }
        value
    }

    /// One line for a person.
    pub fn summary(&self) -> String {
        let usage = self.usage();
        let rate = |rate: Option<f64>| {
            rate.map_or_else(String::new, |rate| format!(" ({rate:.1} tokens/s)"))
        };
        format!(
            "{} prompt tokens{}, {} generated{}, {}",
            usage.prompt_tokens,
            rate(self.prefill_rate()),
            usage.completion_tokens,
            rate(self.decode_rate()),
            reason(self.finished.as_ref().map(Finished::reason).unwrap_or_default()),
        )
    }
}

fn rate(tokens: u32, milliseconds: f64) -> Option<f64> {
    (tokens > 0 && milliseconds > 0.0).then(|| f64::from(tokens) * 1000.0 / milliseconds)
}

fn reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Unspecified => "unspecified",
    }
}

fn position(position: &PositionLogprobs) -> Value {
    json!({
        "chosen": position.chosen.as_ref().map(token),
        "top": position.top.iter().map(token).collect::<Vec<_>>(),
    })
}

fn token(token: &TokenLogprob) -> Value {
    json!({ "token_id": token.token_id, "logprob": token.logprob, "bytes": hex::encode(&token.token_bytes) })
}
