//! What an error of etcd means for whoever made the call.

use std::error::Error as _;

use etcd_client::Error;
use tonic::{Code, Status};

use crate::identity::shown;

/// Why a try did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// Nobody answered who could: it may have happened or not, and another node or a later try may do.
    Unanswered(String),
    /// The same request will be refused again until somebody changes something.
    Refused(String),
    /// The session with this node is not valid any more; a new one may be.
    Unauthenticated(String),
    /// The lease has run out.
    LeaseGone,
}

impl Failure {
    /// For people.
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Unanswered(text) | Self::Refused(text) | Self::Unauthenticated(text) => text,
            Self::LeaseGone => "the lease has run out",
        }
    }

    /// Reads an error of the client library.
    pub(super) fn of(endpoint: &str, error: &Error) -> Self {
        let detail = |text: String| format!("{endpoint}: {text}");
        match error {
            Error::GRpcStatus(status) => Self::of_status(endpoint, status),
            // The library's own word for a renewal that was answered with no time left.
            Error::LeaseKeepAliveError(text) if text == "lease not found" => Self::LeaseGone,
            Error::InvalidArgs(_) | Error::InvalidUri(_) | Error::InvalidMetadataValue(_) => {
                Self::Refused(detail(error.to_string()))
            }
            Error::TransportError(error) => Self::Unanswered(detail(chain(error))),
            _ => Self::Unanswered(detail(error.to_string())),
        }
    }

    fn of_status(endpoint: &str, status: &Status) -> Self {
        let message = status.message();
        let text = match status.source() {
            Some(source) => format!("{endpoint}: {}", chain(source)),
            None => format!("{endpoint}: {}", shown(message)),
        };
        match status.code() {
            Code::NotFound if message.contains("requested lease not found") => Self::LeaseGone,
            // Also "revision of auth store is old", which comes as an invalid argument.
            Code::Unauthenticated => Self::Unauthenticated(text),
            Code::InvalidArgument if message.contains("auth store is old") => {
                Self::Unauthenticated(text)
            }
            Code::InvalidArgument if message.contains("user name is empty") => Self::Refused(
                format!("{text} (it asks for a user: give --etcd-user and a password)"),
            ),
            Code::ResourceExhausted if message.contains("space exceeded") => Self::Refused(
                format!("{text} (compact and defragment it, then `etcdctl alarm disarm`)"),
            ),
            Code::InvalidArgument | Code::PermissionDenied | Code::FailedPrecondition => {
                Self::Refused(text)
            }
            _ => Self::Unanswered(text),
        }
    }
}

/// An error with its causes, none of them twice.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    shown(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(code: Code, message: &str, expected: fn(String) -> Failure) {
        let error = Error::GRpcStatus(Status::new(code, message));
        let found = Failure::of("http://e:1", &error);
        assert_eq!(found, expected(found.text().to_owned()), "{message}");
        assert!(found == Failure::LeaseGone || found.text().contains(message), "{found:?}");
    }

    #[test]
    fn each_answer_of_etcd() {
        let gone = |_| Failure::LeaseGone;
        check(Code::NotFound, "etcdserver: requested lease not found", gone);
        check(Code::Unavailable, "etcdserver: no leader", Failure::Unanswered);
        check(Code::Unavailable, "etcdserver: request timed out", Failure::Unanswered);
        check(Code::Unknown, "transport error", Failure::Unanswered);
        check(
            Code::OutOfRange,
            "etcdserver: mvcc: required revision has been compacted",
            Failure::Unanswered,
        );
        check(Code::ResourceExhausted, "etcdserver: too many requests", Failure::Unanswered);
        check(
            Code::ResourceExhausted,
            "etcdserver: mvcc: database space exceeded",
            Failure::Refused,
        );
        check(Code::PermissionDenied, "etcdserver: permission denied", Failure::Refused);
        check(Code::InvalidArgument, "etcdserver: user name is empty", Failure::Refused);
        check(Code::InvalidArgument, "etcdserver: request is too large", Failure::Refused);
        check(Code::Unauthenticated, "etcdserver: invalid auth token", Failure::Unauthenticated);
        check(
            Code::InvalidArgument,
            "etcdserver: revision of auth store is old",
            Failure::Unauthenticated,
        );
        let gone = Error::LeaseKeepAliveError("lease not found".to_owned());
        assert_eq!(Failure::of("e", &gone), Failure::LeaseGone);
    }
}
