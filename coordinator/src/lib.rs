//! The coordinator: everything of a request but its experts.
//!
//! It turns requests into token rows, runs the dense trunk over them, picks experts, sends their rows to workers, adds the
//! results up exactly, samples and streams text back. It never computes a routed expert itself and never sees the worker
//! crate. Start reading at [`engine`] for the step loop, at [`dispatch`] for the seam to workers.

pub mod admin;
pub mod api;
pub mod chat_template;
pub mod detokenizer;
pub mod dispatch;
pub mod engine;
pub mod fence;
pub mod gating;
pub mod heat;
pub mod histogram;
pub mod journal;
pub mod kv_cache;
pub mod membership;
pub mod metrics;
pub mod placement;
pub mod prediction;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod stop;
pub mod tokenizer;
pub mod trace;
pub mod transport;
pub mod trunk;

#[cfg(test)]
mod test_support;
