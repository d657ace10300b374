//! What a member needs to know to reach its etcd.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use crate::identity::shown;

/// Shortest lease. etcd counts in whole seconds, and grants none below one and a half of its election timeouts, which is two
/// seconds as it comes.
pub const LEASE_MIN: Duration = Duration::from_secs(1);

/// Longest lease: a member that dies would stay in everybody's list for that long.
pub const LEASE_MAX: Duration = Duration::from_secs(3600);

/// Name of a cluster: what its keys begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterName(String);

/// Text that is no cluster's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "cluster name '{0}': 1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first"
)]
pub struct ClusterNameError(String);

impl ClusterName {
    /// What every key of the cluster begins with.
    pub(super) fn prefix(&self) -> String {
        format!("/shimmer/{}/", self.0)
    }
}

impl FromStr for ClusterName {
    type Err = ClusterNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        let first = text.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
        if first && text.len() <= 63 && text.chars().all(plain) {
            Ok(Self(text.to_owned()))
        } else {
            Err(ClusterNameError(shown(text)))
        }
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where one node of etcd answers: `http://host:2379`, `https://[fd00::7]:2379`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdUrl(String);

/// Text that is no address of an etcd.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("etcd address '{text}': {reason}")]
pub struct EtcdUrlError {
    text: String,
    reason: String,
}

impl EtcdUrl {
    /// Whether the connection is encrypted.
    pub fn is_https(&self) -> bool {
        self.0.starts_with("https://")
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for EtcdUrl {
    type Err = EtcdUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |reason: String| EtcdUrlError { text: shown(text), reason };
        let trimmed = text.trim().trim_end_matches('/');
        let (scheme, rest) = match trimmed.split_once("://") {
            Some((scheme @ ("http" | "https"), rest)) => (scheme, rest),
            _ => return Err(fail("write http://host:2379 or https://host:2379".to_owned())),
        };
        let address = rest
            .parse::<crate::address::PeerAddress>()
            .map_err(|error| fail(error.reason.to_owned()))?;
        Ok(Self(format!("{scheme}://{address}")))
    }
}

impl fmt::Display for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Certificates by files, read again for every connection, so that new ones are used without a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdTls {
    /// Who signs the certificates of etcd's nodes.
    pub ca: PathBuf,
    /// This member's certificate and key, where etcd asks clients for one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// A user of etcd.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdUser {
    /// Its name.
    pub name: String,
    /// Its password; it never shows in a log.
    pub password: String,
}

impl fmt::Debug for EtcdUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdUser").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How a member reaches its etcd.
#[derive(Debug, Clone)]
pub struct EtcdConfig {
    /// Nodes; any of them will do.
    pub endpoints: Vec<EtcdUrl>,
    /// Which of the clusters in this etcd.
    pub cluster: ClusterName,
    /// How long a member stays listed that does not renew, in whole seconds. A member is gone to the others between two
    /// thirds of it and the whole of it after its last sign of life; a store that is away for longer ends no lease.
    pub lease: Duration,
    /// Encryption, for endpoints with https.
    pub tls: Option<EtcdTls>,
    /// Who this member is to etcd.
    pub user: Option<EtcdUser>,
    /// Decides the jitter, and which node is asked first: different for each member.
    pub seed: u64,
}

impl EtcdConfig {
    /// Longest wait for the answer to one request. A fifth of the lease, so that several fit between a renewal that fails
    /// and the end; within bounds that are known to be too short and too long for any network.
    pub(super) fn attempt(&self) -> Duration {
        (self.lease / 5).clamp(Duration::from_millis(500), Duration::from_secs(3))
    }

    /// Longest time that one write is tried. An etcd with its default settings has a new leader after two seconds.
    pub(super) fn write(&self) -> Duration {
        self.lease.clamp(Duration::from_secs(5), Duration::from_secs(10))
    }

    /// A watch that is silent for this long is asked for a sign of life, which then has as long again.
    pub(super) fn patience(&self) -> Duration {
        (self.lease / 3).clamp(Duration::from_millis(500), Duration::from_secs(10))
    }

    /// Longest wait between tries to reach a store that is away.
    pub(super) fn longest_wait(&self) -> Duration {
        (self.lease / 2).min(Duration::from_secs(5))
    }

    /// Its nodes, for people.
    pub(super) fn describe(&self) -> String {
        let urls: Vec<_> = self.endpoints.iter().map(ToString::to_string).collect();
        format!("etcd at {}, cluster {}", urls.join(","), self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_clusters() {
        for good in ["a", "prod-1", "9.x_y", &"x".repeat(63)] {
            assert_eq!(good.parse::<ClusterName>().unwrap().prefix(), format!("/shimmer/{good}/"));
        }
        for bad in ["", "-a", "a/b", "a b", "ä", "..", &"x".repeat(64)] {
            let error = bad.parse::<ClusterName>().unwrap_err().to_string();
            assert!(error.contains("1 to 63"), "{error}");
        }
    }

    #[test]
    fn addresses_of_nodes() {
        let check = |text: &str, expected: Result<&str, &str>| match expected {
            Ok(shown) => assert_eq!(text.parse::<EtcdUrl>().unwrap().to_string(), shown),
            Err(part) => {
                let error = text.parse::<EtcdUrl>().unwrap_err().to_string();
                assert!(error.contains(part), "{error}");
            }
        };
        check("http://e:2379", Ok("http://e:2379"));
        check(" https://[fd00::7]:2379/ ", Ok("https://[fd00::7]:2379"));
        check("e:2379", Err("write http://host:2379"));
        check("ftp://e:2379", Err("write http://host:2379"));
        check("http://e", Err("port is missing"));
        check("https://fd00::7:2379", Err("[address]:port"));
    }

    #[test]
    fn a_password_does_not_show() {
        let user = EtcdUser { name: "shimmer".to_owned(), password: "secret".to_owned() };
        assert!(!format!("{user:?}").contains("secret"));
    }
}
