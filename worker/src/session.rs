//! What one coordinator may ask of a worker: an assignment, a self-test, work. No sockets, no clock but for the figures in
//! a result.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_kernels::Expert;
use shimmer_model::self_test;
use shimmer_proto::{
    checksum,
    expert::v1::{
        Adopt, Assign, CoordinatorHello, ErrorCode, ExpertResult, ExpertWork, PrefetchHint, Ready,
        Release, SelfTestResult, WorkerError,
    },
    identity::{self, shown},
};

use self::assignment::{Adopted, Assignment, wanted};
pub use self::assignment::{Loaded, Loading};
use crate::{
    check::{self, Checked, HintDrop, refusal},
    compute::{self, Workspace},
    counters::Counters,
    expert_core::{ExpertCore, FirstLoad},
    generations::{Generations, Stamp},
    store::{LoadProgress, Round},
};

/// One coordinator's view of a worker.
#[derive(Debug)]
pub struct ExpertSession {
    core: Arc<ExpertCore>,
    assignments: Generations<Assignment>,
    space: Workspace,
}

impl ExpertSession {
    pub(crate) fn new(core: Arc<ExpertCore>) -> Self {
        Self { core, assignments: Generations::default(), space: Workspace::default() }
    }

    /// The worker that this session belongs to.
    pub fn core(&self) -> &Arc<ExpertCore> {
        &self.core
    }

    /// Compares a coordinator's hello with this worker.
    pub fn greet(&self, hello: &CoordinatorHello) -> Result<(), WorkerError> {
        let theirs = hello.identity.clone().unwrap_or_default();
        let side = format!("worker {}", self.core.id());
        let peer = format!("coordinator {}", shown(&hello.coordinator_id));
        identity::compare(&side, &self.core.identity(), &peer, &theirs).map_err(|mismatch| {
            Counters::bump(&self.core.counters().hellos_refused);
            WorkerError { fatal: true, ..refusal(ErrorCode::Incompatible, None, mismatch.message) }
        })?;
        self.core.joining().greeted(Instant::now());
        Ok(())
    }

    /// Loads the experts of an assignment and waits for them, which takes as long as the disk takes. Earlier assignments
    /// stay in force as far as [`crate::generations`] says. After an error this one is not held.
    pub fn assign(
        &mut self,
        assign: &Assign,
        progress: &dyn LoadProgress,
    ) -> Result<Ready, WorkerError> {
        let loaded = self.begin_assign(assign)?.run(progress);
        self.loaded(loaded).expect("nothing gives it up while it is loaded here")
    }

    /// As [`Self::assign`], but somebody else loads: work, hints and self-tests go on meanwhile. What has to go for this
    /// assignment is gone when this returns.
    pub fn begin_assign(&mut self, assign: &Assign) -> Result<Loading, WorkerError> {
        let wanted = wanted(&self.core, &assign.layers).inspect_err(|_| {
            Counters::bump(&self.core.counters().loads_failed);
        })?;
        let stamp = Stamp::new(assign.epoch, assign.generation);
        // Its experts stay in memory, but no longer keep the room from the new assignment.
        let serves = self.assignments.all().any(|assignment| !assignment.is_empty());
        let first = (!serves).then(|| FirstLoad::of(&self.core));
        let (number, gone) = self.assignments.begin(stamp);
        drop(gone);
        Ok(Loading { core: Arc::clone(&self.core), number, stamp, wanted, _first: first })
    }

    /// Whether an assignment is held, ready or not: what is not held any more need not be loaded.
    pub fn holds(&self, number: u64) -> bool {
        self.assignments.holds(number)
    }

    /// A load died. Whether its assignment was still held.
    pub fn aborted(&mut self, number: u64) -> bool {
        self.assignments.failed(number)
    }

    /// Takes the end of a load. None if the assignment was given up meanwhile.
    pub fn loaded(&mut self, loaded: Loaded) -> Option<Result<Ready, WorkerError>> {
        let Loaded { number, outcome } = loaded;
        match outcome {
            Ok(assignment) => {
                let ready = assignment.ready(self.core.wants_hints());
                self.core.joining().loaded(ready.experts);
                self.assignments.ready(number, assignment).is_ok().then_some(Ok(ready))
            }
            Err(error) => self.assignments.failed(number).then(|| {
                Counters::bump(&self.core.counters().loads_failed);
                Err(error)
            }),
        }
    }

    /// Adds experts to an assignment in force, to be read when work wants them. What cannot be added is left out, and the
    /// work that wants it is refused.
    pub fn adopt(&mut self, adopt: &Adopt) {
        let counters = self.core.counters();
        let stamp = Stamp::new(adopt.epoch, adopt.generation);
        let wanted = wanted(&self.core, &adopt.layers).ok();
        let adopting = wanted.zip(self.assignments.admitting_mut(stamp));
        let complete = adopting.is_some_and(|(wanted, assignment)| {
            let Adopted { experts, complete } = assignment.adopt(&self.core, &wanted);
            Counters::add(&counters.experts_adopted, experts);
            complete
        });
        if !complete {
            Counters::bump(&counters.adopts_refused);
        }
    }

