//! The membership store of a cluster: etcd, under `/shimmer/<cluster>/`.
//!
//! One thread with a runtime of its own does everything: it follows the keys, keeps the lease with all announcements, and makes
//! writes. What it decides stands in plain state machines beside it. Whoever uses the store only looks at values and sends
//! messages, from any runtime or none.

mod config;
mod connection;
mod failure;
mod keeper;
mod lease;
mod transaction;
mod watcher;
mod writer;

use std::{
    collections::BTreeMap,
    future::Future,
    io,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

use etcd_client::Client;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use config::{
    ClusterName, ClusterNameError, EtcdConfig, EtcdTls, EtcdUrl, EtcdUrlError, EtcdUser, LEASE_MAX,
    LEASE_MIN,
};
use connection::Connections;
use failure::Failure;

use super::{
    Condition, MembershipStore, Outage, Snapshot, StoreError, Write, Written, check_write,
};

/// A member's place in an etcd. It is there at once, with an empty snapshot that says so, whether etcd can be reached or not.
#[derive(Debug)]
pub struct EtcdStore {
    shared: Arc<Shared>,
    requests: mpsc::Sender<writer::Request>,
    /// Ends the thread.
    stop: CancellationToken,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the parts of the store have in common.
#[derive(Debug)]
struct Shared {
    config: EtcdConfig,
    prefix: String,
    connections: Connections,
    view: watch::Sender<Snapshot>,
    wanted: watch::Sender<BTreeMap<String, String>>,
    /// The newest lease that a write has found to be gone.
    lost: watch::Sender<u64>,
    /// Cancelled when the member is to leave.
    leave: CancellationToken,
    /// Cancelled when the thread has ended, whatever ended it.
    ended: CancellationToken,
}

impl Shared {
    async fn attempt<T, F>(
        &self,
        limit: Duration,
        call: impl FnOnce(Client) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        Box::pin(self.connections.attempt(&self.config, limit, call)).await
    }
}

impl EtcdStore {
    /// Starts the thread that connects.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(config: EtcdConfig) -> io::Result<Self> {
        assert!(!config.endpoints.is_empty(), "an etcd has an address");
        let outage =
            Outage { cause: "there was no answer yet".to_owned(), since: SystemTime::now() };
        let first = Snapshot { disconnected: Some(outage), ..Snapshot::default() };
        let shared = Arc::new(Shared {
            prefix: config.cluster.prefix(),
            connections: Connections::new(&config),
            config,
            view: watch::Sender::new(first),
            wanted: watch::Sender::default(),
            lost: watch::Sender::default(),
            leave: CancellationToken::new(),
            ended: CancellationToken::new(),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (requests, received) = mpsc::channel(writer::AT_A_TIME);
        let stop = CancellationToken::new();
        let thread = {
            let (shared, stop) = (Arc::clone(&shared), stop.clone());
            std::thread::Builder::new().name("membership".to_owned()).spawn(move || {
                let ended = Ended { _ended: shared.ended.clone().drop_guard(), shared };
                runtime.block_on(run(&ended.shared, received, &stop));
                // A name lookup may hang for long and must not hold the thread.
                runtime.shutdown_background();
            })?
        };
        Ok(Self { shared, requests, stop, thread: Mutex::new(Some(thread)) })
    }

    fn unreachable(&self, since: Instant, detail: &str) -> StoreError {
        StoreError::Unreachable {
            store: self.describe(),
            waited: since.elapsed(),
            detail: detail.to_owned(),
        }
    }
}

async fn run(
    shared: &Arc<Shared>,
    requests: mpsc::Receiver<writer::Request>,
    stop: &CancellationToken,
) {
    let watcher = Box::pin(watcher::Watcher::new(Arc::clone(shared)).run());
    let keeper = Box::pin(keeper::Keeper::new(Arc::clone(shared)).run());
    let writer = Box::pin(writer::run(Arc::clone(shared), requests));
    tokio::select! {
        () = stop.cancelled() => {}
        () = keeper => {}
        () = watcher => {}
        () = writer => {}
    }
}

/// Says that the thread has ended, also when a bug ended it.
struct Ended {
    shared: Arc<Shared>,
    _ended: DropGuard,
}

impl Drop for Ended {
    fn drop(&mut self) {
        let cause = "the thread that follows the membership store has ended".to_owned();
        self.shared.view.send_modify(|view| {
            view.lease = 0;
            view.disconnected = Some(Outage { cause, since: SystemTime::now() });
        });
    }
}

#[tonic::async_trait]
impl MembershipStore for EtcdStore {
    fn kind(&self) -> &'static str {
        "etcd"
    }

    fn describe(&self) -> String {
        self.shared.config.describe()
    }

    fn watch(&self) -> watch::Receiver<Snapshot> {
        self.shared.view.subscribe()
    }

    fn announce(&self, key: &str, value: String) {
        let write = Write::PutLeased { key: key.to_owned(), value };
        if let Err(error) = check_write(&[], std::slice::from_ref(&write)) {
            return tracing::error!(error, "cannot announce");
        }
        if let Write::PutLeased { key, value } = write {
            self.shared.wanted.send_modify(|wanted| {
                wanted.insert(key, value);
            });
        }
    }

    fn withdraw(&self, key: &str) {
        self.shared.wanted.send_if_modified(|wanted| wanted.remove(key).is_some());
    }

    async fn write(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> Result<Written, StoreError> {
        let since = Instant::now();
        check_write(&conditions, &writes)
            .map_err(|detail| StoreError::Refused { store: self.describe(), detail })?;
        if self.shared.leave.is_cancelled() {
            return Err(self.unreachable(since, "this member has left"));
        }
        let (reply, answer) = oneshot::channel();
        let request = writer::Request { conditions, writes, since, reply };
        self.requests.try_send(request).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                self.unreachable(since, "too many writes are waiting for it")
            }
            mpsc::error::TrySendError::Closed(_) => {
                self.unreachable(since, "the thread that writes has ended")
            }
        })?;
        answer
            .await
            .unwrap_or_else(|_| Err(self.unreachable(since, "the thread that writes has ended")))
    }

    async fn leave(&self) {
        self.shared.leave.cancel();
        self.shared.ended.cancelled().await;
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        self.stop.cancel();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(panic)) = thread.map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
