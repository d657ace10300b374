//! The admin port of a coordinator.

use std::net::{SocketAddr, TcpListener as StdListener};

use shimmer_coordinator::admin::{Admin, AdminOptions, serve};
use shimmer_proto::{address::PeerAddress, tls::ServerTls};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{commands::cannot_listen, error::Error, output};

/// A bound port that nobody serves yet.
#[derive(Debug)]
pub(crate) struct AdminPort {
    listener: StdListener,
    address: SocketAddr,
    tls: Option<ServerTls>,
}

impl AdminPort {
    /// Binds the address before anything slow is done.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub(crate) fn bind(address: SocketAddr, tls: Option<ServerTls>) -> Result<Self, Error> {
        let listener = shimmer_worker::bind(&address.to_string())
            .map_err(|error| cannot_listen(address, error, "--admin-listen"))?;
        let address = listener
            .local_addr()
            .map_err(|error| cannot_listen(address, error, "--admin-listen"))?;
        if tls.is_none() && !address.ip().is_loopback() {
            tracing::warn!(%address, "the admin port is open to whoever reaches it; give --tls-ca, --tls-cert and --tls-key, or bind it to loopback");
        }
        output::line(&format!("admin on {address}"))?;
        Ok(Self { listener, address, tls })
    }

    /// Where other members reach it, whose host reaches clients at `reached`. A port on loopback is nobody else's.
    pub(crate) fn advertised(&self, reached: &PeerAddress) -> String {
        let (host, port) = (reached.host(), self.address.port());
        match (self.address.ip().is_loopback(), host.contains(':')) {
            (true, _) => self.address.to_string(),
            (false, true) => format!("[{host}]:{port}"),
            (false, false) => format!("{host}:{port}"),
        }
    }
}

/// Runs a server to its end with the admin port beside it, if there is one: also while the server drains.
pub(crate) async fn beside<T>(
    server: impl Future<Output = T>,
    port: Option<AdminPort>,
    admin: Admin,
) -> T {
    let Some(port) = port else { return server.await };
    tracing::info!(address = %port.address, tls = port.tls.is_some(), "admin port");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let options = AdminOptions { tls: port.tls };
        let served = match TcpListener::from_std(port.listener) {
            Ok(listener) => serve(admin, listener, options, CancellationToken::new()).await,
            Err(error) => {
                tracing::error!(%error, "the admin port has no listener");
                return;
            }
        };
        if let Err(error) = served {
            tracing::error!(%error, "the admin port has ended");
        }
    });
    // The set ends the port when the server has ended.
    server.await
}
