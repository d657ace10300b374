//! The page of figures that Prometheus reads: `/metrics` in its text format, `/metrics.json` with the same snapshot.
//!
//! A scrape is one short connection: it is closed after its answer, and in any case after a few seconds, so that slow or
//! silent clients hold nothing for long. There is a limit of open ones; more wait in the kernel's queue.

mod membership;
mod process;

use std::{
    future::Future,
    io,
    net::{SocketAddr, TcpListener as StdListener},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    http::header::{CONNECTION, CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
    serve::Listener,
};
use prometheus_client::{encoding::prometheus_text, registry::Registry};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::Sleep,
};
use tokio_util::sync::CancellationToken;

pub(crate) use self::{
    membership::{MembershipCollector, MembershipReport},
    process::ProcessCollector,
};
use crate::{commands::cannot_listen, error::Error, output};

/// What a page gives to its clients.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Connections that are served at the same time.
    connections: usize,
    /// Life of a connection.
    time: Duration,
}

/// A scrape takes milliseconds; Prometheus gives up after 10 s by itself, and two of them are many.
const LIMITS: Limits = Limits { connections: 16, time: Duration::from_secs(10) };

/// What is shown: a registry for Prometheus, and the same snapshot as JSON.
pub(crate) struct Page {
    pub(crate) registry: Registry,
    pub(crate) json: Box<dyn Fn() -> serde_json::Value + Send + Sync>,
}

/// A bound page that nobody serves yet.
#[derive(Debug)]
pub(crate) struct Metrics {
    listener: StdListener,
    address: SocketAddr,
}

impl Metrics {
    /// Binds the page's address before anything slow is done.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub(crate) fn bind(address: SocketAddr) -> Result<Self, Error> {
        let listener = shimmer_worker::bind(&address.to_string())
            .map_err(|error| cannot_listen(address, error, "--metrics-listen"))?;
        let address = listener
            .local_addr()
            .map_err(|error| cannot_listen(address, error, "--metrics-listen"))?;
        output::line(&format!("metrics on http://{address}/metrics"))?;
        Ok(Self { listener, address })
    }

    /// Serves until `shutdown` is cancelled.
    async fn serve(
        self,
        page: Page,
        limits: Limits,
        shutdown: CancellationToken,
    ) -> io::Result<()> {
        let listener = Limited {
            listener: TcpListener::from_std(self.listener)?,
            open: Arc::new(Semaphore::new(limits.connections)),
            time: limits.time,
        };
        axum::serve(listener, router(page)).with_graceful_shutdown(shutdown.cancelled_owned()).await
    }
}

/// Runs a server to its end with the page beside it, if there is one.
pub(crate) async fn beside<T>(
    server: impl Future<Output = T>,
    metrics: Option<Metrics>,
    page: Page,
    shutdown: CancellationToken,
) -> T {
    let Some(metrics) = metrics else { return server.await };
    tracing::info!(address = %metrics.address, "figures for Prometheus");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        if let Err(error) = metrics.serve(page, LIMITS, shutdown).await {
            tracing::error!(%error, "the metrics page has ended");
        }
    });
    // The set ends the page when the server has ended.
    server.await
}

fn router(page: Page) -> Router {
    let page = Arc::new(page);
    let shown = Arc::clone(&page);
    let text = move || async move {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &shown.registry).expect("a string takes everything");
        ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"), (CONNECTION, "close")], text)
            .into_response()
    };
    let json = move || async move {
        let value = (page.json)().to_string();
        ([(CONTENT_TYPE, "application/json"), (CONNECTION, "close")], value).into_response()
    };
    Router::new().route("/metrics", get(text)).route("/metrics.json", get(json))
}

/// Accepts no more connections than there may be, each for a limited time.
struct Limited {
    listener: TcpListener,
    open: Arc<Semaphore>,
    time: Duration,
}

impl Listener for Limited {
    type Io = Brief;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Brief, SocketAddr) {
        let permit = Arc::clone(&self.open).acquire_owned().await.expect("never closed");
        let (socket, peer) = Listener::accept(&mut self.listener).await;
        let end = Box::pin(tokio::time::sleep(self.time));
        (Brief { socket, end, _permit: permit }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that ends after its time, whatever its peer does.
struct Brief {
    socket: TcpStream,
    end: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Brief {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Brief {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Brief {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

/// A registry of one collector.
pub(crate) fn registry(collector: impl prometheus_client::collector::Collector) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(collector));
    registry
}

#[cfg(test)]
mod tests;
