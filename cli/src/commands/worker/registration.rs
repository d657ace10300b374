//! A worker's entry in the membership store, for as long as it serves.

use std::{
    future::{self, Future},
    net::SocketAddr,
    sync::Arc,
};

use shimmer_proto::{
    address::PeerAddress,
    membership::{
        MembershipStore,
        records::{WORKERS, WorkerRecord},
    },
};
use shimmer_worker::ExpertCore;
use tokio_util::sync::CancellationToken;

use crate::config::{ClusterConfig, host_name, incarnation};

/// What is told to others, and whom it is told.
#[derive(Debug)]
pub(super) struct Registration {
    store: Arc<dyn MembershipStore>,
    cluster: ClusterConfig,
    address: PeerAddress,
    key: String,
    record: WorkerRecord,
}

impl Registration {
    /// Of a worker that listens on `listening`.
    pub(super) fn new(
        store: Arc<dyn MembershipStore>,
        cluster: ClusterConfig,
        core: &ExpertCore,
        listening: SocketAddr,
    ) -> Self {
        let hello = core.hello();
        let address = cluster.advertised(listening, &host_name());
        let host = if hello.host.is_empty() { host_name() } else { hello.host };
        let record = WorkerRecord {
            address: address.to_string(),
            host,
            weight: hello.weight,
            ram_budget_bytes: hello.ram_budget_bytes,
            absent_layers: hello.absent_layers,
            container_digest: hello.identity.unwrap_or_default().container_digest,
            incarnation: incarnation(),
            draining: false,
        };
        Self { store, cluster, address, key: format!("{WORKERS}{}", hello.worker_id), record }
    }

    fn announce(&self, draining: bool) {
        let record = WorkerRecord { draining, ..self.record.clone() };
        let value = serde_json::to_string(&record).expect("a record of numbers and text");
        self.store.announce(&self.key, value);
    }
}

/// Is registered while `serving` runs: as one that leaves from `shutdown` on, and no more when it has ended.
pub(super) async fn while_serving<T>(
    registration: Option<Registration>,
    shutdown: CancellationToken,
    serving: impl Future<Output = T>,
) -> T {
    let Some(registration) = registration else { return serving.await };
    tracing::info!(
        store = registration.store.describe(),
        address = registration.record.address,
        "coordinators find this worker in the membership store"
    );
    registration.announce(false);
    let mut serving = Box::pin(serving);
    let warned = async {
        registration.cluster.warn_of(&registration.address).await;
        future::pending::<()>().await;
    };
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = warned => unreachable!("it is pending for ever"),
        () = shutdown.cancelled() => {
            registration.announce(true);
            serving.await
        }
    };
    registration.store.leave().await;
    ended
}
