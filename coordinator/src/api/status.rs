//! How each failure reaches a client: code, reason, retry time.

use std::path::Path;
use std::time::Duration;

use shimmer_proto::status;
use tonic::Status;

use crate::engine::{GenerationError, SubmitError};
use crate::journal::JournalError;
use crate::sampler::InvalidParameter;

/// A queue drains by whole answers: within this time a place is likely.
const RETRY_QUEUE: Duration = Duration::from_secs(1);
/// A worker that restarts loads its experts first.
const RETRY_WORKER: Duration = Duration::from_secs(2);
/// Another coordinator can go on at once; this is for who knows no other.
const RETRY_RESUME: Duration = Duration::from_secs(1);
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

/// The journal has the id already.
pub(super) fn kept(id: &str) -> Status {
    let message = format!(
        "request_id {id:?} belongs to a request that the journal keeps; Resume gives its events, another id begins anew"
    );
    status::already_exists("request", id, message)
}

/// Nothing new is taken.
pub(super) fn draining() -> Status {
    let message = "this coordinator is stopping and takes nothing new";
    status::unavailable("DRAINING", message, Some(RETRY_SHUTDOWN))
}

/// What the journal knows cannot be read. Clients hear the file's name, the log has its place.
pub(super) fn journal(error: &JournalError) -> Status {
    let name = |path: &Path| {
        path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    };
    match error {
        JournalError::Damaged { path, damage } => {
            let message = format!("the journal's file {} is damaged {damage}", name(path));
            status::data_loss("JOURNAL_DAMAGED", message)
        }
        JournalError::File { path, source } => {
            let message = format!("the journal's file {} cannot be read: {source}", name(path));
            status::unavailable("JOURNAL_UNREADABLE", message, Some(RETRY_WORKER))
        }
        JournalError::Stalled { .. }
        | JournalError::Directory { .. }
        | JournalError::Thread(_)
        | JournalError::Limit { .. } => {
            let message = "the journal does not answer";
            status::unavailable("JOURNAL_UNREADABLE", message, Some(RETRY_WORKER))
        }
    }
}

/// Says in the log that a generation failed; louder where something computes otherwise than it did.
pub(super) fn log_failure(request_id: &str, error: &GenerationError) {
    if matches!(error, GenerationError::Diverged { .. }) {
        tracing::error!(request_id, %error, "what was generated before does not come out again; nothing is given out");
    } else {
        tracing::warn!(request_id, %error, "a generation failed");
    }
}

/// Why a generation ended without Finished. `resumable` is the request's id where the journal has it: the rest can be had
/// then, as far as that does not depend on the same fault.
pub(super) fn generation(error: &GenerationError, resumable: Option<&str>) -> Status {
    let message = error.to_string();
    if let Some(id) = resumable {
        match error {
            GenerationError::Unavailable { detail } => {
                return status::resumable(id, "WORKER_UNAVAILABLE", detail, RETRY_WORKER);
            }
            GenerationError::ShuttingDown => {
                return status::resumable(id, "SHUTTING_DOWN", message, RETRY_RESUME);
            }
            _ => {}
        }
    }
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
        GenerationError::Displaced => status::aborted("RESUMED_ELSEWHERE", message),
        GenerationError::Diverged { .. } => status::internal("JOURNAL_MISMATCH", message),
    }
}

/// The step thread has ended without a word.
pub(super) fn engine_gone() -> Status {
    status::internal("ENGINE_STOPPED", "the engine has stopped")
}
