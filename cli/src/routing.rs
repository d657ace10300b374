//! Listens to what the engine sends to workers: which experts each layer of each step wants, and how long an in-process
//! worker took. It changes nothing.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use shimmer_coordinator::dispatch::{
    ExpertTransport, PartLimits, Reply, Standing, TransportError, WorkerInfo,
};
use shimmer_proto::expert::v1::{ExpertResult, ExpertWork, PrefetchHint, WorkerError};

/// One message to a worker.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sent {
    /// Number of the step.
    pub(crate) step: u64,
    pub(crate) layer: u32,
    /// Rows of the message.
    pub(crate) rows: u32,
    /// Expert, and how many of the rows go to it.
    pub(crate) experts: Vec<(u32, u32)>,
    /// Time until the worker had computed it, in-process.
    pub(crate) took: Duration,
}

/// The time of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StepTime {
    pub(crate) step: u64,
    pub(crate) took: Duration,
}

/// Everything that was heard.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) sent: Vec<Sent>,
    pub(crate) steps: Vec<StepTime>,
    /// The last moment between two steps.
    between: Option<Instant>,
    /// The step that is under way, and when it began.
    open: Option<(u64, Instant)>,
}

/// A shared ear.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ear(Arc<Mutex<Heard>>);

impl Ear {
    /// Puts the ear before a transport.
    pub(crate) fn before(&self, inner: Box<dyn ExpertTransport>) -> Box<dyn ExpertTransport> {
        Box::new(Listening { inner, ear: self.clone() })
    }

    /// What was heard since the last call. A step counts once the next one begins.
    pub(crate) fn take(&self) -> Heard {
        let mut heard = self.lock();
        let (between, open) = (heard.between, heard.open);
        std::mem::replace(&mut *heard, Heard { between, open, ..Heard::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A transport with an ear before it.
#[derive(Debug)]
struct Listening {
    inner: Box<dyn ExpertTransport>,
    ear: Ear,
}

impl Listening {
    fn hear(&self, work: (u64, u32, u32, Vec<(u32, u32)>), began: Instant) {
        let (step, layer, rows, experts) = work;
        let mut heard = self.ear.lock();
        if heard.open.is_none_or(|(open, _)| open != step) {
            heard.open = Some((step, heard.between.unwrap_or(began)));
        }
        heard.sent.push(Sent { step, layer, rows, experts, took: began.elapsed() });
    }
}

impl ExpertTransport for Listening {
    fn workers(&self) -> &[WorkerInfo] {
        self.inner.workers()
    }

    fn now(&self) -> Instant {
        self.inner.now()
    }

    fn between_steps(&mut self) {
        self.inner.between_steps();
        let now = Instant::now();
        let mut heard = self.ear.lock();
        heard.between = Some(now);
        if let Some((step, began)) = heard.open.take() {
            heard.steps.push(StepTime { step, took: now - began });
        }
    }

    fn copies(&self, layer: u32, expert: u32) -> &[usize] {
        self.inner.copies(layer, expert)
    }

    fn owner(&self, layer: u32, expert: u32) -> Option<usize> {
        self.inner.owner(layer, expert)
    }

    fn standing(&self, worker: usize) -> Standing {
        self.inner.standing(worker)
    }

    fn stand_ins(&self, layer: u32) -> Vec<usize> {
        self.inner.stand_ins(layer)
    }

    fn adopt(
        &mut self,
        worker: usize,
        layer: u32,
        experts: &[u32],
    ) -> Result<usize, TransportError> {
        self.inner.adopt(worker, layer, experts)
    }

    fn used(&mut self, layer: u32, expert: u32, rows: u32) {
        self.inner.used(layer, expert, rows);
    }

    fn usual(&self, worker: usize, rows: u32) -> Option<Duration> {
        self.inner.usual(worker, rows)
    }

    fn suspect(&mut self, worker: usize) {
        self.inner.suspect(worker);
    }

    fn contest(&mut self, worker: usize, layer: u32, experts: &[u32]) {
        self.inner.contest(worker, layer, experts);
    }

    fn quarantine(&mut self, worker: usize, reason: &str) {
        self.inner.quarantine(worker, reason);
    }

    fn own_copy(&mut self, work: &ExpertWork) -> Option<Result<ExpertResult, WorkerError>> {
        self.inner.own_copy(work)
    }

    fn has_own_copy(&self, layer: u32) -> bool {
        self.inner.has_own_copy(layer)
    }

    fn fence_base(&self) -> (u64, u64) {
        self.inner.fence_base()
    }

    fn limits(&self, worker: usize) -> PartLimits {
        self.inner.limits(worker)
    }

    fn send(&mut self, worker: usize, work: ExpertWork) -> Result<(), TransportError> {
        let fence = work.fence.unwrap_or_default();
        let experts = work.experts.iter().copied().zip(work.item_rows.iter().copied()).collect();
        let said = (fence.step, fence.layer, work.row_count, experts);
        let began = Instant::now();
        let sent = self.inner.send(worker, work);
        self.hear(said, began);
        sent
    }

    fn wants_hints(&self, worker: usize) -> bool {
        self.inner.wants_hints(worker)
    }

    fn hint(&mut self, worker: usize, hint: PrefetchHint) {
        self.inner.hint(worker, hint);
    }

    fn receive(&mut self, deadline: Instant) -> Result<Reply, TransportError> {
        self.inner.receive(deadline)
    }

    fn give_up(&mut self, worker: usize, reason: &str) {
        self.inner.give_up(worker, reason);
    }
}
