//! What tells that a socket is closed, so that the thread of a connection ends with it.

use shimmer_proto::tls::Companion;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::server::TcpConnectInfo;

/// Cancels a token when the connection that it stays with is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    _closed: DropGuard,
}

impl Watch {
    pub(super) fn new(closed: CancellationToken) -> Self {
        Self { _closed: closed.drop_guard() }
    }
}

impl Companion for Watch {
    type Info = TcpConnectInfo;

    fn info(&self, tcp: TcpConnectInfo) -> TcpConnectInfo {
        tcp
    }
}
