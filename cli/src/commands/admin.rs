//! What operators ask and order: `status`, `placement`, `drain`, `rebalance`, `readmit`.

mod changes;
mod placement;
mod port;
mod status;

use std::{path::PathBuf, time::Duration};

use clap::Args;
use comfy_table::{Table, presets};
use shimmer_proto::{
    admin::v1::admin_service_client::AdminServiceClient,
    limits::MAX_MESSAGE_BYTES,
    tls::{DialError, Dialer},
};
use tonic::{Request, transport::Channel};

use super::security;
use crate::{
    block_on,
    config::{HostPort, member_files},
    error::Error,
};

pub use changes::{DrainArgs, ReadmitArgs, RebalanceArgs, drain, readmit, rebalance};
pub use placement::{PlacementArgs, placement};
pub(crate) use port::{AdminPort, beside};
pub use status::{StatusArgs, status};

/// A live coordinator answers in milliseconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// An order waits for the membership store.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Which coordinator is asked, and how.
#[derive(Debug, Args)]
pub struct AdminArgs {
    /// Admin port of a coordinator (`serve --admin-listen`); any one of a cluster will do
    #[arg(
        long,
        env = "SHIMMER_ADMIN",
        value_name = "ADDRESS",
        default_value = "localhost:50053",
        help_heading = "Where"
    )]
    admin: HostPort,

    /// Authority of the cluster's members, if they speak TLS; with --tls-cert and --tls-key
    #[arg(long, env = "SHIMMER_TLS_CA", value_name = "FILE", help_heading = "Where")]
    tls_ca: Option<PathBuf>,

    /// Certificate with which this command is a member
    #[arg(long, env = "SHIMMER_TLS_CERT", value_name = "FILE", help_heading = "Where")]
    tls_cert: Option<PathBuf>,

    /// Key of the certificate
    #[arg(long, env = "SHIMMER_TLS_KEY", value_name = "FILE", help_heading = "Where")]
    tls_key: Option<PathBuf>,

    /// One JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// A connected client.
type Client = AdminServiceClient<Channel>;

impl AdminArgs {
    async fn connect(&self) -> Result<Client, Error> {
        let files = member_files(self.tls_ca.clone(), self.tls_cert.clone(), self.tls_key.clone())?;
        let identity = security::identity(files.as_ref())?;
        let dialer =
            identity.map_or_else(Dialer::plaintext, |identity| Dialer::tls(identity.client()));
        let channel = dialer.connect(&self.admin.0, CONNECT_TIMEOUT).await.map_err(|error| {
            let hint = match &error {
                DialError::Tls(_) => "the admin port wants what the members have: --tls-ca, --tls-cert and --tls-key",
                _ => "is `shimmer serve --admin-listen ADDRESS` running there? give its address with --admin host:port",
            };
            Error::failed(format!("cannot connect to the admin port at {}", self.admin), error)
                .with_hint(hint)
        })?;
        Ok(AdminServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// Connects, asks and returns the answer.
    fn ask<T>(&self, call: impl AsyncFnOnce(Client) -> Result<T, Error>) -> Result<T, Error> {
        block_on(async { call(self.connect().await?).await })
    }
}

/// A request with a deadline.
fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}

/// A table in the style of the other commands.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY).set_header(header);
    table
}
