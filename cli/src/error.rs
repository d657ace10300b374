//! Errors of the commands, how they are shown, and the exit codes they give.

use std::{error::Error as StdError, fmt::Write as _, process::ExitCode};

use shimmer_proto::status::told;
use tonic::Status;
use tonic_types::StatusExt as _;

use crate::config::{ConfigError, EnvironmentError};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting or argument cannot be used. Exit code 2.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An unknown `SHIMMER_` variable. Exit code 2.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// Something else that was asked for is refused before any work. Exit code 2.
    #[error("{message}")]
    Refused { message: String, hint: Option<String> },
    /// The work failed. Exit code 1.
    #[error("{doing}")]
    Failed { doing: String, hint: Option<String>, source: Box<dyn StdError + Send + Sync> },
    /// The server answered with an error. Exit code 1; 2 when it refused an argument.
    #[error("{}", describe(.0))]
    Status(Box<Status>),
    /// Whoever read our output has closed it; nothing is wrong. Exit code 0.
    #[error("standard output is closed")]
    ClosedPipe,
    /// Standard output cannot be written, for example because a disk is full. Exit code 1.
    #[error("cannot write to standard output")]
    Output(#[source] std::io::Error),
}

impl Error {
    /// The work failed; `doing` names it and its object.
    pub fn failed(
        doing: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self::Failed { doing: doing.into(), hint: None, source: source.into() }
    }

    /// A refusal before any work.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::Refused { message: message.into(), hint: None }
    }

    /// Adds what the user can do.
    #[must_use]
    pub fn with_hint(mut self, text: impl Into<String>) -> Self {
        if let Self::Refused { hint, .. } | Self::Failed { hint, .. } = &mut self {
            *hint = Some(text.into());
        }
        self
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Refused { hint, .. } | Self::Failed { hint, .. } => hint.clone(),
            Self::Config(_) => Some(
                "`--help` explains every key, `--print-config` shows the effective ones".to_owned(),
            ),
            Self::Environment(_) => Some("unset it or correct its name".to_owned()),
            _ => None,
        }
    }

    /// 0 when nothing is wrong, 1 when the work failed, 2 when the configuration or a budget is refused.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::ClosedPipe => ExitCode::SUCCESS,
            Self::Config(_) | Self::Environment(_) | Self::Refused { .. } => ExitCode::from(2),
            Self::Status(status) if status.code() == tonic::Code::InvalidArgument => {
                ExitCode::from(2)
            }
            Self::Failed { .. } | Self::Status(_) | Self::Output(_) => ExitCode::FAILURE,
        }
    }

    /// One line with the chain of causes, and a second with what the user can do; none for a closed pipe.
    pub fn render(&self) -> Option<String> {
        if matches!(self, Self::ClosedPipe) {
            return None;
        }
        let mut text = format!("shimmer: error: {}", one_line(&self.to_string()));
        let mut shown = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            // Some errors repeat their source in their own text.
            let message = error.to_string();
            if !shown.ends_with(&message) {
                write!(text, ": {}", one_line(&message)).expect("a String takes any text");
            }
            shown = message;
            cause = error.source();
        }
        if let Some(hint) = self.hint() {
            write!(text, "\n  hint: {}", one_line(&hint)).expect("a String takes any text");
        }
        Some(text)
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

fn one_line(text: &str) -> String {
    text.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// The answer of a server: what it says, each refused field, and when to come back.
fn describe(status: &Status) -> String {
    let mut text = format!("{}: {}", code_name(status.code()), told(status));
    let details = status.get_error_details();
    if let Some(bad_request) = details.bad_request() {
        for violation in &bad_request.field_violations {
            if !status.message().contains(&violation.description) {
                write!(text, "; {}: {}", violation.field, violation.description)
                    .expect("a String takes any text");
            }
        }
    }
    if let Some(delay) = details.retry_info().and_then(|retry| retry.retry_delay) {
        write!(text, " (try again in {} ms)", delay.as_millis()).expect("a String takes any text");
    }
    text
}

/// The code as the gRPC documentation writes it.
fn code_name(code: tonic::Code) -> &'static str {
    use tonic::Code;
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
