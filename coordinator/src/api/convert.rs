//! The engine's events as messages of the wire.

use bytes::Bytes;
use shimmer_proto::v1;

use super::ClusterStatus;
use crate::engine::{
    FinishReason, Finished, PositionLogprobs, Timings, TokenLogprob, Usage, WorkerTimings,
};

/// `cluster` knows the names of workers that the engine knows by address.
pub(super) fn finished(event: Finished, cluster: &ClusterStatus) -> v1::Finished {
    let reason = match event.reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
        FinishReason::Cancelled => v1::FinishReason::Cancelled,
    };
    v1::Finished {
        reason: reason.into(),
        matched_stop: event.matched_stop,
        usage: Some(usage(event.usage)),
        timings: Some(timings(event.timings, cluster)),
        logits_sha256: event.logits_sha256,
    }
}

pub(super) fn logprobs(position: PositionLogprobs) -> v1::PositionLogprobs {
    v1::PositionLogprobs {
        chosen: Some(token_logprob(position.chosen)),
        top: position.top.into_iter().map(token_logprob).collect(),
    }
}

fn token_logprob(token: TokenLogprob) -> v1::TokenLogprob {
    v1::TokenLogprob {
        token_id: token.token_id,
        logprob: token.logprob,
        token_bytes: Bytes::from(token.token_bytes),
    }
}

fn usage(usage: Usage) -> v1::Usage {
    v1::Usage { prompt_tokens: usage.prompt_tokens, completion_tokens: usage.completion_tokens }
}

fn timings(timings: Timings, cluster: &ClusterStatus) -> v1::Timings {
    v1::Timings {
        queue_ms: timings.queue_ms,
        prefill_ms: timings.prefill_ms,
        decode_ms: timings.decode_ms,
        workers: timings.workers.into_iter().map(|timing| worker(timing, cluster)).collect(),
    }
}

fn worker(timing: WorkerTimings, cluster: &ClusterStatus) -> v1::WorkerTimings {
    let named = |status: &&v1::WorkerStatus| {
        status.endpoint == timing.worker_id && !status.worker_id.is_empty()
    };
    let name = cluster.workers.iter().find(named).map(|status| status.worker_id.clone());
    v1::WorkerTimings {
        worker_id: name.unwrap_or(timing.worker_id),
        results: timing.results,
        expert_rows: timing.expert_rows,
        compute_ms: timing.compute_ms,
        wait_ms: timing.wait_ms,
    }
}
