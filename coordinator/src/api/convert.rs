//! The engine's events as messages of the wire.

use bytes::Bytes;
use shimmer_proto::v1;

use crate::engine::{
    FinishReason, Finished, PositionLogprobs, Timings, TokenLogprob, Usage, WorkerTimings,
};

pub(super) fn finished(event: Finished) -> v1::Finished {
    let reason = match event.reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
        FinishReason::Cancelled => v1::FinishReason::Cancelled,
    };
    v1::Finished {
        reason: reason.into(),
        matched_stop: event.matched_stop,
        usage: Some(usage(event.usage)),
        timings: Some(timings(event.timings)),
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

fn timings(timings: Timings) -> v1::Timings {
    v1::Timings {
        queue_ms: timings.queue_ms,
        prefill_ms: timings.prefill_ms,
        decode_ms: timings.decode_ms,
        workers: timings.workers.into_iter().map(worker).collect(),
    }
}

fn worker(worker: WorkerTimings) -> v1::WorkerTimings {
    v1::WorkerTimings {
        worker_id: worker.worker_id,
        results: worker.results,
        expert_rows: worker.expert_rows,
        compute_ms: worker.compute_ms,
        wait_ms: worker.wait_ms,
    }
}
