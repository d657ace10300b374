//! What a role has from its first moment to its last: it hears signals and answers probes, on a thread of its own, however
//! long the container takes to load.

use std::net::SocketAddr;

use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    metrics::{Metrics, Page},
    shutdown::{self, Stop},
};

/// The thread and what it attends to. Dropping it ends the page of figures.
#[derive(Debug)]
pub(crate) struct Attendant {
    metrics: Option<Metrics>,
    stop: Stop,
    _runtime: Runtime,
}

impl Attendant {
    /// Begins, before anything slow is done.
    ///
    /// # Errors
    /// The page's address cannot be listened on, or signals cannot be heard.
    pub(crate) fn start(metrics_listen: Option<SocketAddr>) -> Result<Self, Error> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("attendant")
            .enable_all()
            .build()
            .map_err(|error| {
                Error::failed("cannot start the thread of signals and probes", error)
            })?;
        let entered = runtime.enter();
        let stop = shutdown::while_starting()?;
        let metrics =
            metrics_listen.map(|address| Metrics::start(address, stop.asked())).transpose()?;
        drop(entered);
        Ok(Self { metrics, stop, _runtime: runtime })
    }

    /// The role serves from now on: shows its figures, and returns the token that a signal cancels.
    pub(crate) fn serving(&self, page: Page) -> CancellationToken {
        if let Some(metrics) = &self.metrics {
            metrics.show(page);
        }
        self.stop.serving()
    }
}
