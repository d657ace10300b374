//! Addresses of peers as users write them: `host:port`, `10.0.0.7:7000`, `[fd00::7]:7000`.

use std::{fmt, net::Ipv6Addr, str::FromStr};

/// A host name or literal with a port. A name is resolved at every connection attempt, never once for all.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerAddress {
    host: String,
    port: u16,
}

/// Text that is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("address '{text}': {reason}")]
pub struct AddressError {
    /// What was given.
    pub text: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl PeerAddress {
    /// Host name, IPv4 literal, or IPv6 literal without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// TCP port, never 0.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The `http://` form that a channel wants.
    pub fn uri(&self) -> String {
        format!("http://{self}")
    }
}

impl FromStr for PeerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let fail = |reason| AddressError { text: text.to_owned(), reason };
        let text = text.trim();
        let bare = text.strip_prefix("http://").unwrap_or(text);
        if bare.contains("://") {
            return Err(fail("the scheme is not supported; write host:port"));
        }
        let (host, port) = if let Some(rest) = bare.strip_prefix('[') {
            let (host, port) = rest
                .split_once("]:")
                .ok_or_else(|| fail("an IPv6 literal is written [address]:port"))?;
            host.parse::<Ipv6Addr>()
                .map_err(|_| fail("what stands in brackets is not an IPv6 address"))?;
            (host, port)
        } else {
            let (host, port) = bare
                .rsplit_once(':')
                .ok_or_else(|| fail("the port is missing; write host:port"))?;
            if host.contains(':') {
                return Err(fail("an IPv6 literal is written [address]:port"));
            }
            (host, port)
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | ':');
        if host.is_empty() || !host.chars().all(plain) {
            return Err(fail("the host is empty or has characters that no host name has"));
        }
        match port.parse::<u16>() {
            Ok(port) if port != 0 => Ok(Self { host: host.to_owned(), port }),
            _ => Err(fail("the port is not a number from 1 to 65535")),
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<&str, &str>) {
        let found = text.parse::<PeerAddress>();
        match expected {
            Ok(shown) => assert_eq!(found.unwrap().to_string(), shown),
            Err(part) => assert!(found.unwrap_err().to_string().contains(part), "{text}"),
        }
    }

    #[test]
    fn every_form_that_users_write() {
        check("worker-1:7000", Ok("worker-1:7000"));
        check(" 10.0.0.7:7000 ", Ok("10.0.0.7:7000"));
        check("[fd00::7]:7000", Ok("[fd00::7]:7000"));
        check("http://w:1", Ok("w:1"));
        check("fd00::7:7000", Err("[address]:port"));
        check("[fd00::7]", Err("[address]:port"));
        check("[w]:7000", Err("not an IPv6 address"));
        check("worker-1", Err("port is missing"));
        check("w:0", Err("1 to 65535"));
        check("w:70000", Err("1 to 65535"));
        check(":7000", Err("host is empty"));
        check("a b:7000", Err("host is empty or has"));
        check("https://w:1", Err("scheme"));
    }

    #[test]
    fn the_uri_keeps_the_brackets() {
        assert_eq!("[::1]:7000".parse::<PeerAddress>().unwrap().uri(), "http://[::1]:7000");
    }
}
