//! Who may talk to whom: mutual TLS between members, and TLS with keys for clients.
//!
//! Every member of a cluster (worker, coordinator, an operator's command) shows a certificate and checks that of the other
//! against the cluster's authority; what the authority has signed is a member. [`TlsIdentity`] holds both directions and
//! follows its files; [`Dialer`] opens connections, [`Acceptor`] takes them. Start reading there.
//!
//! Nothing is resumed: every connection shows its certificate anew, so that a changed authority counts from the next
//! connection on. A handshake costs a millisecond, and connections live for days.

mod accept;
mod connect;
mod date;
mod material;
mod reason;
mod refusal;
#[cfg(test)]
mod tests;
mod web;

use std::{path::PathBuf, sync::Arc};

use rustls::{ClientConfig, ServerConfig, pki_types::UnixTime};

pub use accept::{AcceptError, Acceptor, Companion, PeerStream};
pub use connect::{BothWays, Connecting, DialError, Dialer, Keepalive, Network};
pub use refusal::{Refusal, refuse};
pub use web::{refusal_of, web_client};

use crate::followed::{FileError, Followed};

/// The files of a member, PEM. Names and rotation: docs/CLUSTER.md.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities that sign members.
    pub ca: PathBuf,
    /// This member's certificate, and those between it and the authority.
    pub cert: PathBuf,
    /// The key of the certificate, not encrypted.
    pub key: PathBuf,
}

/// What a member shows and whom it trusts, in both directions. Clones share it.
#[derive(Debug, Clone)]
pub struct TlsIdentity(Arc<Followed<Member>>);

/// Both directions, from one reading of the files.
#[derive(Debug)]
struct Member {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    until: Option<UnixTime>,
}

/// What a port shows to clients without certificates.
#[derive(Debug)]
pub struct PublicServer {
    config: Arc<ServerConfig>,
    until: Option<UnixTime>,
}

impl TlsIdentity {
    /// Reads the files.
    ///
    /// # Errors
    /// Names the file and what is wrong with it: nothing in it, a key of another certificate, an expired certificate, one
    /// that the authority has not signed.
    pub fn load(files: &TlsFiles) -> Result<Self, FileError> {
        let paths = vec![files.ca.clone(), files.cert.clone(), files.key.clone()];
        let files = files.clone();
        let make = move |contents: &[Vec<u8>]| material::member(&files, contents);
        Ok(Self(Arc::new(Followed::load("TLS identity", paths, make)?)))
    }

    /// For a port that members connect to.
    pub fn server(&self) -> ServerTls {
        ServerTls::Member(self.clone())
    }

    /// For connections to members.
    pub fn client(&self) -> ClientTls {
        ClientTls::Member(self.clone())
    }
}

/// How a port proves who it is, and whom it asks for a certificate. Clones share it.
#[derive(Debug, Clone)]
pub enum ServerTls {
    /// Clients must be members.
    Member(TlsIdentity),
    /// Any client; the certificate is for their sake only.
    Public(Arc<Followed<PublicServer>>),
}

impl ServerTls {
    /// A port for clients without certificates.
    ///
    /// # Errors
    /// See [`TlsIdentity::load`]; without an authority to check against.
    pub fn public(cert: PathBuf, key: PathBuf) -> Result<Self, FileError> {
        let paths = vec![cert.clone(), key.clone()];
        let make = move |contents: &[Vec<u8>]| material::public_server(&cert, &key, contents);
        Ok(Self::Public(Arc::new(Followed::load("TLS certificate", paths, make)?)))
    }

    fn config(&self) -> Arc<ServerConfig> {
        match self {
            Self::Member(identity) => Arc::clone(&identity.0.current().server),
            Self::Public(server) => Arc::clone(&server.current().config),
        }
    }

    /// End of the time of the certificate that is shown now, in seconds since 1970.
    pub fn not_after(&self) -> Option<u64> {
        let until = match self {
            Self::Member(identity) => identity.0.current().until,
            Self::Public(server) => server.current().until,
        };
        until.map(|until| until.as_secs())
    }
}

/// Whom a client believes, and what it shows. Clones share it.
#[derive(Debug, Clone)]
pub enum ClientTls {
    /// Shows a member's certificate.
    Member(TlsIdentity),
    /// Shows none.
    Public(Arc<Followed<Arc<ClientConfig>>>),
}

impl ClientTls {
    /// A client that believes the authorities of one file.
    ///
    /// # Errors
    /// The file cannot be read or has no certificate.
    pub fn public(ca: PathBuf) -> Result<Self, FileError> {
        let paths = vec![ca.clone()];
        let make = move |contents: &[Vec<u8>]| material::public_client(&ca, contents);
        Ok(Self::Public(Arc::new(Followed::load("TLS authorities", paths, make)?)))
    }

    fn config(&self) -> Arc<ClientConfig> {
        match self {
            Self::Member(identity) => Arc::clone(&identity.0.current().client),
            Self::Public(config) => Arc::clone(&config.current()),
        }
    }
}
