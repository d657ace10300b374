//! What the engine has done, published by the step thread.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::events::FinishReason;
use super::refusals::RefusedRequests;
use super::requests::{EndedRequest, RequestStats};
use crate::dispatch::{FaultCounts, WorkerStats};
use crate::histogram::Histogram;
use crate::prediction::Recall;

/// Counts since the engine started, and how things stand. Differences of two moments say what happened between them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineStats {
    /// Steps of decode rows alone.
    pub decode_steps: u64,
    /// Steps with prompt rows.
    pub prefill_steps: u64,
    /// Rows of generated tokens.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prefill_rows: u64,
    /// Tokens sampled.
    pub generated_tokens: u64,
    /// Generations that ended by a stop or their length.
    pub finished: u64,
    /// Generations that were cancelled.
    pub cancelled: u64,
    /// Generations that failed.
    pub failed: u64,
    /// Sequences in the batch now.
    pub running: u64,
    /// Sequences in the queue now.
    pub waiting: u64,
    /// Sequences that the queue takes.
    pub waiting_limit: u64,
    /// KV pages.
    pub kv_pages: u64,
    /// KV pages that no sequence has now.
    pub kv_pages_free: u64,
    /// Wall time of the steps of decode rows alone, from their plan to their tokens.
    pub decode_step: Histogram,
    /// Wall time that each layer's round stood still for workers after the coordinator's own share of it.
    pub layer_wait: Histogram,
    /// What every worker did, in the order of the transport.
    pub workers: Vec<WorkerStats>,
    /// What went wrong with workers and was answered.
    pub faults: FaultCounts,
    /// How often predictions of the next layer's experts came true. Stays empty while no worker wants hints.
    pub recall: Recall,
    /// Hints sent.
    pub hints: u64,
    /// How long requests took, and how large they were.
    pub requests: RequestStats,
    /// Requests that were not queued.
    pub refused: RefusedRequests,
}

impl EngineStats {
    /// What happened after an earlier moment of the same engine; how things stand is as it is now.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let worker = |(now, before): (&WorkerStats, &WorkerStats)| WorkerStats {
            // A place that another worker has now counts anew.
            results: now.results.saturating_sub(before.results),
            expert_rows: now.expert_rows.saturating_sub(before.expert_rows),
            compute: now.compute.saturating_sub(before.compute),
            wait: now.wait.saturating_sub(before.wait),
        };
        // Workers that joined in between have no earlier figures.
        let before = earlier.workers.iter().chain(std::iter::repeat(&NONE));
        Self {
            decode_steps: self.decode_steps - earlier.decode_steps,
            prefill_steps: self.prefill_steps - earlier.prefill_steps,
            decode_rows: self.decode_rows - earlier.decode_rows,
            prefill_rows: self.prefill_rows - earlier.prefill_rows,
            generated_tokens: self.generated_tokens - earlier.generated_tokens,
            finished: self.finished - earlier.finished,
            cancelled: self.cancelled - earlier.cancelled,
            failed: self.failed - earlier.failed,
            decode_step: self.decode_step.since(&earlier.decode_step),
            layer_wait: self.layer_wait.since(&earlier.layer_wait),
            workers: self.workers.iter().zip(before).map(worker).collect(),
            recall: self.recall.since(&earlier.recall),
            hints: self.hints - earlier.hints,
            faults: self.faults.since(&earlier.faults),
            requests: self.requests.since(&earlier.requests),
            refused: self.refused.since(&earlier.refused),
            ..*self
        }
    }

    /// Notes a generation that ended otherwise than by a failure.
    pub(super) fn ended(&mut self, request: &EndedRequest) {
        match request.reason {
            FinishReason::Cancelled => self.cancelled += 1,
            FinishReason::Stop | FinishReason::Length => self.finished += 1,
        }
        self.requests.ended(request);
    }

    /// Notes a generation or a scoring that failed.
    pub(super) fn failed(&mut self, generation: bool) {
        self.failed += 1;
        self.requests.failed += u64::from(generation);
    }

    /// Notes a step that has ended.
    #[inline(never)]
    pub(super) fn step(
        &mut self,
        prefill_rows: usize,
        decode_rows: usize,
        tokens: usize,
        wall: Duration,
    ) {
        if prefill_rows > 0 {
            self.prefill_steps += 1;
        } else {
            self.decode_steps += 1;
            self.decode_step.observe(wall);
        }
        self.prefill_rows += prefill_rows as u64;
        self.decode_rows += decode_rows as u64;
        self.generated_tokens += tokens as u64;
    }
}

/// Of a worker that was not there.
const NONE: WorkerStats =
    WorkerStats { results: 0, expert_rows: 0, compute: Duration::ZERO, wait: Duration::ZERO };

/// The one place where they can be read.
#[derive(Clone, Debug, Default)]
pub(super) struct Published(Arc<Mutex<EngineStats>>);

impl Published {
    pub(super) fn put(&self, stats: &EngineStats) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone_from(stats);
    }

    pub(super) fn read(&self) -> EngineStats {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
