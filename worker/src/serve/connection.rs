//! One connection, whatever carries it.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use shimmer_proto::{
    channel,
    expert::v1::{
        SessionRequest,
        expert_service_server::{ExpertService, ExpertServiceServer},
    },
    flood::Flood,
    limits::MAX_MESSAGE_BYTES,
    tls::Acceptor,
};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::{pb::health_server::HealthServer, server::HealthService};

use super::{
    ServeConfig,
    beside::Beside,
    drain::{Drain, Seats},
    port::PeerBytes,
    room::WorkRoom,
    stream::{SessionStream, Shell},
    watched::WatchedSocket,
};
use crate::{counters::Counters, expert_core::ExpertCore};

/// What all connections share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) core: Arc<ExpertCore>,
    pub(super) room: Arc<WorkRoom>,
    pub(super) config: ServeConfig,
    pub(super) drain: Arc<Drain>,
    pub(super) seats: Arc<Seats>,
    pub(super) beside: Beside,
    pub(super) health: HealthServer<HealthService>,
    pub(super) acceptor: Acceptor,
    /// Lines about sockets that became no connection.
    pub(super) turned_away: Arc<Flood>,
}

/// Time that the work of a stream gets to end when the drain time is over.
pub(super) const LAST_WORK: Duration = Duration::from_secs(1);
/// Time that a connection without a coordinator gets to close then.
const LAST_WORD: Duration = Duration::from_millis(200);

/// One connection of a worker, which whoever carries it has served.
pub struct Connection {
    pub(super) serial: u64,
    pub(super) peer: SocketAddr,
    pub(super) shared: Shared,
    /// The server waits until every connection has dropped its own.
    pub(super) _open: mpsc::Sender<()>,
}

impl Connection {
    /// Its number, from 1.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// Where it comes from.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Serves it until it closes, or until the drain time is over.
    pub async fn serve(self, stream: impl PeerBytes) {
        serve(stream, self.peer, self.shared.clone()).await;
    }

    pub(super) fn acceptor(&self) -> &Acceptor {
        &self.shared.acceptor
    }

    pub(super) fn counters(&self) -> &Counters {
        self.shared.core.counters()
    }

    /// Lines about sockets that became no connection.
    pub(super) fn turned_away(&self) -> &Flood {
        &self.shared.turned_away
    }

    /// Waits until streams are to be ended.
    pub(super) async fn over(&self) {
        self.shared.drain.over().await;
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("serial", &self.serial)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

async fn serve(socket: impl PeerBytes, peer: SocketAddr, shared: Shared) {
    let closed = CancellationToken::new();
    let called = Arc::new(AtomicBool::new(false));
    let Shared { core, room, config, drain, seats, beside, health, acceptor: _, turned_away: _ } =
        shared;
    let sessions = Sessions {
        shell: Shell {
            core: Arc::clone(&core),
            room,
            peer,
            drain: Arc::clone(&drain),
            seats: Arc::clone(&seats),
            beside,
            hello_timeout: config.hello_timeout,
        },
    };
    let messages = core.messages();
    let service = ExpertServiceServer::new(sessions)
        .max_decoding_message_size(messages.request)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let seen = Arc::clone(&called);
    let mark = move |request: Request<()>| {
        seen.store(true, Ordering::Relaxed);
        Ok::<_, Status>(request)
    };
    let one = tokio_stream::once(Ok::<_, io::Error>(WatchedSocket::new(socket, closed.clone())));
    let incoming = one.chain(tokio_stream::pending());
    let ended = async {
        tokio::select! {
            () = closed.cancelled() => (),
            () = drain.over() => (),
        }
    };
    let overdue = async {
        drain.over().await;
        tokio::time::sleep(if seats.are_empty() { LAST_WORD } else { LAST_WORK }).await;
    };
    // What lies in the windows while something else is worked on was planned as well.
    let serving = channel::server_builder()
        .initial_stream_window_size(messages.window())
        .initial_connection_window_size(messages.window())
        .layer(tonic::service::InterceptorLayer::new(mark))
        .add_service(health)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, ended);
    let silent = async {
        tokio::time::sleep(config.hello_timeout).await;
        if called.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        result = serving => {
            if let Err(error) = result {
                tracing::debug!(%peer, %error, "connection ended");
            }
        }
        () = overdue => tracing::warn!(%peer, "the connection did not end within the drain time; closing it"),
        () = silent => {
            Counters::bump(&core.counters().connections_silent);
            tracing::warn!(%peer, "no call within the hello deadline; closing the connection");
        }
    }
}

/// The service of one connection.
struct Sessions {
    shell: Shell,
}

#[tonic::async_trait]
impl ExpertService for Sessions {
    type SessionStream = SessionStream;

    async fn session(
        &self,
        request: Request<Streaming<SessionRequest>>,
    ) -> Result<Response<SessionStream>, Status> {
        Ok(Response::new(SessionStream::new(self.shell.clone(), request.into_inner())))
    }
}
