//! How the step loop talks to workers.
//!
//! The step loop is a plain thread: it queues work on every worker, computes its own share, and then waits for replies in
//! whatever order they come. [`ExpertTransport`] is the seam: sockets and in-process workers implement it alike.
//! [`Exchange`] is one layer's round: cut the rows by owner, send, compute meanwhile, receive, combine exactly.

mod exchange;
mod hints;
mod plan;

use std::fmt;
use std::time::Instant;

use shimmer_proto::expert::v1::{ExpertResult, ExpertWork, PrefetchHint, WorkerError};

pub use exchange::{Exchange, LayerRound, WorkerStats};
pub use hints::Hints;

/// A worker as the step loop sees it. Its place in [`ExpertTransport::workers`] is its index in every other call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Name from the worker's hello.
    pub id: String,
}

/// What one message to a worker, and its reply, may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartLimits {
    /// Largest distinct rows in one work message.
    pub max_rows: usize,
    /// Largest payload in bytes of one work message or one result; some headroom for the fields around it is already off.
    pub max_bytes: usize,
}

/// Why the transport could not carry work or a reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// Nothing arrived before the deadline.
    #[error("no worker answered before the deadline")]
    Timeout,
    /// The worker is gone, with everything that was outstanding on it.
    #[error("worker {worker} was lost: {detail}")]
    Lost {
        /// Index of the worker.
        worker: usize,
        /// What happened, for the client and the log.
        detail: String,
    },
    /// The transport was shut down.
    #[error("the worker transport is closed")]
    Closed,
}

/// Carries expert work to workers and results back. Called from the step thread only; nothing here is async.
pub trait ExpertTransport: Send + fmt::Debug {
    /// Every worker that was configured, serving or not. The list never changes.
    fn workers(&self) -> &[WorkerInfo];

    /// The serving worker that owns an expert under the current placement; none while no live worker has it.
    fn owner(&self, layer: u32, expert: u32) -> Option<usize>;

    /// Epoch and placement generation to stamp on work that is sent now.
    fn fence_base(&self) -> (u64, u64);

    /// Cap of messages to one worker.
    fn limits(&self, worker: usize) -> PartLimits;

    /// Queues work on a worker and returns at once. The transport fills in the checksum.
    fn send(&mut self, worker: usize, work: ExpertWork) -> Result<(), TransportError>;

    /// Whether hints to a worker are worth their bytes.
    fn wants_hints(&self, _worker: usize) -> bool {
        false
    }

    /// Queues a hint, ahead of the work that is sent next. The transport fills in the checksum. Nothing comes back, and a
    /// hint that gets lost is not missed.
    fn hint(&mut self, _worker: usize, _hint: PrefetchHint) {}

    /// Waits for the next reply of any worker. A loss is reported once, after the replies that came before it.
    fn receive(&mut self, deadline: Instant) -> Result<Reply, TransportError>;

    /// Says that a worker missed the deadline of a layer, so that the transport drops and re-establishes its session.
    fn give_up(&mut self, worker: usize, reason: &str);
}

/// One reply of a worker.
#[derive(Debug)]
pub struct Reply {
    /// Index of the worker.
    pub worker: usize,
    /// The result, or the worker's refusal of that work.
    pub outcome: Result<ExpertResult, WorkerError>,
}