    /// Ends all assignments before this generation, with what they adopted.
    pub fn release(&mut self, release: &Release) {
        let first = Stamp::new(release.epoch, release.generation);
        let released = self.assignments.release(first);
        Counters::add(&self.core.counters().assignments_released, released.len() as u64);
    }

    /// What to tell a coordinator that has to know whether hints are worth sending: the newest assignment that is ready.
    pub fn in_force(&self) -> Option<Ready> {
        Some(self.assignments.all().next_back()?.ready(self.core.wants_hints()))
    }

    /// Applies an assigned expert to the fixed row and returns the digest of its output.
    pub fn self_test(&mut self, layer: u32, expert: u32) -> Result<SelfTestResult, WorkerError> {
        let refused = |code, detail: String| WorkerError {
            expert: Some(expert),
            ..refusal(code, None, detail)
        };
        if !self.assignments.all().any(|assignment| assignment.owns(layer, expert)) {
            let detail = format!("expert {expert} of layer {layer} is not assigned to this worker");
            return Err(refused(ErrorCode::NotOwned, detail));
        }
        let core = Arc::clone(&self.core);
        let shape = core.layer(layer).expect("an assigned layer has experts");
        let wanted = [expert];
        let mut round = core.store().round(layer, &wanted);
        let mut ready = Vec::with_capacity(1);
        round.next(&mut ready).map_err(|error| refused(ErrorCode::Load, error.to_string()))?;
        let lease = ready.pop().expect("a round gives what it was asked for").lease;
        let view = Expert::from_slab(&shape.layout, &lease)
            .map_err(|error| refused(ErrorCode::Internal, error.to_string()))?;
        let mut output = vec![0.0; core.hidden()];
        let rows = &mut self.space.rows;
        core.run(|| {
            rows.set(
                core.kernels(),
                core.format(),
                &self_test::row(core.hidden()),
                1,
                core.hidden(),
            );
            core.with_scratch(1, |scratch| {
                core.kernels().expert(&view, rows, &[0], &mut output, scratch)
            });
        });
        Ok(SelfTestResult { layer, expert, digest: self_test::digest(&output).to_vec().into() })
    }

    /// Passes a hint on to the store; drops and counts what does not fit the assignment.
    pub fn hint(&self, hint: &PrefetchHint) {
        let counters = self.core.counters();
        match self.check_hint(hint) {
            Ok(()) => {
                Counters::bump(&counters.hints_taken);
                self.core.store().hint(hint.layer, &hint.experts);
            }
            Err(dropped) => Counters::bump(match dropped {
                HintDrop::Corrupt => &counters.hints_corrupt,
                HintDrop::Stale => &counters.hints_stale,
                HintDrop::Malformed => &counters.hints_malformed,
                HintDrop::NotOwned => &counters.hints_not_owned,
            }),
        }
    }

    fn check_hint(&self, hint: &PrefetchHint) -> Result<(), HintDrop> {
        let stamp = hint.fence.as_ref().map(|fence| Stamp::new(fence.epoch, fence.generation));
        let assignment = stamp.and_then(|stamp| self.assignments.admitting(stamp));
        check::check_hint(&self.core, assignment.map(Assignment::owned), hint)
    }

    /// Estimated time of work on one thread, microseconds.
    pub fn estimate_us(&self, work: &ExpertWork) -> u64 {
        compute::estimate_us(&self.core, work)
    }

    /// Whether every expert of the work is in memory now, or the work is malformed.
    pub fn is_ready(&self, work: &ExpertWork) -> bool {
        work.fence
            .as_ref()
            .is_none_or(|fence| self.core.store().is_ready(fence.layer, &work.experts))
    }

    /// Checks and computes work on the calling thread's rayon pool; on the worker's own pool if the caller has none.
    /// Waits on the calling thread for experts that are not in memory.
    ///
    /// A thread of a pool must not call this while other works of the same worker may run in that pool: waiting inside
    /// another work's fork-join, it could wait for a slot that this other work holds. [`Self::try_work`] never waits.
    pub fn work(&mut self, work: &ExpertWork) -> Result<ExpertResult, WorkerError> {
        self.work_received(work, Instant::now())
    }

    /// As [`Self::work`], for work that arrived earlier.
    pub fn work_received(
        &mut self,
        work: &ExpertWork,
        received: Instant,
    ) -> Result<ExpertResult, WorkerError> {
        if self.is_ready(work)
            && let Some(result) = self.try_work(work, received)
        {
            return result;
        }
        let begun = Instant::now();
        let result = self.prepare(work).and_then(|checked| {
            let core = Arc::clone(&self.core);
            let round = core.store().round(checked.fence.layer, &work.experts);
            self.answer(work, checked, round, [received, begun])
        });
        self.count(work, &result);
        result
    }

