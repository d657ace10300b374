//! Addresses of peers as settings.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use shimmer_proto::address::{AddressError, PeerAddress};

/// `host:port`, with IPv6 literals in brackets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort(pub PeerAddress);

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for HostPort {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HostPort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Where a coordinator listens for clients: `host:port`, `http://host:port` or `https://host:port`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ApiAddress {
    /// Host and port.
    pub address: PeerAddress,
    /// Whether TLS is spoken.
    pub tls: bool,
}

impl FromStr for ApiAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (rest, tls) = match text.strip_prefix("https://") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        Ok(Self { address: rest.trim_end_matches('/').parse()?, tls })
    }
}

impl fmt::Display for ApiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https://" } else { "" };
        write!(f, "{scheme}{}", self.address)
    }
}

impl Serialize for ApiAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ApiAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_says_whether_tls_is_spoken() {
        for (text, shown) in [
            ("https://a.example:443", "https://a.example:443"),
            ("https://[::1]:50051/", "https://[::1]:50051"),
            ("http://a:1", "a:1"),
            ("a:1", "a:1"),
        ] {
            assert_eq!(text.parse::<ApiAddress>().unwrap().to_string(), shown);
        }
        let error = "https://a.example".parse::<ApiAddress>().unwrap_err().to_string();
        assert!(error.contains("port is missing"), "{error}");
    }
}
