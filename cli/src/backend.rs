//! Where requests go: a coordinator over gRPC, or the same service inside this process.

use std::{fmt, pin::Pin, time::Duration};

use shimmer_proto::{
    limits::MAX_API_MESSAGE_BYTES,
    tls::{ClientTls, DialError, Dialer, Keepalive},
    v1::{
        DetokenizeRequest, GenerateRequest, GenerateResponse, GetModelRequest, GetModelResponse,
        TokenizeRequest, TokenizeResponse, inference_service_client::InferenceServiceClient,
    },
};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{
    Request, Status,
    metadata::{AsciiMetadataValue, MetadataMap},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};

use crate::{
    config::{Access, ApiAddress, Endpoints, Period, Target},
    error::Error,
    failover::Joined,
    local::{LocalCluster, one_at_a_time},
    output,
    profile::Moment,
    routing::Ear,
    traces::ClientTrace,
};

/// A coordinator that stands still is left after ten seconds: another one can go on. Members of a cluster probe each other by
/// means of their own, and are slower here.
const KEEPALIVE: Keepalive =
    Keepalive { interval: Duration::from_secs(5), timeout: Duration::from_secs(5) };

/// Events of one generation.
pub(crate) enum Events {
    Local(Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>),
    Remote(Box<Joined>),
}

impl Events {
    /// The next event; none after the last one.
    ///
    /// # Errors
    /// The status that ended the stream, and that nothing could be done about.
    pub(crate) async fn next(&mut self) -> Result<Option<GenerateResponse>, Error> {
        match self {
            Self::Local(stream) => Ok(stream.next().await.transpose()?),
            Self::Remote(joined) => joined.next().await,
        }
    }
}

/// A client that shows its key.
pub(crate) type Client = InferenceServiceClient<InterceptedService<Channel, ShownKey>>;

/// Takes requests of the public API.
#[derive(Debug)]
pub(crate) enum Backend {
    Remote(Box<Remote>),
    Local(LocalCluster),
}

impl Backend {
    /// Connects, or starts the in-process cluster.
    ///
    /// # Errors
    /// Nothing answers at the endpoint, or the container cannot be served.
    pub(crate) async fn open(target: Target) -> Result<Self, Error> {
        Self::open_with(target, None).await
    }

    /// As [`Self::open`], with an ear before the workers of an in-process cluster.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) async fn open_with(target: Target, ear: Option<Ear>) -> Result<Self, Error> {
        match target {
            Target::Endpoint(endpoints) => {
                Ok(Self::Remote(Box::new(Remote::open(endpoints).await?)))
            }
            Target::InProcess(options) => {
                // Reading the trunk and filling the arenas takes seconds.
                let started = tokio::task::spawn_blocking(move || {
                    let limits = one_at_a_time(&options);
                    LocalCluster::start_with(&options, limits, |transport| match &ear {
                        Some(ear) => ear.before(transport),
                        None => transport,
                    })
                })
                .await;
                let cluster = started.map_err(|error| {
                    Error::failed("the in-process cluster did not start", error)
                })??;
                Ok(Self::Local(cluster))
            }
        }
    }

    /// Starts a generation.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub(crate) async fn generate(
        &self,
        request: GenerateRequest,
        trace: Option<&ClientTrace>,
    ) -> Result<Events, Error> {
        let mut metadata = MetadataMap::new();
        if let Some(trace) = trace {
            trace.write(&mut metadata);
        }
        match self {
            Self::Remote(remote) => {
                let joined = Joined::start(Remote::clone(remote), request, metadata).await?;
                Ok(Events::Remote(Box::new(joined)))
            }
            Self::Local(cluster) => {
                let tracer = trace.map(ClientTrace::tracer).unwrap_or_default();
                cluster.trace(&tracer);
                let inference = cluster.inference().clone().with_tracer(tracer);
                Ok(Events::Local(Box::pin(inference.start_with(request, &metadata).await?)))
            }
        }
    }

    /// Everything that is counted in this process, now; nothing where the work is done by others.
    pub(crate) fn moment(&self) -> Option<Moment> {
        match self {
            Self::Remote(_) => None,
            Self::Local(cluster) => Some(cluster.moment()),
        }
    }

    /// The model and its workers.
    ///
    /// # Errors
    /// The coordinator's status.
    pub(crate) async fn model(&self) -> Result<GetModelResponse, Error> {
        match self {
            Self::Remote(remote) => {
                Ok(remote.connected().get_model(GetModelRequest {}).await?.into_inner())
            }
            Self::Local(cluster) => Ok(cluster.inference().describe()),
        }
    }

    /// Token ids of a text or a chat.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub(crate) async fn tokenize(
        &self,
        request: TokenizeRequest,
    ) -> Result<TokenizeResponse, Error> {
        match self {
            Self::Remote(remote) => Ok(remote.connected().tokenize(request).await?.into_inner()),
            Self::Local(cluster) => Ok(cluster.inference().token_ids(request).await?),
        }
    }

    /// Text of token ids.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub(crate) async fn detokenize(&self, request: DetokenizeRequest) -> Result<String, Error> {
        let response = match self {
            Self::Remote(remote) => remote.connected().detokenize(request).await?.into_inner(),
            Self::Local(cluster) => cluster.inference().text(request).await?,
        };
        Ok(response.text)
    }
}

