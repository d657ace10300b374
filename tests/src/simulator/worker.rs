//! A model worker: the real rules about generations and fences around synthetic arithmetic.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use shimmer_proto::{
    expert::v1::{ErrorCode, ExpertResult, ExpertWork, Fence, WorkerError},
    membership::memory::MemoryStore,
};
use shimmer_worker::generations::{Generations, Stamp};

use super::{Mutation, arithmetic};

/// Experts by layer and number.
pub(super) type Owned = BTreeSet<(u32, u32)>;

/// What a coordinator says to a worker, in the order of the stream.
#[derive(Debug, Clone)]
pub(super) enum Order {
    Assign {
        stamp: Stamp,
        owned: Owned,
    },
    Release {
        stamp: Stamp,
    },
    Adopt {
        stamp: Stamp,
        owned: Owned,
    },
    Work(Box<ExpertWork>),
    /// To prove itself, because it and another one disagree.
    Prove,
}

/// What a worker says to work.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) outcome: Result<ExpertResult, WorkerError>,
    /// It is not what everybody else would say.
    pub(super) lies: bool,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (fence, what) = match &self.outcome {
            Ok(result) => (result.fence, "a result"),
            Err(error) => (error.fence, &*error.detail),
        };
        let Fence { step, layer, part, attempt, .. } = fence.unwrap_or_default();
        let lies = if self.lies { ", which is a lie" } else { "" };
        write!(f, "step {step}, layer {layer}, part {part}, attempt {attempt}: {what}{lies}")
    }
}

/// One process.
#[derive(Debug)]
pub(super) struct ModelWorker {
    pub(super) id: String,
    pub(super) host: String,
    pub(super) incarnation: u64,
    /// Its membership; none while the process is not there.
    pub(super) store: Option<MemoryStore>,
    /// Does nothing, and does not know.
    pub(super) paused: bool,
    pub(super) slow: bool,
    /// Most rows that it takes in one message.
    pub(super) max_rows: usize,
    /// Computes other bytes, and does not know.
    pub(super) lies: bool,
    /// By coordinator.
    pub(super) sessions: BTreeMap<usize, Session>,
    /// Orders that came for a session that is not this one, or work that no assignment admitted.
    pub(super) refused: u64,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) number: u64,
    /// Of the coordinator's run that opened it.
    pub(super) epoch: u64,
    pub(super) generations: Generations<Owned>,
}

impl ModelWorker {
    pub(super) fn is_alive(&self) -> bool {
        self.store.is_some()
    }

    pub(super) fn open(&mut self, coordinator: usize, number: u64, epoch: u64) {
        let session = Session { number, epoch, generations: Generations::default() };
        self.sessions.insert(coordinator, session);
    }

    /// Whether the session of a coordinator can be sent work of a generation.
    pub(super) fn is_ready(&self, coordinator: usize, generation: u64) -> bool {
        self.sessions.get(&coordinator).is_some_and(|session| {
            session.generations.admitting(Stamp::new(session.epoch, generation)).is_some()
        })
    }

    /// Answers work; the violation of a rule is an error.
    pub(super) fn work(
        &mut self,
        coordinator: usize,
        work: &ExpertWork,
        mutation: Option<Mutation>,
    ) -> Result<Result<ExpertResult, WorkerError>, String> {
        let session = self.sessions.get(&coordinator).expect("work comes by a session");
        let fence = work.fence.expect("the harness sends no work without a fence");
        let mut stamp = Stamp::new(fence.epoch, fence.generation);
        if mutation == Some(Mutation::StaleEpochAccepted) {
            stamp.epoch = session.epoch;
        }
        let Some(owned) = session.generations.admitting(stamp) else {
            self.refused += 1;
            return Ok(Err(refusal(work, ErrorCode::StaleFence, "no assignment admits it")));
        };
        if !work.experts.iter().all(|&expert| owned.contains(&(fence.layer, expert))) {
            return Ok(Err(refusal(work, ErrorCode::NotOwned, "not assigned")));
        }
        if fence.epoch != session.epoch {
            return Err(format!(
                "worker {} computed work of epoch {} in a session of epoch {}",
                self.id, fence.epoch, session.epoch
            ));
        }
        if work.row_count as usize > self.max_rows {
            return Err(format!(
                "worker {} was sent {} rows, and takes {} at most",
                self.id, work.row_count, self.max_rows
            ));
        }
        let rows = arithmetic::overflowing(work);
        if !rows.is_empty() {
            let code = ErrorCode::Overflow;
            return Ok(Err(WorkerError { rows, ..refusal(work, code, "arithmetic overflows") }));
        }
        Ok(Ok(arithmetic::compute(work, self.lies)))
    }
}

/// A refusal of work.
pub(super) fn refusal(work: &ExpertWork, code: ErrorCode, detail: &str) -> WorkerError {
    let (detail, fence) = (detail.to_owned(), work.fence);
    WorkerError { code: code.into(), detail, fence, ..WorkerError::default() }
}
