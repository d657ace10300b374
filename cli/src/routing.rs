//! Listens to what the engine sends to workers: which experts each layer of each step wants, and how long an in-process
//! worker took. It changes nothing.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use shimmer_coordinator::dispatch::{ExpertTransport, TransportError, Wrapped, Wrapper};
use shimmer_proto::expert::v1::{ExpertWork, Fence};

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
        Box::new(Wrapped::new(inner, self.clone()))
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

impl Wrapper for Ear {
    fn between_steps(&mut self, inner: &mut dyn ExpertTransport) {
        inner.between_steps();
        let now = Instant::now();
        let mut heard = self.lock();
        heard.between = Some(now);
        if let Some((step, began)) = heard.open.take() {
            heard.steps.push(StepTime { step, took: now - began });
        }
    }

    fn send(
        &mut self,
        inner: &mut dyn ExpertTransport,
        worker: usize,
        work: ExpertWork,
    ) -> Result<(), TransportError> {
        let Fence { step, layer, .. } = work.fence.unwrap_or_default();
        let rows = work.row_count;
        let experts = work.experts.iter().copied().zip(work.item_rows.iter().copied()).collect();
        let began = Instant::now();
        let sent = inner.send(worker, work);
        let mut heard = self.lock();
        if heard.open.is_none_or(|(open, _)| open != step) {
            heard.open = Some((step, heard.between.unwrap_or(began)));
        }
        heard.sent.push(Sent { step, layer, rows, experts, took: began.elapsed() });
        sent
    }
}
