//! Follows everything under a cluster's prefix: reads it, watches from the revision after, and begins again whenever the
//! watch ends, for whatever reason.
//!
//! Reading again costs one request and is right after a compaction, a restored backup and a cancelled watch alike. Nothing is
//! missed by it, because nobody is told of changes, only of states.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use etcd_client::{
    Client, EventType, GetOptions, KeyValue, WatchOptions, WatchResponse, WatchStream,
};
use tokio::time::{sleep, timeout};

use super::{Shared, failure::Failure};
use crate::{
    backoff::Backoff,
    membership::{Entry, Outage},
};

/// Largest answer that is read: several placements and heat records of every coordinator.
const ANSWER_BYTES: usize = 64 << 20;

/// Shortest wait between two tries.
const WAIT_MIN: Duration = Duration::from_millis(100);

/// Everything at one revision.
struct Read {
    /// Of etcd's own cluster.
    store: u64,
    revision: u64,
    entries: BTreeMap<String, Entry>,
}

/// What is known of the store between two watches.
pub(super) struct Watcher {
    shared: Arc<Shared>,
    waits: Backoff,
    /// When the watch was established that is followed.
    established: Option<Instant>,
    /// When the store was last heard of.
    heard: SystemTime,
    /// The log has said that the store is away.
    told: bool,
    /// Id of etcd's own cluster; 0 before the first answer.
    store: u64,
}

