//! gRPC statuses with google.rpc details: one place decides the code and the shape of every refusal.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Domain of `google.rpc.ErrorInfo` in every status of this project.
pub const ERROR_DOMAIN: &str = "shimmer";

/// Reason of a break after which the rest of the stream can be had by Resume.
pub const RESUMABLE: &str = "RESUMABLE";

/// INVALID_ARGUMENT with the field's name in BadRequest.
pub fn invalid_argument(field: &str, description: impl Into<String>) -> Status {
    let description = description.into();
    let message = format!("{field}: {description}");
    Status::with_error_details(
        Code::InvalidArgument,
        message,
        ErrorDetails::with_bad_request_violation(field, description),
    )
}

/// UNAVAILABLE: a later attempt of the same request may succeed.
pub fn unavailable(
    reason: &str,
    message: impl Into<String>,
    retry_after: Option<Duration>,
) -> Status {
    with_reason(Code::Unavailable, reason, message, retry_after)
}

/// RESOURCE_EXHAUSTED: the server is at a configured limit now.
pub fn resource_exhausted(
    reason: &str,
    message: impl Into<String>,
    retry_after: Option<Duration>,
) -> Status {
    with_reason(Code::ResourceExhausted, reason, message, retry_after)
}

/// DEADLINE_EXCEEDED.
pub fn deadline_exceeded(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::DeadlineExceeded, reason, message, None)
}

/// FAILED_PRECONDITION: the same request cannot succeed on this server.
pub fn failed_precondition(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::FailedPrecondition, reason, message, None)
}

/// INTERNAL: a broken promise of ours.
pub fn internal(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::Internal, reason, message, None)
}

/// UNAUTHENTICATED: the caller showed nothing that says who he is, or something unknown.
pub fn unauthenticated(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::Unauthenticated, reason, message, None)
}

/// CANCELLED.
pub fn cancelled(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::Cancelled, reason, message, None)
}

/// ABORTED: somebody else goes on with it.
pub fn aborted(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::Aborted, reason, message, None)
}

/// DATA_LOSS: what was kept cannot be read any more.
pub fn data_loss(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::DataLoss, reason, message, None)
}

/// UNAVAILABLE in the middle of a stream that Resume can go on with, here or elsewhere. The metadata name the request and
/// `cause`, the reason of the break.
pub fn resumable(
    request_id: &str,
    cause: &str,
    message: impl Into<String>,
    retry_after: Duration,
) -> Status {
    let facts =
        [("request_id".to_owned(), request_id.to_owned()), ("cause".to_owned(), cause.to_owned())];
    let mut details = ErrorDetails::with_error_info(RESUMABLE, ERROR_DOMAIN, facts);
    details.set_retry_info(Some(retry_after));
    Status::with_error_details(Code::Unavailable, message, details)
}

/// ALREADY_EXISTS with the resource's type and name.
pub fn already_exists(kind: &str, name: &str, message: impl Into<String>) -> Status {
    let message = message.into();
    let details = ErrorDetails::with_resource_info(kind, name, "", message.clone());
    Status::with_error_details(Code::AlreadyExists, message, details)
}

/// NOT_FOUND with the resource's type and name.
pub fn not_found(kind: &str, name: &str, message: impl Into<String>) -> Status {
    let message = message.into();
    let details = ErrorDetails::with_resource_info(kind, name, "", message.clone());
    Status::with_error_details(Code::NotFound, message, details)
}

/// What a status says, with everything that led to it: where a connection was refused, the peer's reason stands among the
/// causes only.
pub fn told(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = if text.is_empty() { said } else { format!("{text}: {said}") };
        }
        cause = error.source();
    }
    text
}

/// Time that the server asks a client to wait before it tries again.
pub fn retry_after(status: &Status) -> Option<Duration> {
    status.get_details_retry_info().and_then(|info| info.retry_delay)
}

/// `(field, description)` of every violation named in an INVALID_ARGUMENT.
pub fn violations(status: &Status) -> Vec<(String, String)> {
    let Some(request) = status.get_details_bad_request() else { return Vec::new() };
    request.field_violations.into_iter().map(|v| (v.field, v.description)).collect()
}

/// Reason in `google.rpc.ErrorInfo`, for example `WORKER_LOST`.
pub fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

fn with_reason(
    code: Code,
    reason: &str,
    message: impl Into<String>,
    retry_after: Option<Duration>,
) -> Status {
    let mut details = ErrorDetails::with_error_info(reason, ERROR_DOMAIN, []);
    if retry_after.is_some() {
        details.set_retry_info(retry_after);
    }
    Status::with_error_details(code, message, details)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_survive_the_status() {
        let status = invalid_argument("sampling.top_p", "must be in (0, 1], got 2");
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.message(), "sampling.top_p: must be in (0, 1], got 2");
        assert_eq!(
            violations(&status),
            [("sampling.top_p".to_owned(), "must be in (0, 1], got 2".to_owned())]
        );

        let status =
            unavailable("WORKER_LOST", "worker w1 is lost", Some(Duration::from_millis(1500)));
        assert_eq!(retry_after(&status), Some(Duration::from_millis(1500)));
        assert_eq!(reason(&status).as_deref(), Some("WORKER_LOST"));
        assert_eq!(retry_after(&internal("BUG", "x")), None);
    }
}
