//! The connecting side: a gRPC channel to an address, with or without TLS.

use std::{error::Error, fmt, io, pin::Pin, sync::Arc, time::Duration};

use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, BufReader},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::{
    codegen::http::Uri,
    transport::{Channel, Endpoint},
};
use tower::{ServiceExt as _, service_fn};

use super::{ClientTls, reason};
use crate::{
    address::{AddressError, PeerAddress},
    channel::{self, KEEPALIVE_INTERVAL},
};

/// Bytes that are looked at before the connection is used. Larger reads go past the buffer.
const FIRST_BYTES: usize = 64;

/// Opens channels to peers. The name is resolved at every attempt, also when a channel connects again by itself, and the
/// certificates are those of that moment. Clones share the identity.
#[derive(Debug, Clone, Default)]
pub struct Dialer {
    tls: Option<ClientTls>,
    keepalive: Option<Keepalive>,
    network: Option<Arc<dyn Network>>,
}

/// How a silent connection is probed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// A connection that is silent for so long is probed.
    pub interval: Duration,
    /// A probe without an answer for this long ends the connection.
    pub timeout: Duration,
}

/// A network other than that of this host: one of a simulation.
pub trait Network: fmt::Debug + Send + Sync {
    /// Connects to a peer.
    fn connect(&self, address: &PeerAddress) -> Connecting;
}

/// A connection that is being made.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn BothWays>>> + Send>>;

/// Bytes to and from a peer.
pub trait BothWays: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> BothWays for T {}

/// Why there is no channel.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The address cannot be used.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Nobody answered in time.
    #[error("no answer within {} ms", .0.as_millis())]
    Late(Duration),
    /// Name resolution or the connection failed.
    #[error("{0}")]
    Unreachable(String),
    /// Somebody is there, but one of the two does not trust the other.
    #[error("TLS: {0}")]
    Tls(String),
}

/// What the connector gives up with, so that its kind is not lost on the way through tonic.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TlsFailure(String);

type Connection = TokioIo<BufReader<TlsStream<TcpStream>>>;

impl Dialer {
    /// Without TLS.
    pub fn plaintext() -> Self {
        Self::default()
    }

    /// With TLS.
    pub fn tls(tls: ClientTls) -> Self {
        Self { tls: Some(tls), ..Self::default() }
    }

    /// The same, probing silent connections by other times than the members of a cluster do: for clients that can go elsewhere
    /// when nobody answers.
    #[must_use]
    pub fn with_keepalive(self, keepalive: Keepalive) -> Self {
        Self { keepalive: Some(keepalive), ..self }
    }

    /// Without TLS, through another network.
    pub fn over(network: Arc<dyn Network>) -> Self {
        Self { network: Some(network), ..Self::default() }
    }

    /// Whether connections are made with TLS.
    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// A connected channel, with name resolution and handshake within `limit`. Members hear of a refused certificate here,
    /// not at the first call.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn connect(
        &self,
        address: &PeerAddress,
        limit: Duration,
    ) -> Result<Channel, DialError> {
        // The endpoint's own limit is for when the channel connects again by itself. It does not cover name resolution, so
        // that the first attempt has one around all of it.
        let mut endpoint = channel::endpoint(address)?.connect_timeout(limit.saturating_mul(2));
        if let Some(Keepalive { interval, timeout }) = self.keepalive {
            endpoint = endpoint.http2_keep_alive_interval(interval).keep_alive_timeout(timeout);
        }
        match tokio::time::timeout(limit, self.open(address, endpoint)).await {
            Err(_) => Err(DialError::Late(limit)),
            Ok(Err(error)) => Err(sorted(&*error)),
            Ok(Ok(channel)) => Ok(channel),
        }
    }

    async fn open(
        &self,
        address: &PeerAddress,
        endpoint: Endpoint,
    ) -> Result<Channel, Box<dyn Error + Send + Sync>> {
        if let Some(network) = &self.network {
            let (network, address) = (Arc::clone(network), address.clone());
            let connector = service_fn(move |_: Uri| {
                let connecting = network.connect(&address);
                async move { connecting.await.map(TokioIo::new) }
            });
            return Ok(endpoint.connect_with_connector(connector).await?);
        }
        let Some(tls) = &self.tls else { return Ok(endpoint.connect().await?) };
        let name = ServerName::try_from(address.host().to_owned())
            .map_err(|_| TlsFailure(format!("no certificate can be for {}", address.host())))?;
        // The connector sees `http`, because tonic would add TLS of its own to `https`; the peer sees what is true.
        let endpoint = endpoint.origin(format!("https://{address}").parse()?);
        let tls = tls.clone();
        let connector = service_fn(move |uri: Uri| dial(tls.clone(), name.clone(), uri));
        Ok(endpoint.connect_with_connector(connector).await?)
    }
}

async fn dial(
    tls: ClientTls,
    name: ServerName<'static>,
    uri: Uri,
) -> Result<Connection, Box<dyn Error + Send + Sync>> {
    // It resolves the name and tries the addresses side by side, as tonic's own connections do.
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE_INTERVAL));
    let socket = tcp.oneshot(uri).await?.into_inner();
    let failed = |error: io::Error| -> Box<dyn Error + Send + Sync> {
        if reason::is_tls(&error) || error.kind() == io::ErrorKind::UnexpectedEof {
            Box::new(TlsFailure(reason::of_io(&error)))
        } else {
            Box::new(error)
        }
    };
    let handshake = TlsConnector::from(tls.config()).connect(name, socket);
    let mut stream = BufReader::with_capacity(FIRST_BYTES, handshake.await.map_err(failed)?);
    if matches!(tls, ClientTls::Member(_)) {
        // In TLS 1.3 the client is done before the server has looked at its certificate. A member speaks first, so that
        // its first bytes, or its refusal, tell.
        if stream.fill_buf().await.map_err(failed)?.is_empty() {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
    }
    Ok(TokioIo::new(stream))
}

/// An error of the transport by its kind, with everything that led to it: the transport's own text alone says nothing.
fn sorted(error: &(dyn Error + 'static)) -> DialError {
    let (mut text, mut cause) = (error.to_string(), Some(error));
    while let Some(found) = cause {
        if let Some(TlsFailure(reason)) = found.downcast_ref() {
            return DialError::Tls(reason.clone());
        }
        let said = found.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = found.source();
    }
    DialError::Unreachable(text)
}
