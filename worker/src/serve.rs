//! The gRPC shell: accepts connections and gives each a thread of its own.
//!
//! One current-thread runtime per connection, because a round trip then never changes threads: the bytes are read,
//! checked, computed and answered where they arrived. It also keeps peers apart: a silent, slow or hostile one holds its
//! own thread and nothing else.

mod apart;
mod connection;
mod room;
mod stream;
mod watched;

use std::{
    io,
    net::{SocketAddr, TcpListener as StdListener},
    sync::Arc,
    time::Duration,
};

use shimmer_proto::expert::v1::expert_service_server::{ExpertService, ExpertServiceServer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;
use tonic_health::{
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

use crate::{counters::Counters, error::Error, expert_core::ExpertCore};
use room::WorkRoom;

/// Limits and deadlines of the shell.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Connections open at the same time; more are closed at once.
    pub max_connections: usize,
    /// A new connection must make a call, and a new stream send its hello, within this time.
    pub hello_timeout: Duration,
    /// At shutdown, streams have this long to finish the work they are at.
    pub drain_timeout: Duration,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            // One per coordinator, and room for health checks.
            max_connections: 256,
            hello_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

/// Binds a listening socket. `[::]:port` takes IPv4 as well; on a host without IPv6 it falls back to `0.0.0.0`.
pub fn bind(address: &str) -> Result<StdListener, Error> {
    let failed = |source| Error::Listen { address: address.to_owned(), source };
    let listener = match StdListener::bind(address) {
        Err(error) if address.starts_with("[::]:") && no_ipv6(&error) => {
            tracing::warn!(address, "this host has no IPv6; listening on 0.0.0.0");
            StdListener::bind(address.replacen("[::]", "0.0.0.0", 1)).map_err(failed)?
        }
        other => other.map_err(failed)?,
    };
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

fn no_ipv6(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::Unsupported)
        || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

/// Serves until `shutdown` is cancelled, then waits for the work in progress. No fault of a peer ends it.
pub async fn serve(
    core: Arc<ExpertCore>,
    listener: StdListener,
    config: ServeConfig,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let failed = |source| Error::Listen { address: "the socket".to_owned(), source };
    let listener = listener
        .set_nonblocking(true)
        .and_then(|()| TcpListener::from_std(listener))
        .map_err(failed)?;
    let health = HealthReporter::new();
    let health_service = HealthServer::new(HealthService::from_health_reporter(health.clone()));
    health.set_serving::<ExpertServiceServer<NameOnly>>().await;
    let room = Arc::new(WorkRoom::of(&core));
    let shared = connection::Shared { core, room, config, shutdown, health: health_service };
    // Every connection thread holds a clone of `open`; the channel ends when the last one has.
    let (open, mut ended) = mpsc::channel::<()>(1);
    let mut serial = 0u64;
    while let Some((socket, peer)) = accept(&listener, &shared).await {
        let counters = shared.core.counters();
        Counters::bump(&counters.connections);
        if open.strong_count() > shared.config.max_connections {
            Counters::bump(&counters.connections_refused);
            tracing::warn!(%peer, limit = shared.config.max_connections, "too many connections; closing the newest");
            continue;
        }
        serial += 1;
        spawn(serial, socket, peer, &shared, open.clone());
    }
    tracing::info!("draining");
    drop((listener, open));
    health.set_not_serving::<ExpertServiceServer<NameOnly>>().await;
    // Each connection keeps the drain time itself; a computation may end a little later.
    let patience = shared.config.drain_timeout + Duration::from_secs(1);
    if tokio::time::timeout(patience, ended.recv()).await.is_err() {
        tracing::warn!("connections did not end within the drain time");
    }
    Ok(())
}

/// The next connection; none at shutdown. A failing accept is a shortage that passes, never the end.
async fn accept(
    listener: &TcpListener,
    shared: &connection::Shared,
) -> Option<(TcpStream, SocketAddr)> {
    loop {
        tokio::select! {
            () = shared.shutdown.cancelled() => return None,
            accepted = listener.accept() => match accepted {
                Ok(connection) => return Some(connection),
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
}

fn spawn(
    serial: u64,
    socket: TcpStream,
    peer: SocketAddr,
    shared: &connection::Shared,
    open: mpsc::Sender<()>,
) {
    let shared = shared.clone();
    let run = move || {
        if let Err(error) = connection::run(socket, peer, shared) {
            tracing::warn!(%peer, %error, "connection");
        }
        drop(open);
    };
    if let Err(error) = std::thread::Builder::new().name(format!("peer-{serial}")).spawn(run) {
        tracing::warn!(%peer, %error, "starting a thread for a connection; closing it");
    }
}

/// Carries the service's name to the health reporter.
struct NameOnly;

#[tonic::async_trait]
impl ExpertService for NameOnly {
    type SessionStream = stream::SessionStream;

    async fn session(
        &self,
        _request: tonic::Request<tonic::Streaming<shimmer_proto::expert::v1::SessionRequest>>,
    ) -> Result<tonic::Response<Self::SessionStream>, tonic::Status> {
        Err(tonic::Status::unimplemented("not a server"))
    }
}
