//! Where connections come from, and what carries each of them.

use std::{io, net::SocketAddr};

use shimmer_proto::tls::AcceptError;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};
use tonic::transport::server::Connected;

use super::{beside::Beside, connection::Connection};
use crate::counters::Counters;

/// The bytes of a peer that may speak.
pub trait PeerBytes: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static> PeerBytes for T {}

/// A port of a host, real or simulated.
pub trait Port {
    /// What it accepts.
    type Socket;

    /// Waits for the next peer.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Socket, SocketAddr)>>;

    /// Has a connection [served](Connection::serve) to its end, beside all others. It is closed if it cannot be.
    fn carry(&self, socket: Self::Socket, connection: Connection);

    /// What runs beside the connections.
    fn beside(&self) -> Beside;
}

/// Each connection gets a thread.
impl Port for TcpListener {
    type Socket = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        Self::accept(self).await
    }

    fn carry(&self, socket: TcpStream, connection: Connection) {
        let (serial, peer) = (connection.serial(), connection.peer());
        let run = move || {
            if let Err(error) = run(socket, connection) {
                tracing::warn!(%peer, %error, "connection");
            }
        };
        let started = Beside::Threads.start(&format!("peer-{serial}"), run);
        if let Err(error) = started {
            tracing::warn!(%peer, %error, "starting a thread for a connection; closing it");
        }
    }

    fn beside(&self) -> Beside {
        Beside::Threads
    }
}

/// Serves one socket until it closes, or until the drain time is over.
fn run(socket: TcpStream, connection: Connection) -> io::Result<()> {
    let socket = socket.into_std()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let socket = TcpStream::from_std(socket)?;
        let accepted = tokio::select! {
            accepted = connection.acceptor().accept(socket) => accepted,
            () = connection.over() => return Ok(()),
        };
        match accepted {
            Ok(stream) => connection.serve(stream).await,
            Err(error) => turn_away(&connection, &error),
        }
        Ok(())
    })
}

/// Counts a socket that became no connection. Whoever only knocks, as probes of ports do, is not worth a line.
fn turn_away(connection: &Connection, error: &AcceptError) {
    let (peer, counters) = (connection.peer(), connection.counters());
    match error {
        AcceptError::Closed => {
            tracing::debug!(%peer, %error, "connection");
            return;
        }
        AcceptError::Late(_) => Counters::bump(&counters.connections_silent),
        _ => Counters::bump(&counters.handshakes_failed),
    }
    if let Some(more) = connection.turned_away().line() {
        tracing::warn!(%peer, reason = %error, more, "connection refused");
    }
}
