//! Where a container comes from: an address, and what is shown to be let in.

use std::{fmt::Write as _, time::SystemTime};

use aws_credential_types::Credentials;
use aws_sigv4::{
    http_request::{
        PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings,
        UriPathNormalizationMode, sign,
    },
    sign::v4,
};
use reqwest::Url;

use crate::error::Error;

/// The region of a bucket when nothing says which: that of buckets without one, and what MinIO and Ceph take.
const DEFAULT_REGION: &str = "us-east-1";

/// A directory on a server.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    base: Url,
    access: Access,
}

/// How requests are let in.
#[derive(Clone)]
enum Access {
    Open,
    /// `Authorization: Bearer`.
    Token(String),
    /// A bucket that anybody may read.
    Anonymous,
    /// A bucket, by AWS Signature Version 4.
    Signed {
        credentials: Credentials,
        region: String,
    },
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Open => "Open",
            Self::Token(_) => "Token",
            Self::Anonymous => "Anonymous",
            Self::Signed { .. } => "Signed",
        })
    }
}

impl Source {
    /// Reads `http(s)://HOST/PATH` or `s3://BUCKET/PREFIX`. `variable` gives AWS's variables, `token` is for HTTP.
    ///
    /// # Errors
    /// Says what is wrong with the source, or which variables do not go together.
    pub(crate) fn new(
        text: &str,
        token: Option<String>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Error> {
        let form = "write https://HOST/PATH or s3://BUCKET/PREFIX";
        let refuse = |problem: &str, hint: &str| {
            Error::refused(format!("source {text}: {problem}")).with_hint(hint)
        };
        let Some((scheme, rest)) = text.split_once("://") else {
            let hint = "`shimmer mirror stage` copies a directory";
            return Err(refuse("is no URL", &format!("{form}; {hint}")));
        };
        match scheme {
            "http" | "https" => {
                let base = Url::parse(text).map_err(|error| refuse(&error.to_string(), form))?;
                // Whoever may list processes would read it.
                if !base.username().is_empty() || base.password().is_some() {
                    let problem = "a name or password in the URL could be read by every process";
                    // The text itself is the secret.
                    return Err(Error::refused(format!("source of {scheme}: {problem}"))
                        .with_hint("give a token with --token-file"));
                }
                if base.query().is_some() || base.fragment().is_some() {
                    let problem = "has a query or fragment, which files below it could not have";
                    return Err(refuse(problem, form));
                }
                let access = token.map_or(Access::Open, Access::Token);
                Ok(Self { base, access })
            }
            "s3" if token.is_some() => {
                let hint = "buckets take AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
                Err(refuse("a token is for https sources", hint))
            }
            "s3" => bucket(rest, variable).map_err(|(problem, hint)| refuse(&problem, hint)),
            "file" => {
                Err(refuse("is a directory of this host", "`shimmer mirror stage` copies one"))
            }
            _ => Err(refuse("has an unknown scheme", form)),
        }
    }

    /// The URL of a file below the source. Every byte that could mean something else is escaped, because signatures are
    /// computed over the path as it is sent.
    pub(super) fn url(&self, file: &str) -> Url {
        let mut url = self.base.clone();
        let path = format!("{}/{}", self.base.path().trim_end_matches('/'), escaped(file));
        url.set_path(&path);
        url
    }

    /// Whether the connection is to be encrypted.
    pub(super) fn is_https(&self) -> bool {
        self.base.scheme() == "https"
    }

    /// Whether redirects may be followed: a signature is for one host.
    pub(super) fn follows_redirects(&self) -> bool {
        matches!(self.access, Access::Open | Access::Token(_))
    }

    /// What the user should read before anything is sent.
    pub(crate) fn warning(&self) -> Option<&'static str> {
        let secret = matches!(self.access, Access::Token(_));
        (secret && !self.is_https())
            .then_some("the token goes over the network in plain text: use an https source")
    }