/// Coordinators that serve the same model, and those of them that are connected.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    endpoints: Endpoints,
    clients: Vec<Option<Client>>,
    /// The first one that could be reached, and its client.
    first: (usize, Client),
}

impl Remote {
    /// Connects to the first one that can be reached.
    ///
    /// # Errors
    /// None can: what is wrong with the last one.
    pub(crate) async fn open(endpoints: Endpoints) -> Result<Self, Error> {
        let Endpoints { addresses, access, connect_timeout, .. } = &endpoints;
        let mut failed = None;
        for (index, address) in addresses.iter().enumerate() {
            match connect(address, access, *connect_timeout).await {
                Ok(client) => {
                    let mut clients = vec![None; addresses.len()];
                    clients[index] = Some(client.clone());
                    return Ok(Self { first: (index, client), clients, endpoints });
                }
                Err(error) => {
                    if addresses.len() > 1
                        && let Some(text) = error.render()
                    {
                        output::note(&text);
                    }
                    failed = Some(error);
                }
            }
        }
        Err(failed.unwrap_or_else(|| Error::refused("no endpoint is given")))
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.endpoints.addresses.len()
    }

    /// The one that was reached first.
    pub(crate) fn first(&self) -> usize {
        self.first.0
    }

    pub(crate) fn address(&self, endpoint: usize) -> &ApiAddress {
        &self.endpoints.addresses[endpoint]
    }

    /// How long the rest of an answer is looked for.
    pub(crate) fn patience(&self) -> Duration {
        self.endpoints.resume_timeout.0
    }

    fn connected(&self) -> Client {
        self.first.1.clone()
    }

    /// A client of one of them, which is connected to if need be.
    ///
    /// # Errors
    /// It cannot be reached.
    pub(crate) async fn client(&mut self, endpoint: usize) -> Result<Client, Error> {
        if let Some(client) = &self.clients[endpoint] {
            return Ok(client.clone());
        }
        let Endpoints { addresses, access, connect_timeout, .. } = &self.endpoints;
        let client = connect(&addresses[endpoint], access, *connect_timeout).await?;
        self.clients[endpoint] = Some(client.clone());
        Ok(client)
    }

    /// Connects anew the next time: the name may lead elsewhere by then.
    pub(crate) fn forget(&mut self, endpoint: usize) {
        self.clients[endpoint] = None;
    }
}

/// A client of the coordinator at `address`.
///
/// # Errors
/// Nothing accepts connections there, or one side does not trust the other.
async fn connect(address: &ApiAddress, access: &Access, timeout: Period) -> Result<Client, Error> {
    let dialer = match (&access.ca, address.tls) {
        (_, false) => Dialer::plaintext(),
        (Some(ca), true) => {
            let tls = ClientTls::public(ca.clone());
            Dialer::tls(tls.map_err(|error| Error::refused(format!("ca: {error}")))?)
        }
        (None, true) => {
            let error = Error::refused(format!("{address} needs --ca: no authority is built in"));
            return Err(error.with_hint(
                "give the file that signed the server's certificate; for public authorities often the system's bundle, such as /etc/ssl/certs/ca-certificates.crt",
            ));
        }
    };
    let key = ShownKey::new(access.key()?)?;
    let dialer = dialer.with_keepalive(KEEPALIVE);
    let channel = dialer.connect(&address.address, timeout.0).await.map_err(|error| {
        let hint = match &error {
            DialError::Tls(_) => "write https:// where the server has --api-tls-cert, and give with --ca the authority that signed it",
            _ => "is `shimmer serve` running there? give its address with --endpoint host:port",
        };
        Error::failed(format!("cannot connect to the coordinator at {address}"), error)
            .with_hint(hint)
    })?;
    Ok(InferenceServiceClient::with_interceptor(channel, key)
        .max_decoding_message_size(MAX_API_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_API_MESSAGE_BYTES))
}

/// Shows the API key with every call.
#[derive(Clone)]
pub(crate) struct ShownKey(Option<AsciiMetadataValue>);

impl ShownKey {
    fn new(key: Option<String>) -> Result<Self, Error> {
        let Some(key) = key else { return Ok(Self(None)) };
        let value = format!("Bearer {key}").parse::<AsciiMetadataValue>();
        let mut value = value
            .map_err(|_| Error::refused("the API key has characters that no header carries"))?;
        value.set_sensitive(true);
        Ok(Self(Some(value)))
    }
}

impl fmt::Debug for ShownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ShownKey").field(&self.0.is_some()).finish()
    }
}

impl Interceptor for ShownKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}
