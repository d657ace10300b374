//! The listening side: from an accepted socket to a stream of a peer that may speak.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::either::Either;
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::{Refusal, ServerTls, reason, refuse};

/// First byte of a TLS connection: a handshake record.
const TLS_HANDSHAKE: u8 = 0x16;

/// Time to take in a refusal.
const REFUSAL_LIMIT: Duration = Duration::from_secs(1);

/// What a plaintext peer hears on a port with TLS.
const WANTS_TLS: &str = "this port speaks TLS only: members need --tls-ca, --tls-cert and \
    --tls-key, clients https:// and --ca";

/// Makes streams of accepted sockets. Clones share the identity.
#[derive(Debug, Clone)]
pub struct Acceptor {
    tls: Option<ServerTls>,
    limit: Duration,
}

/// Why a socket became no stream.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// Nothing came, or not all of a handshake.
    #[error("no handshake within {} ms", .0.as_millis())]
    Late(Duration),
    /// The peer went away before it said anything: a probe of the port, most often.
    #[error("closed before the first byte")]
    Closed,
    /// A peer without TLS.
    #[error(
        "the peer speaks plaintext, this port TLS; give it --tls-ca, --tls-cert and --tls-key (clients: https:// and --ca)"
    )]
    Plaintext,
    /// A peer with TLS on a plaintext port.
    #[error(
        "the peer speaks TLS, this port plaintext; give this process the TLS files, or take them from the peer"
    )]
    UnexpectedTls,
    /// The handshake failed.
    #[error("{0}")]
    Handshake(String),
}

impl Acceptor {
    /// `limit` is for the whole handshake, or on a plaintext port for the first byte.
    pub fn new(tls: Option<ServerTls>, limit: Duration) -> Self {
        Self { tls, limit }
    }

    /// Whether the port speaks TLS.
    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Waits for the first byte and makes the handshake, within the limit. The socket is closed where this fails; a peer
    /// of the other kind hears why.
    ///
    /// # Errors
    /// See [`AcceptError`].
    pub async fn accept(&self, socket: TcpStream) -> Result<PeerStream, AcceptError> {
        let limit = self.limit;
        tokio::time::timeout(limit, self.greet(socket))
            .await
            .map_err(|_| AcceptError::Late(limit))?
    }

    async fn greet(&self, socket: TcpStream) -> Result<PeerStream, AcceptError> {
        let mut first = [0];
        // Without it small answers wait for acknowledgements.
        let read = match socket.set_nodelay(true) {
            Ok(()) => socket.peek(&mut first).await,
            Err(error) => Err(error),
        };
        match read {
            Ok(0) => return Err(AcceptError::Closed),
            Err(error) => {
                tracing::trace!(%error, "a socket failed before its first byte");
                return Err(AcceptError::Closed);
            }
            Ok(_) => {}
        }
        match (&self.tls, first[0] == TLS_HANDSHAKE) {
            (None, false) => Ok(PeerStream::new(Either::Left(socket))),
            (Some(tls), true) => {
                let acceptor = TlsAcceptor::from(tls.config());
                match acceptor.accept(socket).await {
                    Ok(stream) => Ok(PeerStream::new(Either::Right(Box::new(stream)))),
                    Err(error) => Err(AcceptError::Handshake(reason::of_io(&error))),
                }
            }
            (Some(_), false) => {
                refuse(socket, Refusal::Insecure, WANTS_TLS, REFUSAL_LIMIT).await;
                Err(AcceptError::Plaintext)
            }
            (None, true) => {
                // Not TLS either: the peer then knows that nobody here speaks it.
                refuse(socket, Refusal::Insecure, "this port speaks no TLS", REFUSAL_LIMIT).await;
                Err(AcceptError::UnexpectedTls)
            }
        }
    }
}

/// A peer's bytes, with or without TLS around them, and what stays with its connection until that is closed.
#[derive(Debug)]
pub struct PeerStream<C = ()> {
    bytes: Either<TcpStream, Box<TlsStream<TcpStream>>>,
    companion: C,
}

/// What stays with a connection.
pub trait Companion: Unpin {
    /// What a call knows of its connection.
    type Info: Clone + Send + Sync + 'static;

    /// The same, of one with this address.
    fn info(&self, tcp: TcpConnectInfo) -> Self::Info;

    /// Called before each read; an error closes the connection.
    ///
    /// # Errors
    /// The peer has been here for long enough.
    fn admit(&mut self, _cx: &mut Context<'_>) -> io::Result<()> {
        Ok(())
    }
}

impl Companion for () {
    type Info = TcpConnectInfo;

    fn info(&self, tcp: TcpConnectInfo) -> TcpConnectInfo {
        tcp
    }
}

impl PeerStream {
    fn new(bytes: Either<TcpStream, Box<TlsStream<TcpStream>>>) -> Self {
        Self { bytes, companion: () }
    }

    /// The same bytes in company.
    pub fn with<C: Companion>(self, companion: C) -> PeerStream<C> {
        PeerStream { bytes: self.bytes, companion }
    }
}

impl<C: Companion> Connected for PeerStream<C> {
    type ConnectInfo = C::Info;

    fn connect_info(&self) -> C::Info {
        let tcp = match &self.bytes {
            Either::Left(stream) => stream,
            Either::Right(stream) => stream.get_ref().0,
        };
        self.companion.info(tcp.connect_info())
    }
}

impl<C: Companion> AsyncRead for PeerStream<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.companion.admit(cx) {
            Ok(()) => Pin::new(&mut self.bytes).poll_read(cx, buf),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<C: Companion> AsyncWrite for PeerStream<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.bytes).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.bytes).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.bytes.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_shutdown(cx)
    }
}
