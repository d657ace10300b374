//! The engine: one step thread that owns the model's trunk, the KV cache and every running sequence.
//!
//! Clients hold an [`EngineHandle`]; any number of threads or tasks may clone it.

mod config;
mod events;
mod handle;

pub use config::{ConfigError, EngineConfig, ModelInfo};
pub use events::{
    Event, EventSender, EventStream, FinishReason, Finished, GenerationError, PositionLogprobs,
    Timings, TokenLogprob, Usage, WorkerTimings, event_channel,
};
pub use handle::{EngineHandle, MAX_LOGPROBS, MAX_STOP_STRINGS, ScoreError, SubmitError};
