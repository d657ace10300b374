//! A connection to a worker.

use std::time::Duration;

use shimmer_proto::{address::PeerAddress, channel};
use tonic::transport::Channel;

use super::RemoteConfig;

/// Connects within a time. The name is resolved again each time.
pub(super) async fn connect(
    _config: &RemoteConfig,
    address: &PeerAddress,
    limit: Duration,
) -> Result<Channel, String> {
    let endpoint = channel::endpoint(address).map_err(|error| error.to_string())?;
    let endpoint = endpoint.connect_timeout(limit);
    // Around the whole attempt: the endpoint's own limit does not cover name resolution.
    tokio::time::timeout(limit, endpoint.connect())
        .await
        .map_err(|_| format!("no answer within {} ms", limit.as_millis()))?
        .map_err(|error| causes(&error))
}

/// An error with everything that led to it; the transport's own text alone says nothing.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
