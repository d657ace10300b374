//! A client of the public API that collects a whole generation.

use std::net::{Ipv4Addr, SocketAddr};

use shimmer_proto::v1::{
    FinishReason, GenerateRequest, OutputParams, SamplingParams, Started, StopParams, TokenIds,
    Usage, generate_request::Input, generate_response::Event,
    inference_service_client::InferenceServiceClient,
};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

/// A client over one HTTP/2 connection; clones share it.
pub type Client = InferenceServiceClient<Channel>;

/// One finished generation.
#[derive(Debug, Clone)]
pub struct Generation {
    pub started: Started,
    pub tokens: Vec<u32>,
    pub text: String,
    pub reason: FinishReason,
    pub usage: Usage,
    /// Empty when the request did not ask for it.
    pub logits_sha256: String,
}

/// Connects to a coordinator on loopback.
///
/// # Errors
/// Nothing accepts connections there.
pub async fn connect(port: u16) -> Result<Client, Status> {
    connect_to((Ipv4Addr::LOCALHOST, port).into()).await
}

/// Connects to a coordinator.
///
/// # Errors
/// Nothing accepts connections there.
pub async fn connect_to(address: SocketAddr) -> Result<Client, Status> {
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).expect("an address makes a URI");
    match endpoint.connect().await {
        Ok(channel) => Ok(InferenceServiceClient::new(channel)),
        Err(error) => Err(Status::unavailable(format!("cannot connect to {address}: {error}"))),
    }
}

/// Runs one generation to its end and checks the form of its stream.
///
/// # Errors
/// The status that ended the stream.
///
/// # Panics
/// The stream is not one Started, any Deltas and one Finished with sequence numbers from 0 without gaps.
pub async fn generate(client: &mut Client, request: GenerateRequest) -> Result<Generation, Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let (mut started, mut tokens, mut text, mut expected) = (None, Vec::new(), String::new(), 0);
    while let Some(response) = stream.message().await? {
        assert_eq!(response.sequence, expected, "sequence numbers have no gaps");
        expected += 1;
        match response.event.expect("every response holds an event") {
            Event::Started(event) => {
                assert!(started.replace(event).is_none(), "a stream starts once")
            }
            Event::Delta(delta) => {
                assert!(started.is_some(), "a delta comes after Started");
                tokens.extend(delta.token_ids);
                text.push_str(&delta.text);
            }
            Event::Finished(finished) => {
                let after = stream.message().await?;
                assert!(after.is_none(), "nothing comes after Finished");
                return Ok(Generation {
                    started: started.expect("Finished comes after Started"),
                    tokens,
                    text,
                    reason: finished.reason(),
                    usage: finished.usage.unwrap_or_default(),
                    logits_sha256: finished.logits_sha256.unwrap_or_default(),
                });
            }
        }
    }
    Err(Status::internal("the stream ended without Finished"))
}

/// A greedy generation of exactly `max_tokens` tokens, with the digest of its logits.
pub fn greedy(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    sampled(
        prompt,
        max_tokens,
        SamplingParams { temperature: Some(0.0), ..SamplingParams::default() },
    )
}

/// A generation of exactly `max_tokens` tokens with these sampling parameters, with the digest of its logits.
pub fn sampled(prompt: &[u32], max_tokens: u32, sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest {
        input: Some(Input::TokenIds(TokenIds { ids: prompt.to_vec() })),
        sampling: Some(sampling),
        stop: Some(StopParams {
            max_tokens: Some(max_tokens),
            ignore_eos: Some(true),
            ..StopParams::default()
        }),
        output: Some(OutputParams { logits_digest: Some(true), ..OutputParams::default() }),
        ..GenerateRequest::default()
    }
}