    /// Why a request may have been refused, where the kind of access says so.
    pub(super) fn excuse(&self) -> Option<&'static str> {
        matches!(self.access, Access::Anonymous).then_some(
            "no request was signed: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY unless the bucket is public",
        )
    }

    /// Headers that let a request in. They are made anew for each, because signatures have a time.
    pub(super) fn headers(
        &self,
        url: &Url,
        range: Option<&str>,
        now: SystemTime,
    ) -> Result<Vec<(String, String)>, String> {
        match &self.access {
            Access::Open | Access::Anonymous => Ok(Vec::new()),
            Access::Token(token) => {
                Ok(vec![("authorization".to_owned(), format!("Bearer {token}"))])
            }
            Access::Signed { credentials, region } => {
                signature(url, range, credentials, region, now)
            }
        }
    }
}

fn bucket(
    rest: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Source, (String, &'static str)> {
    let given = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    if bucket.is_empty() || !bucket.bytes().all(plain) {
        return Err((format!("{bucket:?} is no name of a bucket"), "write s3://BUCKET/PREFIX"));
    }
    let region = given("AWS_REGION").or_else(|| given("AWS_DEFAULT_REGION"));
    let region = region.unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let endpoint = given("AWS_ENDPOINT_URL_S3").or_else(|| given("AWS_ENDPOINT_URL"));
    let host = match endpoint {
        Some(endpoint) => format!("{}/{bucket}", endpoint.trim_end_matches('/')),
        None => {
            let suffix = if region.starts_with("cn-") { ".cn" } else { "" };
            let host = format!("s3.{region}.amazonaws.com{suffix}");
            // The certificate of the service is for one label before its name.
            let by_path = bucket.contains('.');
            if by_path {
                format!("https://{host}/{bucket}")
            } else {
                format!("https://{bucket}.{host}")
            }
        }
    };
    let base = format!("{host}/{}", escaped(prefix.trim_matches('/')));
    let base = Url::parse(&base).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    let base = base.ok_or_else(|| {
        (
            format!("{host} is no address of a service"),
            "AWS_ENDPOINT_URL is like https://minio:9000",
        )
    })?;
    let access = match (given("AWS_ACCESS_KEY_ID"), given("AWS_SECRET_ACCESS_KEY")) {
        (Some(id), Some(secret)) => {
            let session = given("AWS_SESSION_TOKEN");
            let credentials = Credentials::new(id, secret, session, None, "environment");
            Access::Signed { credentials, region }
        }
        (None, None) => {
            let others = [
                "AWS_WEB_IDENTITY_TOKEN_FILE",
                "AWS_CONTAINER_CREDENTIALS_FULL_URI",
                "AWS_PROFILE",
            ];
            if let Some(other) = others.into_iter().find(|name| given(name).is_some()) {
                let hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or unset it for a public bucket";
                return Err((format!("credentials by {other} are not supported"), hint));
            }
            Access::Anonymous
        }
        (Some(_), None) => {
            return Err((
                "AWS_SECRET_ACCESS_KEY is missing".to_owned(),
                "set it beside AWS_ACCESS_KEY_ID",
            ));
        }
        (None, Some(_)) => {
            return Err((
                "AWS_ACCESS_KEY_ID is missing".to_owned(),
                "set it beside AWS_SECRET_ACCESS_KEY",
            ));
        }
    };
    Ok(Source { base, access })
}

/// A path as S3 canonicalises it: everything but unreserved characters and slashes.
fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            write!(out, "%{byte:02X}").expect("a String takes any text");
        }
    }
    out
}

fn signature(
    url: &Url,
    range: Option<&str>,
    credentials: &Credentials,
    region: &str,
    now: SystemTime,
) -> Result<Vec<(String, String)>, String> {
    let mut settings = SigningSettings::default();
    // S3 takes the path as it was sent, and wants the digest of the body in a header.
    settings.percent_encoding_mode = PercentEncodingMode::Single;
    settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
    settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
    let identity = credentials.clone().into();
    let parameters = v4::SigningParams::builder()
        .identity(&identity)
        .region(region)
        .name("s3")
        .time(now)
        .settings(settings)
        .build()
        .map_err(|error| error.to_string())?;
    let headers = range.map(|range| ("range", range));
    let request =
        SignableRequest::new("GET", url.as_str(), headers.into_iter(), SignableBody::Bytes(&[]))
            .map_err(|error| error.to_string())?;
    let signed = sign(request, &parameters.into()).map_err(|error| error.to_string())?;
    let (instructions, _signature) = signed.into_parts();
    let pair = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    Ok(instructions.headers().map(pair).collect())
}

#[cfg(test)]
mod tests;
