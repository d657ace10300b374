//! SIGTERM and SIGINT: the first asks for a graceful end, the second ends at once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::error::Error;

/// A token that is cancelled by the first SIGTERM or SIGINT. A second one ends the process with code 130, as a shell
/// expects of an interrupted command.
///
/// # Errors
/// The handlers cannot be installed.
pub(crate) fn on_signal() -> Result<CancellationToken, Error> {
    Ok(while_starting()?.serving())
}

/// Signals of a process that does not serve yet.
#[derive(Debug)]
pub(crate) struct Stop {
    asked: CancellationToken,
    serving: Arc<AtomicBool>,
}

impl Stop {
    /// The token of [`on_signal`]: from now on the first signal asks for a graceful end.
    pub(crate) fn serving(&self) -> CancellationToken {
        self.serving.store(true, Ordering::SeqCst);
        self.asked.clone()
    }

    /// The same token, which nothing cancels before [`Stop::serving`].
    pub(crate) fn asked(&self) -> CancellationToken {
        self.asked.clone()
    }
}

/// Hears signals before there is anything to end gracefully: the first one ends the process with code 0. Without a
/// handler the first process of a container would not notice it.
///
/// # Errors
/// The handlers cannot be installed.
pub(crate) fn while_starting() -> Result<Stop, Error> {
    let install =
        |kind| signal(kind).map_err(|error| Error::failed("cannot listen for signals", error));
    let mut terminate = install(SignalKind::terminate())?;
    let mut interrupt = install(SignalKind::interrupt())?;
    let stop = Stop { asked: CancellationToken::new(), serving: Arc::default() };
    let (asked, serving) = (stop.asked.clone(), Arc::clone(&stop.serving));
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
                end(130);
            }
            tracing::info!(signal = name, "asked to stop");
            if !serving.load(Ordering::SeqCst) {
                end(0);
            }
            asked.cancel();
        }
    });
    Ok(stop)
}

#[expect(clippy::exit, reason = "a signal asks for an end without any more work")]
fn end(code: i32) -> ! {
    std::process::exit(code)
}