impl Watcher {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let waits =
            Backoff::new(WAIT_MIN, shared.config.longest_wait(), shared.config.seed ^ 0x5eed);
        Self { shared, waits, established: None, heard: SystemTime::now(), told: false, store: 0 }
    }

    /// Follows the store for ever.
    pub(super) async fn run(mut self) {
        loop {
            let failure = match Box::pin(self.follow()).await {
                Ok(never) => match never {},
                Err(failure) => failure,
            };
            match self.established.take() {
                // Probably only this node: nobody is alarmed before another try has failed.
                Some(since) => {
                    tracing::debug!(cause = failure.text(), "the watch ended");
                    if since.elapsed() >= self.shared.config.patience() {
                        self.waits.succeed();
                    }
                }
                None => self.away(&failure),
            }
            sleep(self.waits.fail()).await;
        }
    }

    async fn follow(&mut self) -> Result<std::convert::Infallible, Failure> {
        let read = self.read().await?;
        let mut stream = self.watch(read.revision).await?;
        self.established = Some(Instant::now());
        self.replace(read);
        let patience = self.shared.config.patience();
        let mut asked = false;
        loop {
            match timeout(patience, stream.message()).await {
                Ok(Ok(Some(response))) => {
                    asked = false;
                    self.heard = SystemTime::now();
                    refuse_cancelled(&response)?;
                    self.apply(&response);
                }
                Ok(Ok(None)) => return Err(Failure::Unanswered("the watch was closed".to_owned())),
                Ok(Err(error)) => return Err(Failure::of("the watch", &error)),
                Err(_) if asked => {
                    let waited = patience.as_millis();
                    let text = format!("the watch gave no sign of life for {waited} ms");
                    return Err(Failure::Unanswered(text));
                }
                Err(_) => {
                    // Etcd's own notifications come every ten minutes. The revision in the answer is not used: up to 3.4.24
                    // and 3.5.7 it may be ahead of events that are still to come.
                    asked = true;
                    let asking = timeout(patience, stream.request_progress());
                    if !matches!(asking.await, Ok(Ok(()))) {
                        return Err(Failure::Unanswered("the watch takes no requests".to_owned()));
                    }
                }
            }
        }
    }

    /// A linearizable read: never older than what this member has seen.
    async fn read(&self) -> Result<Read, Failure> {
        let prefix = self.shared.prefix.clone();
        let call = |client: Client| async move {
            let mut client = client.kv_client().max_decoding_message_size(ANSWER_BYTES);
            client.get(prefix, Some(GetOptions::new().with_prefix())).await
        };
        let response = self.shared.attempt(self.shared.config.attempt(), call).await?;
        let header = response
            .header()
            .ok_or_else(|| Failure::Unanswered("an answer without a header".to_owned()))?;
        let entries = response.kvs().iter().filter_map(|kv| self.entry(kv)).collect();
        Ok(Read { store: header.cluster_id(), revision: number(header.revision()), entries })
    }

    /// A watch that etcd has confirmed.
    async fn watch(&self, after: u64) -> Result<WatchStream, Failure> {
        let prefix = self.shared.prefix.clone();
        let start = i64::try_from(after).unwrap_or(i64::MAX - 1) + 1;
        let options = WatchOptions::new().with_prefix().with_start_revision(start);
        let call = |client: Client| async move {
            let mut client = client.watch_client().max_decoding_message_size(ANSWER_BYTES);
            let mut stream = client.watch(prefix, Some(options)).await?;
            let created = stream.message().await?;
            Ok((stream, created))
        };
        let (stream, created) = self.shared.attempt(self.shared.config.attempt(), call).await?;
        match created {
            Some(response) => refuse_cancelled(&response)?,
            None => return Err(Failure::Unanswered("the watch was closed".to_owned())),
        }
        Ok(stream)
    }

    /// Takes everything as it was read, and says that the store is there.
    fn replace(&mut self, read: Read) {
        let store = self.shared.config.describe();
        let before = self.shared.view.borrow().revision;
        let other = self.store != 0 && self.store != read.store;
        if read.revision < before || other {
            tracing::error!(
                store,
                revision = read.revision,
                revision_before = before,
                "the membership store has lost its data or was set up again; its new state is taken and this member \
                 announces itself again"
            );
        }
        self.store = read.store;
        self.heard = SystemTime::now();
        if std::mem::take(&mut self.told) {
            tracing::info!(store, revision = read.revision, "the membership store answers again");
        } else if before == 0 {
            tracing::info!(store, revision = read.revision, "connected to the membership store");
        }
        self.shared.view.send_if_modified(|view| {
            let changed = view.disconnected.is_some()
                || view.revision != read.revision
                || view.entries != read.entries;
            view.disconnected = None;
            view.revision = read.revision;
            view.entries = read.entries;
            changed
        });
    }

    fn apply(&self, response: &WatchResponse) {
        let Some(revision) = response.events().iter().filter_map(|e| e.kv()).map(revision).max()
        else {
            return;
        };
        // All changes of one revision come in one response.
        self.shared.view.send_modify(|view| {
            for event in response.events() {
                let Some(kv) = event.kv() else { continue };
                match event.event_type() {
                    EventType::Put => view.entries.extend(self.entry(kv)),
                    EventType::Delete => {
                        if let Some(key) = self.key(kv) {
                            view.entries.remove(key);
                        }
                    }
                }
            }
            view.revision = view.revision.max(revision);
        });
    }

    /// Says that the store is away: in the log once, in the snapshot with the newest cause.
    fn away(&mut self, failure: &Failure) {
        let cause = failure.text();
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!(
                store = self.shared.config.describe(),
                cause,
                "the membership store does not answer; what is known goes on, and it is tried until it does"
            );
        }
        let since = self.heard;
        self.shared.view.send_if_modified(|view| {
            let news = view.disconnected.as_ref().is_none_or(|outage| outage.since != since);
            view.disconnected = Some(Outage { cause: cause.to_owned(), since });
            news
        });
    }

    fn key<'a>(&self, kv: &'a KeyValue) -> Option<&'a str> {
        // Whatever else writes under this prefix, a member does not.
        std::str::from_utf8(kv.key()).ok()?.strip_prefix(&self.shared.prefix)
    }

    fn entry(&self, kv: &KeyValue) -> Option<(String, Entry)> {
        let key = self.key(kv)?;
        let value = String::from_utf8_lossy(kv.value()).into_owned();
        let lease = number(kv.lease());
        Some((key.to_owned(), Entry { value, revision: revision(kv), lease }))
    }
}

fn revision(kv: &KeyValue) -> u64 {
    number(kv.mod_revision())
}

/// Revisions and leases are never negative.
pub(super) fn number(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

fn refuse_cancelled(response: &WatchResponse) -> Result<(), Failure> {
    if !response.canceled() {
        return Ok(());
    }
    let compacted = response.compact_revision();
    let text = if compacted > 0 {
        format!("the watch was at a revision below {compacted}, which etcd has compacted")
    } else {
        format!("etcd cancelled the watch: {}", crate::identity::shown(response.cancel_reason()))
    };
    Err(Failure::Unanswered(text))
}
