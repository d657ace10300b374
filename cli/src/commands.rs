//! One module per command: its flags, and what it shows. The work itself is done by the crates below.

pub mod admin;
pub mod bench;
pub mod convert;
pub mod demo;
pub mod doctor;
pub mod fetch;
pub mod generate;
pub mod healthcheck;
pub mod inspect;
pub mod make_demo;
pub mod mirror;
pub mod plan;
mod security;
pub mod serve;
pub mod tokenize;
pub mod verify;
pub mod worker;

use std::{net::SocketAddr, path::Path, sync::Arc};

use shimmer_model::Container;

use crate::error::Error;

/// Version of this build, as peers and clients see it.
pub const BUILD: &str = concat!("shimmer/", env!("CARGO_PKG_VERSION"));

/// Opens a container.
pub(crate) fn open_container(directory: &Path) -> Result<Arc<Container>, Error> {
    Container::open(directory).map(Arc::new).map_err(|error| {
        Error::failed(format!("cannot use the container {}", directory.display()), error).with_hint(
            "`shimmer convert CHECKPOINT --out DIR` makes one, `shimmer verify DIR` checks one",
        )
    })
}

/// The address of a flag is taken, or not of this host.
pub(crate) fn cannot_listen(
    address: SocketAddr,
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    flag: &str,
) -> Error {
    Error::failed(format!("cannot listen on {address}"), error)
        .with_hint(format!("give another address with {flag}; port 0 takes a free one"))
}

/// Bytes for people: `1.9 MiB`.
fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}
