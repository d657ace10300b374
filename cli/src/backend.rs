//! Where requests go: a coordinator over gRPC, or the same service inside this process.

use std::pin::Pin;

use shimmer_proto::{
    channel,
    limits::MAX_API_MESSAGE_BYTES,
    v1::{
        DetokenizeRequest, GenerateRequest, GenerateResponse, GetModelRequest, GetModelResponse,
        TokenizeRequest, TokenizeResponse, inference_service_client::InferenceServiceClient,
    },
};
use tokio_stream::Stream;
use tonic::{Status, transport::Channel};

use crate::{
    config::{HostPort, Period, Target},
    error::Error,
    local::LocalCluster,
    profile::Moment,
};

/// Events of one generation.
pub(crate) type Events = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

/// Takes requests of the public API.
#[derive(Debug)]
pub(crate) enum Backend {
    Remote(InferenceServiceClient<Channel>),
    Local(LocalCluster),
}

impl Backend {
    /// Connects, or starts the in-process cluster.
    ///
    /// # Errors
    /// Nothing answers at the endpoint, or the container cannot be served.
    pub(crate) async fn open(target: Target) -> Result<Self, Error> {
        match target {
            Target::Endpoint { address, connect_timeout } => {
                Ok(Self::Remote(connect(&address, connect_timeout).await?))
            }
            Target::InProcess(options) => {
                // Reading the trunk and filling the arenas takes seconds.
                let started =
                    tokio::task::spawn_blocking(move || LocalCluster::start(&options)).await;
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
    pub(crate) async fn generate(&self, request: GenerateRequest) -> Result<Events, Error> {
        match self {
            Self::Remote(client) => {
                Ok(Box::pin(client.clone().generate(request).await?.into_inner()))
            }
            Self::Local(cluster) => Ok(Box::pin(cluster.inference().start(request).await?)),
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
            Self::Remote(client) => {
                Ok(client.clone().get_model(GetModelRequest {}).await?.into_inner())
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
            Self::Remote(client) => Ok(client.clone().tokenize(request).await?.into_inner()),
            Self::Local(cluster) => Ok(cluster.inference().token_ids(request).await?),
        }
    }

    /// Text of token ids.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub(crate) async fn detokenize(&self, request: DetokenizeRequest) -> Result<String, Error> {
        let response = match self {
            Self::Remote(client) => client.clone().detokenize(request).await?.into_inner(),
            Self::Local(cluster) => cluster.inference().text(request).await?,
        };
        Ok(response.text)
    }
}

/// A client of the coordinator at `address`.
///
/// # Errors
/// Nothing accepts connections there.
pub(crate) async fn connect(
    address: &HostPort,
    timeout: Period,
) -> Result<InferenceServiceClient<Channel>, Error> {
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| {
        Error::failed(format!("cannot connect to the coordinator at {address}"), source).with_hint(
            "is `shimmer serve` running there? give its address with --endpoint host:port",
        )
    };
    let endpoint = channel::endpoint(&address.0)
        .map_err(|error| failed(error.into()))?
        .connect_timeout(timeout.0);
    let channel = endpoint.connect().await.map_err(|error| failed(error.into()))?;
    Ok(InferenceServiceClient::new(channel)
        .max_decoding_message_size(MAX_API_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_API_MESSAGE_BYTES))
}
