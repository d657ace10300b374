//! From the bytes of PEM files to configurations of rustls, with errors that name the file.

use std::{path::Path, sync::Arc, time::Duration};

use rustls::{
    ClientConfig, Error, RootCertStore, ServerConfig, SupportedProtocolVersion,
    client::{Resumption, verify_server_cert_signed_by_trust_anchor},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem, pem::PemObject as _},
    server::{
        NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier, danger::ClientCertVerifier,
    },
    version::{TLS12, TLS13},
};

use super::{Member, PublicServer, TlsFiles, date, reason};
use crate::followed::FileError;

/// Between members only the newest version is spoken: both ends are ours.
const MEMBERS: &[&SupportedProtocolVersion] = &[&TLS13];
/// Clients may be older.
pub(super) const PUBLIC: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];

/// gRPC is HTTP/2 and nothing else.
const ALPN: &[u8] = b"h2";

/// Later than any certificate: to be told when it ends.
const FAR_AWAY: Duration = Duration::from_secs(1 << 38);

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A member's two directions from its authority, certificate and key.
pub(super) fn member(files: &TlsFiles, contents: &[Vec<u8>]) -> Result<Member, FileError> {
    let [ca, cert, key] = contents else { unreachable!("a member has three files") };
    let roots = Arc::new(authorities(&files.ca, ca)?);
    let chain = chain(&files.cert, cert)?;
    let secret = private_key(&files.key, key)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider())
        .build()
        .map_err(|error| FileError::new(&files.ca, format!("cannot be used: {error}")))?;
    let until = check_member(files, &chain, &roots, &*verifier)?;
    let pair = |error| pair_error(&files.cert, &files.key, &error);
    let server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(MEMBERS)
        .map_err(pair)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain.clone(), secret.clone_key())
        .map_err(pair)?;
    let mut client = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(MEMBERS)
        .map_err(pair)?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, secret)
        .map_err(pair)?;
    client.alpn_protocols = vec![ALPN.to_vec()];
    client.resumption = Resumption::disabled();
    tracing::info!(cert = %files.cert.display(), until = shown(until), "TLS identity");
    Ok(Member { server: Arc::new(sealed(server)), client: Arc::new(client), until })
}

/// A port for clients without certificates.
pub(super) fn public_server(
    cert: &Path,
    key: &Path,
    contents: &[Vec<u8>],
) -> Result<PublicServer, FileError> {
    let [cert_bytes, key_bytes] = contents else { unreachable!("a server has two files") };
    let chain = chain(cert, cert_bytes)?;
    let secret = private_key(key, key_bytes)?;
    let until = check_dates(cert, &chain)?;
    let pair = |error| pair_error(cert, key, &error);
    let server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(PUBLIC)
        .map_err(pair)?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(pair)?;
    tracing::info!(cert = %cert.display(), until = shown(until), "TLS certificate of the public port");
    Ok(PublicServer { config: Arc::new(sealed(server)), until })
}

/// A client without a certificate.
pub(super) fn public_client(
    ca: &Path,
    contents: &[Vec<u8>],
) -> Result<Arc<ClientConfig>, FileError> {
    let [bytes] = contents else { unreachable!("a client has one file") };
    let mut client = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(PUBLIC)
        .map_err(|error| FileError::new(ca, error.to_string()))?
        .with_root_certificates(authorities(ca, bytes)?)
        .with_no_client_auth();
    client.alpn_protocols = vec![ALPN.to_vec()];
    client.resumption = Resumption::disabled();
    Ok(Arc::new(client))
}

/// HTTP/2 only, and nothing is resumed.
fn sealed(mut server: ServerConfig) -> ServerConfig {
    server.alpn_protocols = vec![ALPN.to_vec()];
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    server
}

pub(super) fn authorities(file: &Path, bytes: &[u8]) -> Result<RootCertStore, FileError> {
    let mut roots = RootCertStore::empty();
    for (index, certificate) in chain(file, bytes)?.into_iter().enumerate() {
        roots.add(certificate).map_err(|error| {
            let number = index + 1;
            FileError::new(
                file,
                format!(
                    "certificate {number} of the file is no authority's: {}",
                    reason::of(&error)
                ),
            )
        })?;
    }
    Ok(roots)
}

