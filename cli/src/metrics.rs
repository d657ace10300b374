//! The page of figures that Prometheus reads, `/metrics` in its text format and `/metrics.json` with the same snapshot, and
//! the answers for probes: `/livez` from the start of the process on, `/readyz` while it does its work.
//!
//! A scrape is one short connection: it is closed after its answer, and in any case after a few seconds, so that slow or
//! silent clients hold nothing for long. There is a limit of open ones; more wait in the kernel's queue.

mod membership;

use std::{
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    http::{
        StatusCode,
        header::{CONNECTION, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
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

pub(crate) use self::membership::{MembershipCollector, MembershipReport};
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

/// Whether a process does its work now, or why it does not.
pub(crate) type Ready = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// What is shown: a registry for Prometheus, the same snapshot as JSON, and whether requests may come.
pub(crate) struct Page {
    pub(crate) registry: Registry,
    pub(crate) json: Box<dyn Fn() -> serde_json::Value + Send + Sync>,
    pub(crate) ready: Ready,
}

/// A page that is served; dropping it ends that.
#[derive(Debug)]
pub(crate) struct Metrics {
    shown: Shown,
    _tasks: JoinSet<()>,
}

impl Metrics {
    /// Binds the page's address and answers there from now on. It says that nothing is ready until there is something to
    /// show, and again once `asked` is cancelled.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub(crate) fn start(address: SocketAddr, asked: CancellationToken) -> Result<Self, Error> {
        let failed = |error| cannot_listen(address, error, "--metrics-listen");
        let listener = shimmer_worker::bind(&address.to_string())
            .map_err(|error| cannot_listen(address, error, "--metrics-listen"))?;
        let at = listener.local_addr().map_err(failed)?;
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        output::line(&format!("metrics on http://{at}/metrics"))?;
        tracing::info!(address = %at, "figures for Prometheus");
        let shown = Shown { page: Arc::default(), asked };
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, shown.clone(), LIMITS));
        Ok(Self { shown, _tasks: tasks })
    }

    /// Shows this page from now on; the first one stays.
    pub(crate) fn show(&self, page: Page) {
        assert!(self.shown.page.set(page).is_ok(), "a process has one page");
    }
}

/// What the handlers see.
#[derive(Clone)]
struct Shown {
    page: Arc<OnceLock<Page>>,
    asked: CancellationToken,
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shown").field("asked", &self.asked).finish_non_exhaustive()
    }
}

/// What is said as long as there is no page.
const LOADING: &str = "loading: this process does not serve yet";

impl Shown {
    /// Whether requests may come.
    fn ready(&self) -> Result<(), String> {
        if self.asked.is_cancelled() {
            return Err("draining: this process was asked to stop".to_owned());
        }
        (self.page.get().ok_or_else(|| LOADING.to_owned())?.ready)()
    }
}

async fn serve(listener: TcpListener, shown: Shown, limits: Limits) {
    let open = Arc::new(Semaphore::new(limits.connections));
    let listener = Limited { listener, open, time: limits.time };
    if let Err(error) = axum::serve(listener, router(shown)).await {
        tracing::error!(%error, "the metrics page has ended");
    }
}

fn router(shown: Shown) -> Router {
    let (text, json, ready) = (shown.clone(), shown.clone(), shown);
    let text = move || async move {
        let Some(page) = text.page.get() else { return unready(LOADING) };
        let mut text = String::new();
        prometheus_text::encode(&mut text, &page.registry).expect("a string takes everything");
        ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"), (CONNECTION, "close")], text)
            .into_response()
    };
    let json = move || async move {
        let Some(page) = json.page.get() else { return unready(LOADING) };
        let value = (page.json)().to_string();
        ([(CONTENT_TYPE, "application/json"), (CONNECTION, "close")], value).into_response()
    };
    let ready = move || async move {
        match ready.ready() {
            Ok(()) => plain(StatusCode::OK, "ready"),
            Err(reason) => unready(&reason),
        }
    };
    Router::new()
        .route("/metrics", get(text))
        .route("/metrics.json", get(json))
        .route("/livez", get(|| async { plain(StatusCode::OK, "alive") }))
        .route("/readyz", get(ready))
}

fn unready(reason: &str) -> Response {
    plain(StatusCode::SERVICE_UNAVAILABLE, reason)
}

/// One line of text for people and probes.
fn plain(status: StatusCode, text: &str) -> Response {
    let head = [(CONTENT_TYPE, "text/plain; charset=utf-8"), (CONNECTION, "close")];
    (status, head, format!("{text}\n")).into_response()
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
