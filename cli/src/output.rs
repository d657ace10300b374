//! Standard output: results only, and no panic when its reader has gone.

use std::io::{ErrorKind, IsTerminal as _, Write as _};

use crate::error::Error;

/// Writes text as it is and flushes, so that streamed answers appear at once.
///
/// # Errors
/// [`Error::ClosedPipe`] when the reader has gone.
pub(crate) fn write(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Error::ClosedPipe,
        _ => Error::Output(error),
    })
}

/// Writes one line.
///
/// # Errors
/// [`Error::ClosedPipe`] when the reader has gone.
pub(crate) fn line(text: &str) -> Result<(), Error> {
    write(&format!("{text}\n"))
}

/// Writes one line that a daemon has to say and that is not why it runs: whoever wanted to hear it may have gone, and the
/// disk may be full.
pub(crate) fn announce(text: &str) {
    if let Err(error) = line(text) {
        let cause = error.render().unwrap_or_else(|| "nobody reads it".to_owned());
        tracing::warn!(text, cause, "standard output does not take this line");
    }
}

/// Writes a value as one line of JSON.
///
/// # Errors
/// [`Error::ClosedPipe`] when the reader has gone.
pub(crate) fn json(value: &serde_json::Value) -> Result<(), Error> {
    line(&value.to_string())
}

/// Tells a person something that is not the result. Standard error may be closed: then nobody listens.
pub(crate) fn note(text: &str) {
    let mut err = std::io::stderr().lock();
    drop(writeln!(err, "{text}"));
}

/// A person looks at standard error.
pub(crate) fn is_watched() -> bool {
    std::io::stderr().is_terminal()
}
