//! Ordinary servers of the web: the authorities of the system, or those of a file.

use std::{error::Error, io, path::Path};

use rustls::{ClientConfig, InvalidMessage, RootCertStore};

use super::{
    material::{PUBLIC, authorities, provider},
    reason,
};
use crate::followed::FileError;

/// A client that believes the authorities of `ca`, or else those of the system, and shows no certificate.
///
/// # Errors
/// The file cannot be read or has no certificate; or, where they are `needed`, the system has none.
pub fn web_client(ca: Option<&Path>, needed: bool) -> Result<ClientConfig, FileError> {
    let roots = match ca {
        Some(file) => {
            let bytes = std::fs::read(file)
                .map_err(|error| FileError::new(file, format!("cannot be read: {error}")))?;
            authorities(file, &bytes)?
        }
        None => of_system(needed)?,
    };
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(PUBLIC)
        .map(|builder| builder.with_root_certificates(roots).with_no_client_auth())
        .map_err(|error| FileError::new(ca.unwrap_or(Path::new("TLS")), error.to_string()))
}

fn of_system(needed: bool) -> Result<RootCertStore, FileError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // One that is of no use is no reason to distrust the others.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() && needed {
        let why = found.errors.first().map(|error| format!(" ({error})")).unwrap_or_default();
        let reason =
            format!("the system has no certificates of authorities{why}: give a file with --ca");
        return Err(FileError::new(Path::new("TLS"), reason));
    }
    Ok(roots)
}

/// What is wrong with the peer's TLS, if that is why a connection failed.
pub fn refusal_of(error: &(dyn Error + 'static)) -> Option<String> {
    let mut cause = Some(error);
    while let Some(found) = cause {
        if let Some(error) = found.downcast_ref::<io::Error>()
            && let Some(found) = reason::rustls_error(error)
        {
            return Some(match found {
                // The general sentence is for members.
                rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
                    "the server does not speak TLS on this port".to_owned()
                }
                found => reason::of(found),
            });
        }
        cause = found.source();
    }
    None
}
