//! A finished span.

use std::time::SystemTime;

use super::TraceContext;

/// Names of all spans. docs/TRACES.md has a table of them.
pub mod names {
    /// A call of `shimmer generate`.
    pub const GENERATE: &str = "generate";
    /// A request at the coordinator.
    pub const REQUEST: &str = "request";
    /// Text or chat to token ids.
    pub const TOKENIZE: &str = "tokenize";
    /// The wait for a place in the batch.
    pub const QUEUE: &str = "queue";
    /// A step with rows of the prompt.
    pub const PREFILL_CHUNK: &str = "prefill_chunk";
    /// A step behind the prompt.
    pub const DECODE_STEP: &str = "decode_step";
    /// The round of one layer with its workers.
    pub const LAYER: &str = "layer";
    /// One message to one worker, until its answer.
    pub const WORKER: &str = "worker";
    /// The work at the worker.
    pub const EXPERT_WORK: &str = "expert_work";
    /// The wait for experts that were not in memory.
    pub const TIER_READ: &str = "tier_read";
    /// All of them.
    pub const ALL: [&str; 10] = [
        GENERATE,
        REQUEST,
        TOKENIZE,
        QUEUE,
        PREFILL_CHUNK,
        DECODE_STEP,
        LAYER,
        WORKER,
        EXPERT_WORK,
        TIER_READ,
    ];
}

/// On which side of a call a span stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Within a process.
    Internal,
    /// Waits for another process.
    Client,
    /// Answers another process.
    Server,
}

/// Value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A count or a time.
    Int(i64),
    /// A name.
    Text(String),
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Int(i64::from(value))
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::from(value as u64)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

/// A finished span.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanRecord {
    /// Its ids.
    pub context: TraceContext,
    /// The span above; 0 for none.
    pub parent: u64,
    /// The span above belongs to another process.
    pub remote: bool,
    /// One of [`names`].
    pub name: &'static str,
    /// Which side.
    pub kind: Kind,
    /// Begin and end.
    pub time: [SystemTime; 2],
    /// What is known of it.
    pub attributes: Vec<(&'static str, Value)>,
    /// Another span that it shares its work with.
    pub link: Option<TraceContext>,
    /// What failed.
    pub error: Option<String>,
}

impl SpanRecord {
    /// A span below another one of the same process.
    pub fn below(
        above: TraceContext,
        span: u64,
        name: &'static str,
        time: [SystemTime; 2],
        attributes: Vec<(&'static str, Value)>,
    ) -> Self {
        Self {
            context: TraceContext { span, ..above },
            parent: above.span,
            remote: false,
            name,
            kind: Kind::Internal,
            time,
            attributes,
            link: None,
            error: None,
        }
    }
}
