//! Limits of the engine and what it tells about its model.

use std::time::Duration;

use crate::dispatch::FaultPolicy;

/// Limits of the step loop. None of them changes a byte of any output.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Threads of the step's pool, the step thread's own work included.
    pub threads: usize,
    /// Most rows of one step, decode rows and prefill chunks together.
    pub max_batch_rows: usize,
    /// Most prompt rows of one sequence in one step.
    pub prefill_chunk: usize,
    /// Most sequences with a place in the batch; at most `max_batch_rows`, so that every one advances in every step.
    pub max_running: usize,
    /// Most generations that wait for a place; one more is refused.
    pub max_waiting: usize,
    /// Bytes of KV pages. The context is lowered to what one sequence alone can hold in them.
    pub kv_budget_bytes: u64,
    /// Lowers the context below the model's own limit.
    pub context_length: Option<u32>,
    /// Longest wait for the experts of one layer before the workers that still owe a result are given up.
    pub layer_deadline: Duration,
    /// What is done about workers that are late or wrong.
    pub faults: FaultPolicy,
    /// Most unread events of one client before its generation ends.
    pub max_unread_events: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            // Past a few hundred rows a matrix product is bound by arithmetic and larger steps only delay decode rows.
            max_batch_rows: 512,
            prefill_chunk: 256,
            max_running: 64,
            max_waiting: 256,
            kv_budget_bytes: 1 << 30,
            context_length: None,
            // Far above any honest layer, far below a client's patience.
            layer_deadline: Duration::from_secs(10),
            faults: FaultPolicy::default(),
            // One event per token: minutes of reading at ordinary speeds, about a megabyte of memory.
            max_unread_events: 16_384,
        }
    }
}

impl EngineConfig {
    /// Checks that the limits fit together.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = |field, value: usize| {
            if value == 0 { Err(ConfigError::Zero { field }) } else { Ok(()) }
        };
        positive("threads", self.threads)?;
        positive("max_batch_rows", self.max_batch_rows)?;
        positive("prefill_chunk", self.prefill_chunk)?;
        positive("max_running", self.max_running)?;
        positive("max_unread_events", self.max_unread_events)?;
        positive("context_length", self.context_length.map_or(1, |length| length as usize))?;
        if self.max_running > self.max_batch_rows {
            return Err(ConfigError::RunningAboveRows {
                running: self.max_running,
                rows: self.max_batch_rows,
            });
        }
        Ok(())
    }
}

/// Limits that do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A limit of zero would stop everything.
    #[error("{field} must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// Some running sequence would not fit in the step.
    #[error("max_running {running} is above max_batch_rows {rows}")]
    RunningAboveRows {
        /// The limit of sequences.
        running: usize,
        /// The limit of rows.
        rows: usize,
    },
}

/// What the engine tells about the model it runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelInfo {
    /// Family, as the checkpoint names it.
    pub architecture: String,
    /// Digest of the container, 64 hex digits.
    pub container_digest: String,
    /// Name of the arithmetic.
    pub math_id: String,
    /// Formats of weights, activations and KV cache.
    pub numeric_class: String,
    /// Most positions of one sequence, prompt and output together.
    pub context_length: u32,
    /// Tokens the head scores.
    pub vocab_size: u32,
    /// All layers.
    pub layers: u32,
    /// Layers with routed experts.
    pub moe_layers: u32,
    /// Routed experts over all layers.
    pub experts: u64,
    /// The model's own end tokens.
    pub end_token_ids: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut EngineConfig), expected: Result<(), ConfigError>) {
        let mut config = EngineConfig::default();
        change(&mut config);
        assert_eq!(config.validate(), expected);
    }

    #[test]
    fn limits_fit_together() {
        check(|_| {}, Ok(()));
        check(|c| c.threads = 0, Err(ConfigError::Zero { field: "threads" }));
        check(|c| c.context_length = Some(0), Err(ConfigError::Zero { field: "context_length" }));
        check(|c| c.max_waiting = 0, Ok(()));
        check(
            |c| (c.max_batch_rows, c.max_running) = (8, 9),
            Err(ConfigError::RunningAboveRows { running: 9, rows: 8 }),
        );
    }
}
