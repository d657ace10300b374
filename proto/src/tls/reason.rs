//! What rustls found, in words for the person who must change something.

use std::io;

use rustls::{
    AlertDescription, CertificateError, Error, InvalidMessage, PeerIncompatible,
    pki_types::UnixTime,
};

use super::date;

/// One sentence.
pub(super) fn of(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(problem) => certificate(problem),
        Error::AlertReceived(alert) => received(*alert),
        Error::NoCertificatesPresented => {
            "the peer showed no certificate; it needs --tls-ca, --tls-cert and --tls-key".to_owned()
        }
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the peer does not speak TLS; give both ends --tls-ca, --tls-cert and --tls-key, or \
             neither"
                .to_owned()
        }
        Error::PeerIncompatible(
            PeerIncompatible::Tls12NotOffered | PeerIncompatible::ServerDoesNotSupportTls12Or13,
        ) => "the peer speaks no TLS 1.3".to_owned(),
        Error::NoApplicationProtocol => "the peer speaks no HTTP/2 (ALPN h2)".to_owned(),
        other => other.to_string(),
    }
}

/// The sentence of an I/O error, which may be one of rustls in disguise.
pub(super) fn of_io(error: &io::Error) -> String {
    match rustls_error(error) {
        Some(found) => of(found),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the peer closed the connection during the handshake".to_owned()
        }
        None => error.to_string(),
    }
}

/// Whether the error is about TLS, not about the way to the peer.
pub(super) fn is_tls(error: &io::Error) -> bool {
    rustls_error(error).is_some()
}

pub(super) fn rustls_error(error: &io::Error) -> Option<&Error> {
    let inner = error.get_ref()?;
    inner
        .downcast_ref::<Error>()
        // Connectors of HTTP clients wrap one I/O error into another.
        .or_else(|| inner.downcast_ref::<io::Error>().and_then(rustls_error))
        .or_else(|| inner.source().and_then(|source| source.downcast_ref::<Error>()))
}

/// Whether a certificate is outside its time.
pub(super) fn is_about_dates(error: &Error) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(
        error,
        Error::InvalidCertificate(
            Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. }
        )
    )
}

/// When a certificate ended, by the error that says so.
pub(super) fn not_after(error: &Error) -> Option<UnixTime> {
    match error {
        Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. }) => {
            Some(*not_after)
        }
        _ => None,
    }
}

fn certificate(problem: &CertificateError) -> String {
    match problem {
        CertificateError::ExpiredContext { time, not_after } => format!(
            "the certificate expired at {}; it is {} now",
            date::shown(*not_after),
            date::shown(*time)
        ),
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "the certificate is valid from {} on; it is {} now",
            date::shown(*not_before),
            date::shown(*time)
        ),
        CertificateError::UnknownIssuer => {
            "the certificate is not signed by the authority that is trusted here".to_owned()
        }
        CertificateError::BadSignature => {
            "the certificate's signature is not of the authority that it names".to_owned()
        }
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "the certificate is not for {}: it names {}; add the name or address to its subject \
             alternative names, or connect by a name that it has",
            expected.to_str(),
            if presented.is_empty() { "nothing".to_owned() } else { presented.join(", ") }
        ),
        CertificateError::InvalidPurposeContext { .. } | CertificateError::InvalidPurpose => {
            "the certificate is not for this use; a member's needs the extended key usages \
             serverAuth and clientAuth, or none"
                .to_owned()
        }
        CertificateError::BadEncoding => "the certificate is damaged".to_owned(),
        other => format!("the certificate is refused: {other}"),
    }
}

/// What the peer said before it hung up.
fn received(alert: AlertDescription) -> String {
    use AlertDescription as Alert;
    let said = match alert {
        Alert::CertificateRequired => "it wants a certificate and got none",
        Alert::CertificateExpired => "the certificate that it got has expired",
        Alert::UnknownCA | Alert::DecryptError => {
            "the certificate that it got is not signed by the authority that it trusts"
        }
        Alert::BadCertificate | Alert::UnsupportedCertificate | Alert::CertificateUnknown => {
            "it does not accept the certificate that it got"
        }
        Alert::NoApplicationProtocol => "it speaks no HTTP/2",
        Alert::ProtocolVersion => "it speaks no common version of TLS",
        _ => return format!("the peer refused the connection: {alert:?}"),
    };
    format!("the peer refused the connection: {said} (its log says more)")
}
