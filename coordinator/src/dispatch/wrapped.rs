//! A transport with something before it that listens, delays or holds up. All else goes through, so that what is new in
//! [`ExpertTransport`] is passed on here and nowhere else.

use std::time::{Duration, Instant};

use shimmer_proto::expert::v1::{ExpertResult, ExpertWork, PrefetchHint, WorkerError};

use super::{ExpertTransport, Pace, PartLimits, Reply, Standing, TransportError, WorkerInfo};

/// What stands before a transport. Each call passes it, and may be passed on.
pub trait Wrapper: Send + std::fmt::Debug {
    /// In place of [`ExpertTransport::between_steps`].
    fn between_steps(&mut self, inner: &mut dyn ExpertTransport) {
        inner.between_steps();
    }

    /// In place of [`ExpertTransport::send`].
    fn send(
        &mut self,
        inner: &mut dyn ExpertTransport,
        worker: usize,
        work: ExpertWork,
    ) -> Result<(), TransportError>;
}

/// A transport with a wrapper before it.
#[derive(Debug)]
pub struct Wrapped<W> {
    inner: Box<dyn ExpertTransport>,
    wrapper: W,
}

impl<W: Wrapper> Wrapped<W> {
    /// Puts a wrapper before a transport.
    pub fn new(inner: Box<dyn ExpertTransport>, wrapper: W) -> Self {
        Self { inner, wrapper }
    }
}

impl<W: Wrapper> ExpertTransport for Wrapped<W> {
    fn between_steps(&mut self) {
        self.wrapper.between_steps(&mut *self.inner);
    }

    fn send(&mut self, worker: usize, work: ExpertWork) -> Result<(), TransportError> {
        self.wrapper.send(&mut *self.inner, worker, work)
    }

    fn workers(&self) -> &[WorkerInfo] {
        self.inner.workers()
    }

    fn now(&self) -> Instant {
        self.inner.now()
    }

    fn running(&mut self, any: bool) {
        self.inner.running(any);
    }

    fn take_reseated(&mut self) -> Vec<usize> {
        self.inner.take_reseated()
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

    fn pace(&self, worker: usize) -> Pace {
        self.inner.pace(worker)
    }

    fn owes_nothing(&self, worker: usize) -> bool {
        self.inner.owes_nothing(worker)
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

    fn is_quarantined(&self, worker: usize) -> bool {
        self.inner.is_quarantined(worker)
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
