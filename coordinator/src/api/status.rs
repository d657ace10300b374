//! How each failure reaches a client: code, reason, retry time.

use std::time::Duration;

use shimmer_proto::status;
use tonic::Status;

use crate::engine::{GenerationError, SubmitError};
use crate::sampler::InvalidParameter;

/// A queue drains by whole answers: within this time a place is likely.
const RETRY_QUEUE: Duration = Duration::from_secs(1);
/// A worker that restarts loads its experts first.
const RETRY_WORKER: Duration = Duration::from_secs(2);
/// Time for a replacement of this coordinator to come up.
const RETRY_SHUTDOWN: Duration = Duration::from_secs(5);

/// A field that cannot be used.
pub(super) fn invalid(error: &InvalidParameter) -> Status {
    status::invalid_argument(&error.field, error.description.clone())
}

/// Why a generation was not queued.
pub(super) fn submit(error: &SubmitError) -> Status {
    let message = error.to_string();
    match error {
        SubmitError::Invalid(error) => invalid(error),
        SubmitError::ContextExceeded { .. } => status::invalid_argument("input", message),
        SubmitError::DuplicateId { id } => status::already_exists("generation", id, message),
        SubmitError::QueueFull { .. } => {
            status::resource_exhausted("QUEUE_FULL", message, Some(RETRY_QUEUE))
        }
        SubmitError::ShuttingDown => {
            status::unavailable("SHUTTING_DOWN", message, Some(RETRY_SHUTDOWN))
        }
    }
}

/// Why a generation ended without Finished.
pub(super) fn generation(error: &GenerationError) -> Status {
    let message = error.to_string();
    match error {
        GenerationError::Unavailable { detail } => {
            status::unavailable("WORKER_UNAVAILABLE", detail.clone(), Some(RETRY_WORKER))
        }
        GenerationError::Arithmetic { .. } => status::internal("ARITHMETIC", message),
        GenerationError::SlowConsumer { .. } => {
            status::resource_exhausted("SLOW_CONSUMER", message, None)
        }
        GenerationError::ShuttingDown => {
            status::unavailable("SHUTTING_DOWN", message, Some(RETRY_SHUTDOWN))
        }
    }
}

/// The step thread has ended without a word.
pub(super) fn engine_gone() -> Status {
    status::internal("ENGINE_STOPPED", "the engine has stopped")
}