    /// As [`Self::work_received`], if nothing has to be waited for. None if an expert is not in memory; then nothing has
    /// happened.
    pub fn try_work(
        &mut self,
        work: &ExpertWork,
        received: Instant,
    ) -> Option<Result<ExpertResult, WorkerError>> {
        let core = Arc::clone(&self.core);
        let result = core.run(|| {
            let begun = Instant::now();
            let checked = match self.prepare(work) {
                Ok(checked) => checked,
                Err(error) => return Some(Err(error)),
            };
            let round = core.store().ready_round(checked.fence.layer, &work.experts)?;
            Some(self.answer(work, checked, round, [received, begun]))
        })?;
        self.count(work, &result);
        Some(result)
    }

    fn count(&self, work: &ExpertWork, result: &Result<ExpertResult, WorkerError>) {
        let counters = self.core.counters();
        match result {
            Ok(result) => {
                Counters::bump(&counters.work_done);
                Counters::add(&counters.rows_done, work.row_indices.len() as u64);
                Counters::add(&counters.compute_us, u64::from(result.compute_us));
            }
            Err(error) => match error.code() {
                ErrorCode::Checksum => Counters::bump(&counters.frames_corrupt),
                ErrorCode::StaleFence => Counters::bump(&counters.work_stale),
                ErrorCode::NotOwned => Counters::bump(&counters.work_not_owned),
                ErrorCode::Overflow => Counters::bump(&counters.work_overflowed),
                ErrorCode::Protocol => Counters::bump(&counters.messages_out_of_order),
                ErrorCode::Load => Counters::bump(&counters.work_not_loaded),
                _ => Counters::bump(&counters.work_malformed),
            },
        }
    }

    /// Everything that is checked before any expert is touched.
    fn prepare(&mut self, work: &ExpertWork) -> Result<Checked, WorkerError> {
        checksum::verify_work(work)
            .map_err(|error| refusal(ErrorCode::Checksum, work.fence, error.to_string()))?;
        let assignment = self.assignment_of(work)?;
        let checked = check::check(&self.core, assignment.owned(), work)?;
        let (core, space) = (&*self.core, &mut self.space);
        let malformed = |detail: String| refusal(ErrorCode::Malformed, work.fence, detail);
        space
            .rows
            .read_wire(core.format(), checked.rows, core.hidden(), &work.rows)
            .map_err(|error| malformed(error.to_string()))?;
        Ok(checked)
    }

    /// The assignment that admits work.
    fn assignment_of(&self, work: &ExpertWork) -> Result<&Assignment, WorkerError> {
        let fence = work
            .fence
            .ok_or_else(|| refusal(ErrorCode::Malformed, None, "the work has no fence"))?;
        let stamp = Stamp::new(fence.epoch, fence.generation);
        if let Some(assignment) = self.assignments.admitting(stamp) {
            return Ok(assignment);
        }
        let held: Vec<String> = self.assignments.stamps().map(|stamp| stamp.to_string()).collect();
        Err(if held.is_empty() {
            let detail = "work before an assignment has become ready";
            refusal(ErrorCode::Protocol, work.fence, detail)
        } else {
            let detail = format!("work of {stamp}; this session is at {}", held.join(" and "));
            refusal(ErrorCode::StaleFence, work.fence, detail)
        })
    }

    fn answer(
        &mut self,
        work: &ExpertWork,
        checked: Checked,
        mut round: Box<dyn Round + '_>,
        [received, begun]: [Instant; 2],
    ) -> Result<ExpertResult, WorkerError> {
        let missed = round.missed();
        let hits = work.experts.len() - missed;
        let mut trace = WorkTrace::begin(&self.core, work, missed, [received, begun]);
        let payload = match &mut trace {
            None => compute::compute(&self.core, checked, work, &mut self.space, &mut *round),
            Some(trace) => {
                let mut watched = trace.watch(&mut *round);
                compute::compute(&self.core, checked, work, &mut self.space, &mut watched)
            }
        };
        if let Some(trace) = trace {
            trace.finish(&self.core, payload.as_ref().err());
        }
        drop(round);
        let mut result = ExpertResult {
            fence: work.fence,
            row_count: work.row_count,
            payload: Some(payload?),
            compute_us: micros(begun.elapsed()),
            queue_us: micros(begun.saturating_duration_since(received)),
            ram_hits: u32::try_from(hits).unwrap_or(u32::MAX),
            ..ExpertResult::default()
        };
        checksum::seal_result(&mut result);
        Ok(result)
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

mod assignment;
mod traced;

use traced::WorkTrace;
#[cfg(test)]
mod tests;
