//! Why a fetch failed, with the URL, and what the user can do.

use std::time::Duration;

use shimmer_model::Fault;
use tokio::task::JoinError;

/// The end of a fetch.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// The directory, a file of it, or the manifest.
    #[error(transparent)]
    Model(#[from] shimmer_model::Error),
    /// The server refuses.
    #[error("{url}: status {status}{said}")]
    Refused { url: String, status: u16, said: String, hint: Option<String> },
    /// The server has a file of another length.
    #[error("{url}: the manifest says {expected} bytes, the server has {found}")]
    Length { url: String, expected: u64, found: String },
    /// The server does not keep to HTTP.
    #[error("{url}: {problem}")]
    Odd { url: String, problem: String },
    /// The peer is not trusted, or does not speak TLS.
    #[error("{url}: TLS: {reason}")]
    Tls { url: String, reason: String },
    /// Every try failed in a way that passes.
    #[error("{url}: gave up after {tries} tries without getting on: {why}")]
    GaveUp { url: String, tries: u32, why: String },
    /// A file had several versions while it was fetched.
    #[error("{url}: the file changed at the source {times} times while it was fetched")]
    Changing { url: String, times: u32 },
    /// What the server has is not what the manifest says.
    #[error("{url}: {} has digest {}, the manifest says {}{more}", fault.what, fault.found, fault.expected)]
    Damaged { url: String, fault: Fault, more: String },
    /// A file of the configuration.
    #[error("{file}: {reason}")]
    Setting { file: String, reason: String },
    /// A signal came.
    #[error("stopped; run the same command again to continue")]
    Stopped,
    /// A defect.
    #[error("stopped half-way: {0}")]
    Task(JoinError),
}

impl FetchError {
    pub(super) fn task(error: JoinError) -> Self {
        Self::Task(error)
    }

    /// What the user can do, where the error itself does not say.
    pub(crate) fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Refused { hint, .. } => return hint.clone(),
            Self::Length { .. } => {
                "the copy at the source is not whole, or of another container: upload it again"
            }
            Self::Odd { .. } => "check that the URL is that of a file server or a bucket",
            Self::Tls { .. } => {
                "--ca FILE gives the authorities to believe instead of those of the system"
            }
            Self::GaveUp { .. } => {
                "run the same command again to continue; --retries and --stall-timeout give the source more time"
            }
            Self::Changing { .. } => {
                "wait until the upload has ended; if several servers stand behind the name, they must give one ETag"
            }
            Self::Damaged { .. } => {
                "the copy at the source is damaged: check it with `shimmer verify` where it lies and upload it again"
            }
            Self::Model(_) | Self::Setting { .. } | Self::Stopped | Self::Task(_) => return None,
        };
        Some(text.to_owned())
    }
}

/// The end of one try.
#[derive(Debug)]
pub(super) enum Failure {
    /// The next one may be better; `after` is what the server asked for.
    Passing { why: String, after: Option<Duration> },
    /// What has come is of another version of the file.
    Changed,
    /// No try will do.
    Final(FetchError),
}

impl Failure {
    pub(super) fn passing(why: impl Into<String>) -> Self {
        Self::Passing { why: why.into(), after: None }
    }
}

impl From<shimmer_model::Error> for Failure {
    fn from(error: shimmer_model::Error) -> Self {
        Self::Final(error.into())
    }
}
