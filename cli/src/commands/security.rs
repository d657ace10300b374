//! Certificates and keys of the roles, read before anything else is begun.

use std::net::SocketAddr;

use shimmer_coordinator::api::{ApiKeys, DoorOptions};
use shimmer_proto::{
    followed::FileError,
    tls::{ServerTls, TlsFiles, TlsIdentity},
};

use crate::{config::ServeConfig, error::Error};

/// The identity of a member, if it has one.
///
/// # Errors
/// Names the file that cannot be used.
pub(super) fn identity(files: Option<&TlsFiles>) -> Result<Option<TlsIdentity>, Error> {
    files.map(TlsIdentity::load).transpose().map_err(|error| {
        refused("tls-ca, tls-cert, tls-key", &error)
            .with_hint("docs/CLUSTER.md shows how to make an authority and certificates")
    })
}

/// The door of the public port.
///
/// # Errors
/// Names the file that cannot be used.
pub(super) fn door(config: &ServeConfig, address: SocketAddr) -> Result<DoorOptions, Error> {
    let keys = config.api_keys.clone().map(ApiKeys::load).transpose();
    let keys = keys.map_err(|error| refused("api-keys", &error))?;
    let tls = config.api_tls.clone().map(|(cert, key)| ServerTls::public(cert, key)).transpose();
    let tls = tls.map_err(|error| refused("api-tls-cert, api-tls-key", &error))?;
    if keys.is_some() && tls.is_none() && !address.ip().is_loopback() {
        tracing::warn!(%address, "API keys travel in plaintext: whoever sees the traffic can use them; give --api-tls-cert and --api-tls-key, or put a proxy with TLS in front");
    }
    // What the engine can take at all: more calls would only wait at the client instead of being refused with a reason.
    let calls = config.queue.saturating_add(config.max_sequences).saturating_add(SPARE_STREAMS);
    Ok(DoorOptions {
        tls,
        keys,
        max_connections: config.max_connections,
        max_streams: u32::try_from(calls).unwrap_or(u32::MAX),
        ..DoorOptions::default()
    })
}

/// Calls beside generations: tokenizing, health, cancellation, and those that are to hear that the queue is full.
const SPARE_STREAMS: usize = 64;

fn refused(keys: &str, error: &FileError) -> Error {
    Error::refused(format!("{keys}: {error}"))
}
