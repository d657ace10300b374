//! The gRPC shell: accepts connections and gives each a thread of its own.
//!
//! One current-thread runtime per connection, because a round trip then never changes threads: the bytes are read,
//! checked, computed and answered where they arrived. It also keeps peers apart: a silent, slow or hostile one holds its
//! own thread and nothing else.

mod apart;
mod beside;
mod connection;
mod drain;
mod loads;
mod port;
mod room;
mod stream;
mod watched;

use std::{io, net::TcpListener as StdListener, sync::Arc, time::Duration};

use shimmer_proto::{
    expert::v1::expert_service_server::{ExpertService, ExpertServiceServer},
    flood::Flood,
    tls::{Acceptor, ServerTls},
};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_util::sync::CancellationToken;
use tonic_health::{
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

use crate::{counters::Counters, error::Error, expert_core::ExpertCore};
pub use beside::Beside;
pub use connection::Connection;
use drain::{Drain, Seats};
pub use port::{PeerBytes, Port};
use room::WorkRoom;

/// Limits and deadlines of the shell.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Connections open at the same time; more are closed at once.
    pub max_connections: usize,
    /// Mutual TLS on the port; absent: plaintext.
    pub tls: Option<ServerTls>,
    /// A new connection must make its TLS handshake, or on a plaintext port send its first byte, within this time.
    pub handshake_timeout: Duration,
    /// A new connection must make a call, and a new stream send its hello, within this time.
    pub hello_timeout: Duration,
    /// At shutdown, coordinators have this long to end their streams.
    pub drain_timeout: Duration,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            // One per coordinator, and room for health checks.
            max_connections: 256,
            tls: None,
            // Two round trips and a signature; what takes longer only holds a thread.
            handshake_timeout: Duration::from_secs(5),
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

/// Serves until `shutdown` is cancelled, and then until no coordinator has a stream any more, or the drain time is over. No
/// fault of a peer ends it.
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
    serve_port(core, listener, config, shutdown).await;
    Ok(())
}

/// As [`serve`], on a port that may be one of a simulation.
pub async fn serve_port(
    core: Arc<ExpertCore>,
    port: impl Port,
    config: ServeConfig,
    shutdown: CancellationToken,
) {
    let beside = port.beside();
    let health = HealthReporter::new();
    let health_service = HealthServer::new(HealthService::from_health_reporter(health.clone()));
    health.set_serving::<ExpertServiceServer<NameOnly>>().await;
    let room = Arc::new(WorkRoom::of(&core));
    // The hello of more is refused, because there is no memory for their messages.
    let (drain, seats) = (Arc::new(Drain::default()), Seats::new(core.coordinators()));
    let limit = config.handshake_timeout.min(config.hello_timeout);
    let acceptor = Acceptor::new(config.tls.clone(), limit);
    let shared = connection::Shared {
        core,
        room,
        config,
        drain,
        seats,
        beside,
        health: health_service,
        acceptor,
        turned_away: Arc::default(),
    };
    // Every connection holds a clone of `open`; the channel ends when the last one has.
    let (open, mut ended) = mpsc::channel::<()>(1);
    let accepting = accept_all(&port, &shared, open);
    tokio::select! {
        () = accepting => {}
        () = drained(&shared, &health, &shutdown) => {}
    }
    shared.drain.end();
    drop(port);
    // Each connection keeps its time itself; a computation may end a little later.
    let patience = connection::LAST_WORK * 2;
    if tokio::time::timeout(patience, ended.recv()).await.is_err() {
        tracing::warn!("connections did not end within the drain time");
    }
}

/// Waits until this worker is asked to stop, says so, and waits until it may.
async fn drained(
    shared: &connection::Shared,
    health: &HealthReporter,
    shutdown: &CancellationToken,
) {
    shutdown.cancelled().await;
    let time = shared.config.drain_timeout;
    tracing::info!(seconds = time.as_secs_f64(), "draining");
    shared.core.drain();
    // Who is told and looks at the health of this worker sees the same there.
    health.set_not_serving::<ExpertServiceServer<NameOnly>>().await;
    shared.drain.begin(time);
    if tokio::time::timeout(time, shared.seats.empty()).await.is_err() {
        tracing::warn!("coordinators still have streams at the end of the drain time");
    }
}

/// Has each connection carried. A failing accept is a shortage that passes, never the end.
async fn accept_all(port: &impl Port, shared: &connection::Shared, open: mpsc::Sender<()>) {
    let (counters, full) = (shared.core.counters(), Flood::default());
    for serial in 1u64.. {
        let (socket, peer) = loop {
            match port.accept().await {
                Ok(connection) => break connection,
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        };
        Counters::bump(&counters.connections);
        if open.strong_count() > shared.config.max_connections {
            Counters::bump(&counters.connections_refused);
            if let Some(more) = full.line() {
                let limit = shared.config.max_connections;
                tracing::warn!(%peer, limit, more, "too many connections; closing the newest");
            }
            continue;
        }
        let connection = Connection { serial, peer, shared: shared.clone(), _open: open.clone() };
        port.carry(socket, connection);
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
