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
        Assign, CoordinatorHello, ErrorCode, ExpertResult, ExpertWork, LayerExperts, PrefetchHint,
        Ready, SelfTestResult, WorkerError,
    },
    identity::{self, shown},
};

use crate::{
    check::{self, Checked, Expected, HintDrop, refusal},
    compute::{self, Workspace},
    counters::Counters,
    expert_core::ExpertCore,
    store::{Claim, LoadProgress, Round, WantedLayer},
};

/// One coordinator's view of a worker.
#[derive(Debug)]
pub struct ExpertSession {
    core: Arc<ExpertCore>,
    assignment: Option<Assignment>,
    space: Workspace,
}

#[derive(Debug)]
struct Assignment {
    epoch: u64,
    generation: u64,
    /// By layer and expert.
    owned: Vec<Vec<bool>>,
    _claim: Box<dyn Claim>,
}

impl Assignment {
    fn expected(&self) -> Expected<'_> {
        Expected { epoch: self.epoch, generation: self.generation, owned: &self.owned }
    }
}

impl ExpertSession {
    pub(crate) fn new(core: Arc<ExpertCore>) -> Self {
        Self { core, assignment: None, space: Workspace::default() }
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
        })
    }

    /// Loads the experts of an assignment, which replaces the previous one of this session. Takes as long as the disk
    /// takes. After an error the session has no assignment.
    pub fn assign(
        &mut self,
        assign: &Assign,
        progress: &dyn LoadProgress,
    ) -> Result<Ready, WorkerError> {
        let loaded = self.load(assign, progress);
        if loaded.is_err() {
            Counters::bump(&self.core.counters().loads_failed);
        }
        loaded
    }

    fn load(&mut self, assign: &Assign, progress: &dyn LoadProgress) -> Result<Ready, WorkerError> {
        // The experts stay in memory, but no longer keep the room from the new assignment.
        self.assignment = None;
        let wanted = self.wanted(&assign.layers)?;
        let claim = self.core.store().claim(&wanted, progress).map_err(|error| {
            let detail = format!("worker {}: {error}", self.core.id());
            WorkerError { expert: error.expert(), ..refusal(ErrorCode::Load, None, detail) }
        })?;
        let mut owned = vec![Vec::new(); self.core.layer_count()];
        let (mut experts, mut bytes) = (0, 0);
        for WantedLayer { layer, experts: of_layer } in &wanted {
            let shape = self.core.layer(*layer).expect("a claimed layer has experts");
            let mut flags = vec![false; shape.experts as usize];
            for &expert in of_layer {
                flags[expert as usize] = true;
                experts += 1;
                bytes += shape.layout.slab_bytes() as u64;
            }
            owned[*layer as usize] = flags;
        }
        let Assign { epoch, generation, .. } = *assign;
        self.assignment = Some(Assignment { epoch, generation, owned, _claim: claim });
        let wants_hints = self.core.store().wants_hints();
        Ok(Ready { epoch, generation, experts, bytes, wants_hints })
    }

    fn wanted(&self, layers: &[LayerExperts]) -> Result<Vec<WantedLayer>, WorkerError> {
        let malformed = |detail: String| refusal(ErrorCode::Malformed, None, detail);
        let mut wanted: Vec<WantedLayer> =
            Vec::with_capacity(layers.len().min(self.core.layer_count()));
        for LayerExperts { layer, experts } in layers {
            let layer = *layer;
            let shape = self.core.layer(layer);
            let shape =
                shape.ok_or_else(|| malformed(format!("layer {layer} has no routed experts")))?;
            if wanted.last().is_some_and(|last| last.layer >= layer) {
                return Err(malformed("the layers of an assignment are not ascending".to_owned()));
            }
            if !experts.is_sorted_by(|a, b| a < b) {
                return Err(malformed(format!("the experts of layer {layer} are not ascending")));
            }
            if let Some(&last) = experts.last().filter(|&&last| last >= shape.experts) {
                return Err(malformed(format!(
                    "expert {last} of layer {layer}, which has {}",
                    shape.experts
                )));
            }
            wanted.push(WantedLayer { layer, experts: experts.clone() });
        }
        Ok(wanted)
    }

    /// Applies an assigned expert to the fixed row and returns the digest of its output.
    pub fn self_test(&mut self, layer: u32, expert: u32) -> Result<SelfTestResult, WorkerError> {
        let refused = |code, detail: String| WorkerError {
            expert: Some(expert),
            ..refusal(code, None, detail)
        };
        let owned = self
            .assignment
            .as_ref()
            .and_then(|a| a.owned.get(layer as usize)?.get(expert as usize).copied());
        if owned != Some(true) {
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
            core.with_scratch(|scratch| {
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
        check::check_hint(&self.core, self.assignment.as_ref().map(Assignment::expected), hint)
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
        let assignment = self.assignment.as_ref().ok_or_else(|| {
            refusal(ErrorCode::Protocol, work.fence, "work before an assignment has become ready")
        })?;
        let checked = check::check(&self.core, assignment.expected(), work)?;
        let (core, space) = (&*self.core, &mut self.space);
        let malformed = |detail: String| refusal(ErrorCode::Malformed, work.fence, detail);
        space
            .rows
            .read_wire(core.format(), checked.rows, core.hidden(), &work.rows)
            .map_err(|error| malformed(error.to_string()))?;
        Ok(checked)
    }

    fn answer(
        &mut self,
        work: &ExpertWork,
        checked: Checked,
        mut round: Box<dyn Round + '_>,
        [received, begun]: [Instant; 2],
    ) -> Result<ExpertResult, WorkerError> {
        let hits = work.experts.len() - round.missed();
        let payload = compute::compute(&self.core, checked, work, &mut self.space, &mut *round);
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

#[cfg(test)]
mod tests;
