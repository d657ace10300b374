//! Settings of membership, which coordinators and workers share: which etcd, as whom, and where others find this process.

use std::{
    env, fmt, fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    iter,
    net::SocketAddr,
    path::{Path, PathBuf},
    process,
    sync::Arc,
    time::SystemTime,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use shimmer_proto::{
    address::PeerAddress,
    membership::{
        MembershipStore,
        etcd::{
            ClusterName, EtcdConfig, EtcdStore, EtcdTls, EtcdUrl, EtcdUser, LEASE_MAX, LEASE_MIN,
        },
    },
};

use super::{ConfigError, HostPort, Period};
use crate::error::Error;

/// Where the password may stand instead of in a file. It has no flag: everybody on a machine can read command lines.
pub(super) const PASSWORD_VARIABLE: &str = "SHIMMER_ETCD_PASSWORD";

/// Longest password file that is read; anything longer is another file.
const PASSWORD_BYTES: usize = 4096;

/// A text of another crate as a setting.
macro_rules! text_setting {
    ($(#[$meta:meta])* $name:ident($inner:ty)) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name(pub $inner);

        impl std::str::FromStr for $name {
            type Err = <$inner as std::str::FromStr>::Err;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    };
}

text_setting! {
    /// The name of a cluster.
    Name(ClusterName)
}
text_setting! {
    /// `http://host:port` or `https://host:port` of a node of etcd.
    Url(EtcdUrl)
}

/// Outlasts an election of etcd and a busy host.
pub(super) const LEASE: Period = Period::seconds(10);

/// Declares a role's settings with the macro that is named first, with the keys that every member has behind its own.
macro_rules! settings_with_cluster {
    ($inner:ident: $(#[$meta:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $inner! {
            $(#[$meta])*
            pub struct $name {
                $($own)*

                /// Certificates of the authorities that sign this cluster's members; with tls-cert and tls-key, traffic between members
                /// is encrypted and both ends are checked
                #[arg(long, env = "SHIMMER_TLS_CA", value_name = "FILE", help_heading = "Security")]
                tls_ca: std::path::PathBuf,
                    because "without the three files anybody who reaches the port is believed: for trusted networks only";

                /// Certificate of this member, and those between it and the authority
                #[arg(long, env = "SHIMMER_TLS_CERT", value_name = "FILE", help_heading = "Security")]
                tls_cert: std::path::PathBuf, because "read again when it changes";

                /// Key of the certificate
                #[arg(long, env = "SHIMMER_TLS_KEY", value_name = "FILE", help_heading = "Security")]
                tls_key: std::path::PathBuf, because "read again when it changes";

                /// Name of the cluster that this process belongs to: its keys in etcd are under /shimmer/NAME/
                #[arg(long, env = "SHIMMER_CLUSTER", value_name = "NAME", help_heading = "Membership")]
                cluster: $crate::config::cluster::Name,
                    because "required with etcd: one etcd can serve several clusters";

                /// Nodes of the etcd in which members find each other, as http://host:port or https://host:port, separated
                /// by commas
                #[arg(long, env = "SHIMMER_ETCD", value_name = "URL,...", value_delimiter = ',', help_heading = "Membership")]
                etcd: Vec<$crate::config::cluster::Url>,
                    because "without it a worker waits for coordinators that know its address; docs/MEMBERSHIP.md says how to set it up";

                /// Certificates of the authorities that sign those of etcd
                #[arg(long, env = "SHIMMER_ETCD_CA", value_name = "FILE", help_heading = "Membership")]
                etcd_ca: std::path::PathBuf,
                    because "required with https; read again for every connection";

                /// This process's certificate for an etcd that asks for one
                #[arg(long, env = "SHIMMER_ETCD_CERT", value_name = "FILE", help_heading = "Membership")]
                etcd_cert: std::path::PathBuf, because "read again for every connection";

                /// Key of that certificate
                #[arg(long, env = "SHIMMER_ETCD_KEY", value_name = "FILE", help_heading = "Membership")]
                etcd_key: std::path::PathBuf, because "read again for every connection";

                /// User of an etcd with authentication; its password comes from SHIMMER_ETCD_PASSWORD or a file
                #[arg(long, env = "SHIMMER_ETCD_USER", value_name = "NAME", help_heading = "Membership")]
                etcd_user: String, because "without it etcd is used without authentication";

                /// File with the password of that user
                #[arg(long, env = "SHIMMER_ETCD_PASSWORD_FILE", value_name = "FILE", help_heading = "Membership")]
                etcd_password_file: std::path::PathBuf,
                    because "the password itself is no flag, as everybody on this machine can read those";

                /// Time after which a member that gives no sign of life is gone to the others
                #[arg(long, env = "SHIMMER_LEASE", value_name = "TIME", help_heading = "Membership")]
                lease: $crate::config::Period = $crate::config::cluster::LEASE,
                    because "outlasts an election of etcd and a busy host; faults are noticed by their connections long before";

                /// Address under which others reach this process; IPv6 literals in brackets
                #[arg(long, env = "SHIMMER_ADVERTISE", value_name = "ADDRESS", help_heading = "Membership")]
                advertise: $crate::config::HostPort,
                    because "without it the address that it listens on, or the host's name where that is every address";
            }
        }

        impl $name {
            /// Parses the keys of membership; none if this process is in no etcd.
            fn cluster(&self) -> Result<Option<$crate::config::ClusterConfig>, $crate::config::ConfigError> {
                $crate::config::cluster::Given {
                    cluster: self.cluster.clone(),
                    etcd: self.etcd.clone().unwrap_or_default(),
                    ca: self.etcd_ca.clone(),
                    cert: self.etcd_cert.clone(),
                    key: self.etcd_key.clone(),
                    user: self.etcd_user.clone(),
                    password_file: self.etcd_password_file.clone(),
                    lease: self.lease.unwrap_or($crate::config::cluster::LEASE),
                    advertise: self.advertise.clone(),
                }
                .check(|variable| std::env::var(variable).ok())
            }
        }
    };
}
pub(super) use settings_with_cluster;

/// The keys as they were given.
#[derive(Debug, Clone)]
pub(super) struct Given {
    pub(super) cluster: Option<Name>,
    pub(super) etcd: Vec<Url>,
    pub(super) ca: Option<PathBuf>,
    pub(super) cert: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
    pub(super) user: Option<String>,
    pub(super) password_file: Option<PathBuf>,
    pub(super) lease: Period,
    pub(super) advertise: Option<HostPort>,
}

impl Given {
    /// Refuses what contradicts itself or leaves something open.
    pub(super) fn check(
        self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<ClusterConfig>, ConfigError> {
        let refuse = |key: &str, message: String| Err(ConfigError::invalid(key, message));
        if self.etcd.is_empty() {
            let more = [
                ("cluster", self.cluster.is_some()),
                ("etcd-ca", self.ca.is_some()),
                ("etcd-cert", self.cert.is_some()),
                ("etcd-key", self.key.is_some()),
                ("etcd-user", self.user.is_some()),
                ("etcd-password-file", self.password_file.is_some()),
                ("advertise", self.advertise.is_some()),
                ("lease", self.lease != LEASE),
            ];
            return match more.into_iter().find(|(_, given)| *given) {
                Some((key, _)) => refuse(key, "means nothing without --etcd URL[,URL]".to_owned()),
                None => Ok(None),
            };
        }
        let Some(cluster) = &self.cluster else { return Err(ConfigError::missing("cluster")) };
        for (index, url) in self.etcd.iter().enumerate() {
            if self.etcd[..index].contains(url) {
                return refuse("etcd", format!("{} stands in the list twice", url.0));
            }
        }
        if !(LEASE_MIN..=LEASE_MAX).contains(&self.lease.0) || self.lease.0.subsec_nanos() != 0 {
            return refuse(
                "lease",
                format!(
                    "{} is no lease: whole seconds, from {}s to {}s",
                    self.lease,
                    LEASE_MIN.as_secs(),
                    LEASE_MAX.as_secs()
                ),
            );
        }
        Ok(Some(ClusterConfig {
            tls: self.tls()?,
            user: self.user(variable)?,
            name: cluster.0.clone(),
            endpoints: self.etcd.into_iter().map(|url| url.0).collect(),
            lease: self.lease,
            advertise: self.advertise.map(|address| address.0),
        }))
    }

    fn tls(&self) -> Result<Option<EtcdTls>, ConfigError> {
        let refuse = |key: &str, message: String| Err(ConfigError::invalid(key, message));
        let plain = self.etcd.iter().find(|url| !url.0.is_https());
        let secure = self.etcd.iter().find(|url| url.0.is_https());
        if let (Some(plain), Some(secure)) = (plain, secure) {
            return refuse("etcd", format!("{} is encrypted and {} is not", secure.0, plain.0));
        }
        if let Some(plain) = plain {
            let files = [("etcd-ca", &self.ca), ("etcd-cert", &self.cert), ("etcd-key", &self.key)];
            return match files.into_iter().find(|(_, file)| file.is_some()) {
                Some((key, _)) => {
                    refuse(key, format!("means nothing with {}: write https://", plain.0))
                }
                None => Ok(None),
            };
        }
        let Some(ca) = self.ca.clone() else { return Err(ConfigError::missing("etcd-ca")) };
        let identity = match (&self.cert, &self.key) {
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
            (None, None) => None,
            (Some(_), None) => return Err(ConfigError::missing("etcd-key")),
            (None, Some(_)) => return Err(ConfigError::missing("etcd-cert")),
        };
        Ok(Some(EtcdTls { ca, identity }))
    }

    fn user(&self, variable: impl Fn(&str) -> Option<String>) -> Result<Option<User>, ConfigError> {
        let refuse = |key: &str, message: String| Err(ConfigError::invalid(key, message));
        let from_variable = variable(PASSWORD_VARIABLE);
        let Some(name) = self.user.clone() else {
            return match (&self.password_file, from_variable) {
                (Some(_), _) => refuse("etcd-password-file", "whose? give --etcd-user".to_owned()),
                (None, Some(_)) => {
                    refuse("etcd-user", format!("is missing, and {PASSWORD_VARIABLE} is set"))
                }
                (None, None) => Ok(None),
            };
        };
        let password = match (&self.password_file, from_variable) {
            (Some(_), Some(_)) => {
                return refuse(
                    "etcd-password-file",
                    format!("contradicts {PASSWORD_VARIABLE}: set one of them"),
                );
            }
            (Some(path), None) => Password::File(path.clone()),
            (None, Some(password)) => Password::Given(password),
            (None, None) => {
                return refuse(
                    "etcd-user",
                    format!(
                        "needs a password: set {PASSWORD_VARIABLE} or give --etcd-password-file"
                    ),
                );
            }
        };
        Ok(Some(User { name, password }))
    }
}

/// A user of etcd.
#[derive(Debug, Clone)]
struct User {
    name: String,
    password: Password,
}

#[derive(Clone)]
enum Password {
    Given(String),
    File(PathBuf),
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given(_) => f.write_str("Given"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

/// The password in a file, without the end of its line.
fn password(path: &Path) -> Result<String, ConfigError> {
    let refuse = |message: String| ConfigError::invalid("etcd-password-file", message);
    let text = fs::read_to_string(path)
        .map_err(|error| refuse(format!("cannot read {}: {error}", path.display())))?;
    let password = text.trim_end_matches(['\r', '\n']);
    if password.is_empty() || password.len() > PASSWORD_BYTES || password.contains('\n') {
        return Err(refuse(format!("{} holds no password of one line", path.display())));
    }
    Ok(password.to_owned())
}

/// How this process takes part in a cluster.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    name: ClusterName,
    endpoints: Vec<EtcdUrl>,
    lease: Period,
    tls: Option<EtcdTls>,
    user: Option<User>,
    advertise: Option<PeerAddress>,
}

impl ClusterConfig {
    /// The store of this cluster. It connects by itself and does not wait for etcd.
    ///
    /// # Errors
    /// A certificate or the password cannot be read, or its thread cannot be started.
    pub fn connect(&self, id: &str) -> Result<Arc<dyn MembershipStore>, Error> {
        self.check_files()?;
        let config = EtcdConfig {
            endpoints: self.endpoints.clone(),
            cluster: self.name.clone(),
            lease: self.lease.0,
            tls: self.tls.clone(),
            user: self.user()?,
            seed: seed(id),
        };
        let store = EtcdStore::start(config).map_err(|error| {
            Error::failed("cannot start the thread of the membership store", error)
        })?;
        Ok(Arc::new(store))
    }

    /// Certificates are read again for every connection; what cannot be read now is a mistake.
    fn check_files(&self) -> Result<(), ConfigError> {
        let Some(tls) = &self.tls else { return Ok(()) };
        let identity = tls
            .identity
            .iter()
            .flat_map(|(certificate, key)| [("etcd-cert", certificate), ("etcd-key", key)]);
        for (key, path) in iter::once(("etcd-ca", &tls.ca)).chain(identity) {
            fs::File::open(path).map_err(|error| {
                ConfigError::invalid(key, format!("cannot read {}: {error}", path.display()))
            })?;
        }
        Ok(())
    }

    fn user(&self) -> Result<Option<EtcdUser>, ConfigError> {
        let Some(user) = &self.user else { return Ok(None) };
        let password = match &user.password {
            Password::Given(password) => password.clone(),
            Password::File(path) => password(path)?,
        };
        Ok(Some(EtcdUser { name: user.name.clone(), password }))
    }

    /// Whether connections to etcd are encrypted.
    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether this process is a user to etcd.
    pub fn has_user(&self) -> bool {
        self.user.is_some()
    }

    /// Nodes of etcd.
    pub fn endpoints(&self) -> &[EtcdUrl] {
        &self.endpoints
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.name.to_string()
    }

    /// Where others reach a process that listens on `listening`.
    pub fn advertised(&self, listening: SocketAddr, host_name: &str) -> PeerAddress {
        advertised(self.advertise.as_ref(), listening, host_name)
    }

    /// Warns of an address that others probably cannot reach. No more than that: a name may come to mean something later,
    /// and is looked up again by everybody who connects.
    pub async fn warn_of(&self, address: &PeerAddress) {
        match tokio::net::lookup_host((address.host(), address.port())).await {
            Ok(mut found) => {
                let local = |url: &EtcdUrl| {
                    let url = url.to_string();
                    ["//127.", "//localhost:", "//[::1]:"].iter().any(|host| url.contains(host))
                };
                if found.all(|found| found.ip().is_loopback()) && !self.endpoints.iter().all(local)
                {
                    tracing::warn!(%address, "others are told an address that only this machine can reach: give --advertise");
                }
            }
            Err(error) => {
                tracing::warn!(%address, %error, "others are told an address that resolves to nothing here: give --advertise");
            }
        }
    }
}

fn advertised(given: Option<&PeerAddress>, listening: SocketAddr, host_name: &str) -> PeerAddress {
    if let Some(given) = given {
        return given.clone();
    }
    let named = format!("{host_name}:{}", listening.port()).parse();
    match named {
        Ok(named) if listening.ip().is_unspecified() => named,
        // A socket address is written as an address of a peer.
        _ => listening.to_string().parse().expect("a bound address has a port"),
    }
}

/// Different for every run, so that members neither retry nor choose alike.
fn seed(id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (id, process::id(), incarnation()).hash(&mut hasher);
    hasher.finish()
}

/// A number that no other run of this process has.
pub fn incarnation() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let nanos = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    nanos ^ (u64::from(process::id()) << 40)
}

/// The name that this machine goes by.
pub fn host_name() -> String {
    let from_kernel = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = Some(from_kernel.trim().to_owned()).filter(|name| !name.is_empty());
    name.or_else(|| env::var("HOSTNAME").ok()).unwrap_or_else(|| "localhost".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given() -> Given {
        Given {
            cluster: "c".parse().ok(),
            etcd: vec!["http://e:2379".parse().unwrap()],
            ca: None,
            cert: None,
            key: None,
            user: None,
            password_file: None,
            lease: Period::seconds(10),
            advertise: None,
        }
    }

    fn check(
        change: impl FnOnce(&mut Given),
        password: Option<&str>,
        expected: Result<bool, &str>,
    ) {
        let mut given = given();
        change(&mut given);
        let found = given.check(|_| password.map(str::to_owned));
        match (found, expected) {
            (Ok(found), Ok(some)) => assert_eq!(found.is_some(), some),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, expected) => panic!("{:?} instead of {expected:?}", found.map(|f| f.is_some())),
        }
    }

    #[test]
    fn what_belongs_together_is_given_together() {
        let https = |g: &mut Given| {
            g.etcd = vec!["https://e:2379".parse().unwrap()];
            g.ca = Some("ca.pem".into());
        };
        let user = |g: &mut Given| g.user = Some("shimmer".to_owned());
        let file = || Some(PathBuf::from("file"));
        check(|_| (), None, Ok(true));
        check(|g| (g.etcd, g.cluster) = (Vec::new(), None), None, Ok(false));
        check(|g| g.etcd.clear(), None, Err("cluster: means nothing without --etcd"));
        let lease = |g: &mut Given| {
            (g.etcd, g.cluster, g.lease) = (Vec::new(), None, Period::seconds(3));
        };
        check(lease, None, Err("lease: means nothing without --etcd"));
        check(|g| g.cluster = None, None, Err("--cluster"));
        check(|g| g.etcd.push("http://e:2379".parse().unwrap()), None, Err("twice"));
        let mixed = |g: &mut Given| g.etcd.push("https://f:2379".parse().unwrap());
        check(mixed, None, Err("https://f:2379 is encrypted and http://e:2379 is not"));
        check(|g| g.ca = file(), None, Err("etcd-ca: means nothing with http://e:2379"));
        check(https, None, Ok(true));
        let with_https = |change: fn(&mut Given)| {
            move |g: &mut Given| {
                https(g);
                change(g);
            }
        };
        check(with_https(|g| g.ca = None), None, Err("--etcd-ca"));
        check(with_https(|g| g.cert = Some("c".into())), None, Err("--etcd-key"));
        check(with_https(|g| g.key = Some("k".into())), None, Err("--etcd-cert"));
        check(|g| g.lease = Period::seconds(0), None, Err("whole seconds, from 1s to 3600s"));
        check(|g| g.lease = "1500ms".parse().unwrap(), None, Err("whole seconds"));
        check(user, None, Err("SHIMMER_ETCD_PASSWORD or give --etcd-password-file"));
        check(user, Some("secret"), Ok(true));
        check(|_| (), Some("secret"), Err("etcd-user: is missing"));
        let with_file = |g: &mut Given| {
            user(g);
            g.password_file = file();
        };
        check(with_file, None, Ok(true));
        check(with_file, Some("secret"), Err("set one of them"));
        check(|g| g.password_file = file(), None, Err("give --etcd-user"));
    }

    #[test]
    fn a_password_is_one_line_of_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("password");
        let check = |text: &str, expected: Option<&str>| {
            fs::write(&path, text).unwrap();
            assert_eq!(password(&path).ok().as_deref(), expected, "{text:?}");
        };
        check("secret\n", Some("secret"));
        check(" with spaces \r\n", Some(" with spaces "));
        check("\n", None);
        check("two\nlines\n", None);
        let error = password(Path::new("/nowhere/password")).unwrap_err().to_string();
        assert!(error.contains("etcd-password-file: cannot read /nowhere/password"), "{error}");
        let given = Password::Given("secret".to_owned());
        assert!(!format!("{given:?}").contains("secret"));
    }

    #[test]
    fn the_advertised_address() {
        let check = |given: Option<&str>, listening: &str, name: &str, expected: &str| {
            let given = given.map(|text| text.parse().unwrap());
            let found = advertised(given.as_ref(), listening.parse().unwrap(), name);
            assert_eq!(found.to_string(), expected);
        };
        check(None, "[::]:7000", "worker-1", "worker-1:7000");
        check(None, "0.0.0.0:7000", "worker-1", "worker-1:7000");
        check(None, "10.0.0.7:7000", "worker-1", "10.0.0.7:7000");
        check(None, "[fd00::7]:7000", "worker-1", "[fd00::7]:7000");
        check(Some("[fd00::8]:1"), "[::]:7000", "worker-1", "[fd00::8]:1");
        check(None, "[::]:7000", "not a name", "[::]:7000");
    }
}
