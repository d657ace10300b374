//! How the step loop talks to workers.
//!
//! The step loop is a plain thread: it queues work on every worker, computes its own share, and then waits for replies in
//! whatever order they come. [`ExpertTransport`] is the seam: sockets and in-process workers implement it alike.
//! [`Exchange`] is one layer's round: cut the rows by owner, send, compute meanwhile, receive, combine exactly; and what it
//! does when a worker is lost, late or wrong.

mod exchange;
mod hints;
mod plan;
mod policy;
mod recipients;
mod wrapped;

use std::fmt;
use std::time::{Duration, Instant};

use shimmer_proto::expert::v1::{ExpertResult, ExpertWork, PrefetchHint, WorkerError};

pub use exchange::{
    Exchange, LayerRound, Reach, StepTrace, TracedAnswer, TracedRound, TracedWork, WorkerStats,
};
pub use hints::Hints;
pub use policy::{FaultCounts, FaultPolicy};
pub use wrapped::{Wrapped, Wrapper};

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

/// Whether a worker can be asked now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Takes work.
    Serving,
    /// Takes work, but owes answers for longer than is usual for it: only if nobody else can.
    Suspect,
    /// Takes none.
    Away,
}

/// How a worker answers beside what is usual for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pace {
    /// As ever.
    #[default]
    Usual,
    /// Several times slower than before, and than others: copies on other workers are asked instead.
    Slow,
    /// And that has cost so much that others may read its experts from their drives.
    Costly,
}

/// Carries expert work to workers and results back. Called from the step thread only; nothing here is async.
pub trait ExpertTransport: Send + fmt::Debug {
    /// Every worker that has a place, serving or not. The list changes between steps only; a place that was given to another
    /// worker is told by [`Self::take_reseated`].
    fn workers(&self) -> &[WorkerInfo];

    /// The time, by which everything is measured that is said to this transport.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Called before each step: a placement that everybody has loaded comes into force here, and new workers take
    /// their places. Between two calls placement, fence and the list of workers are the same.
    fn between_steps(&mut self) {}

    /// Says whether any request is under way. While none is, a worker that wants to leave is let go at once.
    fn running(&mut self, _any: bool) {}

    /// Places that were given to another worker since this was asked last: what was known of the one before is void.
    fn take_reseated(&mut self) -> Vec<usize> {
        Vec::new()
    }

    /// Workers that hold an expert under the placement in force, first choice first, serving or not.
    fn copies(&self, layer: u32, expert: u32) -> &[usize];

    /// The first of [`Self::copies`] that can be asked.
    fn owner(&self, layer: u32, expert: u32) -> Option<usize> {
        let copies = self.copies(layer, expert);
        let standing = |wanted| copies.iter().copied().find(|&w| self.standing(w) == wanted);
        standing(Standing::Serving).or_else(|| standing(Standing::Suspect))
    }

    /// Whether a worker can be asked now.
    fn standing(&self, worker: usize) -> Standing;

    /// Workers that are not away and could read a layer's experts from their own drive, best first. They may or may not
    /// hold some of its experts already.
    fn stand_ins(&self, _layer: u32) -> Vec<usize> {
        Vec::new()
    }

    /// Lets a worker stand in for owners of these experts, ascending, with the work that is sent to it next. They stay
    /// adopted until another placement comes into force; the number of those that were not before.
    fn adopt(
        &mut self,
        worker: usize,
        _layer: u32,
        _experts: &[u32],
    ) -> Result<usize, TransportError> {
        let detail = "it cannot stand in for others".to_owned();
        Err(TransportError::Lost { worker, detail })
    }

    /// Takes note that so many rows of a step go to an expert.
    fn used(&mut self, _layer: u32, _expert: u32, _rows: u32) {}

    /// How long a worker took at most lately for work of so many rows; none while that is not known.
    fn usual(&self, _worker: usize, _rows: u32) -> Option<Duration> {
        None
    }

    /// How a worker answers lately.
    fn pace(&self, _worker: usize) -> Pace {
        Pace::Usual
    }

    /// Whether a worker owes no answer, awaited or not.
    fn owes_nothing(&self, _worker: usize) -> bool {
        true
    }

    /// Says that a worker owes an answer for longer than is usual. It is [`Standing::Suspect`] until it answers anything,
    /// and is asked by other means whether it is alive; if not, it is lost.
    fn suspect(&mut self, _worker: usize) {}

    /// Lets a worker prove that it computes these experts as the container says, because it and another one disagree. If it
    /// fails it is quarantined and reported lost; if not, nothing is heard of it.
    fn contest(&mut self, _worker: usize, _layer: u32, _experts: &[u32]) {}

    /// Takes a worker out of service because it computes differently, until an operator readmits it.
    fn quarantine(&mut self, worker: usize, reason: &str) {
        self.give_up(worker, reason);
    }

    /// Whether a worker is out of service because it computes differently.
    fn is_quarantined(&self, _worker: usize) -> bool {
        false
    }

    /// Computes work on the coordinator's own copy of the experts, on the calling thread. None without such a copy.
    fn own_copy(&mut self, _work: &ExpertWork) -> Option<Result<ExpertResult, WorkerError>> {
        None
    }

    /// Whether [`Self::own_copy`] would compute experts of a layer.
    fn has_own_copy(&self, _layer: u32) -> bool {
        false
    }

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
