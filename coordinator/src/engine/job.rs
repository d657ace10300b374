//! A queued or running sequence: a generation or a scoring.

use crossbeam_channel::Sender;

use super::active::Active;
use super::events::{Event, GenerationError};
use crate::trace::{self, RequestTrace};

/// A queued or running sequence.
#[derive(Debug)]
pub(super) enum Job {
    Generation(Box<Active>),
    Scoring {
        tokens: Vec<u32>,
        logits: Vec<Vec<f32>>,
        reply: Sender<Result<Vec<Vec<f32>>, GenerationError>>,
    },
}

impl Job {
    /// Whether its prompt is behind it.
    pub(super) fn decodes(&self) -> bool {
        matches!(self, Self::Generation(active) if active.first_token.is_some())
    }

    /// What is told of it, if it is sampled.
    pub(super) fn trace(&self) -> Option<&RequestTrace> {
        match self {
            Self::Generation(active) => active.trace.as_deref(),
            Self::Scoring { .. } => None,
        }
    }

    /// Whether its next step is recorded, if it is sampled.
    pub(super) fn is_recorded(&self) -> bool {
        match self {
            Self::Generation(active) => {
                !self.decodes() || trace::records(active.sequence.generated())
            }
            Self::Scoring { .. } => false,
        }
    }

    pub(super) fn tokens(&self) -> &[u32] {
        match self {
            Self::Generation(active) => active.sequence.tokens(),
            Self::Scoring { tokens, .. } => tokens,
        }
    }
}

/// Ends a sequence that cannot go on.
pub(super) fn fail(job: Job, error: GenerationError) {
    match job {
        Job::Generation(mut active) => {
            if let Some(trace) = &mut active.trace {
                trace.ended(Some(error.to_string()));
            }
            active.release().send(Event::Failed(error));
        }
        Job::Scoring { reply, .. } => {
            // Nobody waits any more; there is nobody to tell.
            let _gone = reply.send(Err(error)).is_err();
        }
    }
}