fn chain(file: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(bytes)
        .collect::<Result<_, pem::Error>>()
        .map_err(|error| FileError::new(file, format!("is not well-formed PEM: {error}")))?;
    if certificates.is_empty() {
        let holds = if contains(bytes, b"PRIVATE KEY-----") { "; it holds a key" } else { "" };
        let reason = format!(
            "no certificate in it{holds}; a PEM file with -----BEGIN CERTIFICATE----- is wanted"
        );
        return Err(FileError::new(file, reason));
    }
    Ok(certificates)
}

fn private_key(file: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, FileError> {
    if contains(bytes, b"ENCRYPTED PRIVATE KEY-----") || contains(bytes, b"Proc-Type: 4,ENCRYPTED")
    {
        let reason = "the key is encrypted, and nobody is here to give the passphrase; store it \
            decrypted and readable for this user only";
        return Err(FileError::new(file, reason));
    }
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| match error {
        pem::Error::NoItemsFound => FileError::new(
            file,
            "no private key in it; a PEM file with -----BEGIN PRIVATE KEY----- is wanted",
        ),
        other => FileError::new(file, format!("is not well-formed PEM: {other}")),
    })
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// What is wrong with certificate and key together.
fn pair_error(cert: &Path, key: &Path, error: &Error) -> FileError {
    match error {
        Error::InconsistentKeys(_) => {
            let text = format!("the key does not fit the certificate in {}", cert.display());
            FileError::new(key, text)
        }
        Error::InvalidCertificate(_) => FileError::new(cert, reason::of(error)),
        other => FileError::new(key, format!("the key cannot be used: {}", reason::of(other))),
    }
}

/// Refuses a certificate with which no other member would let this one in. Gives the end of its time.
fn check_member(
    files: &TlsFiles,
    chain: &[CertificateDer<'static>],
    roots: &RootCertStore,
    verifier: &dyn ClientCertVerifier,
) -> Result<Option<UnixTime>, FileError> {
    let until = check_dates(&files.cert, chain)?;
    let (leaf, between) = (&chain[0], &chain[1..]);
    let parsed = ParsedCertificate::try_from(leaf)
        .map_err(|error| FileError::new(&files.cert, reason::of(&error)))?;
    let algorithms = provider().signature_verification_algorithms;
    let now = UnixTime::now();
    let as_server =
        verify_server_cert_signed_by_trust_anchor(&parsed, roots, between, now, algorithms.all);
    let as_client = verifier.verify_client_cert(leaf, between, now).map(|_| ());
    for verdict in [as_server, as_client] {
        verdict.map_err(|error| {
            let text = format!("{} (authority: {})", reason::of(&error), files.ca.display());
            FileError::new(&files.cert, text)
        })?;
    }
    Ok(until)
}

/// Refuses a certificate outside its time. Gives the end of it.
fn check_dates(
    file: &Path,
    chain: &[CertificateDer<'static>],
) -> Result<Option<UnixTime>, FileError> {
    let parsed = ParsedCertificate::try_from(&chain[0])
        .map_err(|error| FileError::new(file, reason::of(&error)))?;
    if let Some(error) = out_of_time(&parsed, UnixTime::now()) {
        return Err(FileError::new(file, reason::of(&error)));
    }
    let end = out_of_time(&parsed, UnixTime::since_unix_epoch(FAR_AWAY));
    Ok(end.and_then(|error| reason::not_after(&error)))
}

fn shown(until: Option<UnixTime>) -> String {
    until.map_or_else(String::new, date::shown)
}

/// The error about the certificate's dates at a moment. They are checked before anything about its issuer, so that no
/// authority is needed.
fn out_of_time(certificate: &ParsedCertificate<'_>, at: UnixTime) -> Option<Error> {
    let algorithms = provider().signature_verification_algorithms;
    let nobody = RootCertStore::empty();
    let verdict =
        verify_server_cert_signed_by_trust_anchor(certificate, &nobody, &[], at, algorithms.all);
    verdict.err().filter(reason::is_about_dates)
}
