//! One connection on its own thread.

use std::{
    io,
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
    tls::{AcceptError, Acceptor, PeerStream},
};
use tokio::net::TcpStream;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::{pb::health_server::HealthServer, server::HealthService};

use super::{
    ServeConfig,
    drain::{Drain, Seats},
    room::WorkRoom,
    stream::{SessionStream, Shell},
    watched::Watch,
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
    pub(super) health: HealthServer<HealthService>,
    pub(super) acceptor: Acceptor,
    /// Lines about sockets that became no connection.
    pub(super) turned_away: Arc<Flood>,
}

/// Time that the work of a stream gets to end when the drain time is over.
pub(super) const LAST_WORK: Duration = Duration::from_secs(1);
/// Time that a connection without a coordinator gets to close then.
const LAST_WORD: Duration = Duration::from_millis(200);

/// Serves one socket until it closes, or until the drain time is over.
pub(super) fn run(socket: TcpStream, peer: SocketAddr, shared: Shared) -> io::Result<()> {
    let socket = socket.into_std()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let socket = TcpStream::from_std(socket)?;
        let accepted = tokio::select! {
            accepted = shared.acceptor.accept(socket) => accepted,
            () = shared.drain.over() => return Ok(()),
        };
        match accepted {
            Ok(stream) => serve(stream, peer, shared).await,
            Err(error) => turn_away(peer, &error, shared.core.counters(), &shared.turned_away),
        }
        Ok(())
    })
}

/// Counts a socket that became no connection. Whoever only knocks, as probes of ports do, is not worth a line.
fn turn_away(peer: SocketAddr, error: &AcceptError, counters: &Counters, flood: &Flood) {
    match error {
        AcceptError::Closed => {
            tracing::debug!(%peer, %error, "connection");
            return;
        }
        AcceptError::Late(_) => Counters::bump(&counters.connections_silent),
        _ => Counters::bump(&counters.handshakes_failed),
    }
    if let Some(more) = flood.line() {
        tracing::warn!(%peer, reason = %error, more, "connection refused");
    }
}

async fn serve(socket: PeerStream, peer: SocketAddr, shared: Shared) {
    let closed = CancellationToken::new();
    let called = Arc::new(AtomicBool::new(false));
    let Shared { core, room, config, drain, seats, health, acceptor: _, turned_away: _ } = shared;
    let sessions = Sessions {
        shell: Shell {
            core: Arc::clone(&core),
            room,
            peer,
            drain: Arc::clone(&drain),
            seats: Arc::clone(&seats),
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
    let one = tokio_stream::once(Ok::<_, io::Error>(socket.with(Watch::new(closed.clone()))));
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
