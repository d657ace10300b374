//! Which etcd a command asks, and as whom: the flags of the roles, for commands that are no member.

use std::path::PathBuf;

use clap::Args;

use super::{
    ClusterConfig, ConfigError, Period,
    cluster::{Given, Name, Url},
};

/// Flags of etcd.
#[derive(Debug, Clone, Args)]
pub struct EtcdArgs {
    /// Name of the cluster: its keys in etcd are under /shimmer/NAME/
    #[arg(long, env = "SHIMMER_CLUSTER", value_name = "NAME", help_heading = "Membership")]
    cluster: Option<Name>,

    /// Nodes of etcd, as http://host:port or https://host:port, separated by commas
    #[arg(
        long,
        env = "SHIMMER_ETCD",
        value_name = "URL,...",
        value_delimiter = ',',
        help_heading = "Membership"
    )]
    etcd: Vec<Url>,

    /// Certificates of the authorities that sign those of etcd
    #[arg(long, env = "SHIMMER_ETCD_CA", value_name = "FILE", help_heading = "Membership")]
    etcd_ca: Option<PathBuf>,

    /// This host's certificate for an etcd that asks for one
    #[arg(long, env = "SHIMMER_ETCD_CERT", value_name = "FILE", help_heading = "Membership")]
    etcd_cert: Option<PathBuf>,

    /// Key of that certificate
    #[arg(long, env = "SHIMMER_ETCD_KEY", value_name = "FILE", help_heading = "Membership")]
    etcd_key: Option<PathBuf>,

    /// User of an etcd with authentication; its password comes from SHIMMER_ETCD_PASSWORD or a file
    #[arg(long, env = "SHIMMER_ETCD_USER", value_name = "NAME", help_heading = "Membership")]
    etcd_user: Option<String>,

    /// File with the password of that user
    #[arg(
        long,
        env = "SHIMMER_ETCD_PASSWORD_FILE",
        value_name = "FILE",
        help_heading = "Membership"
    )]
    etcd_password_file: Option<PathBuf>,
}

impl EtcdArgs {
    /// Parses the flags; none if no etcd is named.
    ///
    /// # Errors
    /// They contradict each other or leave something open.
    pub fn config(&self) -> Result<Option<ClusterConfig>, ConfigError> {
        Given {
            cluster: self.cluster.clone(),
            etcd: self.etcd.clone(),
            ca: self.etcd_ca.clone(),
            cert: self.etcd_cert.clone(),
            key: self.etcd_key.clone(),
            user: self.etcd_user.clone(),
            password_file: self.etcd_password_file.clone(),
            lease: Period::seconds(10),
            advertise: None,
        }
        .check(|variable| std::env::var(variable).ok())
    }
}
