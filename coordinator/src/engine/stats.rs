//! What the engine has done, published by the step thread after every step.

use std::sync::{Arc, Mutex, PoisonError};

use crate::dispatch::WorkerStats;
use crate::prediction::Recall;

/// Counts since the engine started, as of the end of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Steps run.
    pub steps: u64,
    /// What every worker did, in the order of the transport.
    pub workers: Vec<WorkerStats>,
    /// How often predictions of the next layer's experts came true. Stays empty while no worker wants hints.
    pub recall: Recall,
    /// Hints sent.
    pub hints: u64,
}

/// The one place where they can be read.
#[derive(Clone, Debug, Default)]
pub(super) struct Published(Arc<Mutex<EngineStats>>);

impl Published {
    /// Lets the step thread bring the figures up to date.
    pub(super) fn update(&self, update: impl FnOnce(&mut EngineStats)) {
        update(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn read(&self) -> EngineStats {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
