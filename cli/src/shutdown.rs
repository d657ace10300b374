//! SIGTERM and SIGINT: the first asks for a graceful end, the second ends at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::error::Error;

/// A token that is cancelled by the first SIGTERM or SIGINT. A second one ends the process with code 130, as a shell
/// expects of an interrupted command.
///
/// # Errors
/// The handlers cannot be installed.
pub(crate) fn on_signal() -> Result<CancellationToken, Error> {
    let install =
        |kind| signal(kind).map_err(|error| Error::failed("cannot listen for signals", error));
    let mut terminate = install(SignalKind::terminate())?;
    let mut interrupt = install(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let asked = token.clone();
    #[expect(
        clippy::disallowed_methods,
        reason = "listens until the process ends; nothing waits for it"
    )]
    let _listener = tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if asked.is_cancelled() {
                #[expect(
                    clippy::exit,
                    reason = "the second signal asks for an end without any more work"
                )]
                std::process::exit(130);
            }
            tracing::info!(signal = name, "asked to stop");
            asked.cancel();
        }
    });
    Ok(token)
}
