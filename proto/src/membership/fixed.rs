//! A list that is given at the start, private to the process: for `--workers` and for tests.
//!
//! Conditions and writes work as everywhere, so that whoever decides placements need not know that it is alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use tokio::sync::watch;

use super::{
    Condition, MembershipStore, Snapshot, StoreError, Write, Written, check_write,
    model::Model,
    records::{WORKERS, WorkerRecord},
};
use crate::address::PeerAddress;

/// The lease of the only member, which lasts as long as the process.
const LEASE: u64 = 1;

/// A store of one process.
#[derive(Debug)]
pub struct FixedStore {
    model: Mutex<Model>,
    view: watch::Sender<Snapshot>,
    /// What was given at the start, which stays when the member leaves.
    given: BTreeSet<String>,
}

impl FixedStore {
    /// A store that holds these keys from the start, leased for ever.
    pub fn new(entries: BTreeMap<String, String>) -> Self {
        let given = entries.keys().cloned().collect();
        let mut model = Model::default();
        let leased = |(key, value)| Write::PutLeased { key, value };
        model.apply(LEASE, &[], entries.into_iter().map(leased).collect());
        let view = watch::Sender::new(Self::snapshot(&model));
        Self { model: Mutex::new(model), view, given }
    }

    /// A store of workers of which only the addresses are known: `workers/<address>`, each worker taken for an ordinary one
    /// that has everything until its hello says more. Its `incarnation` is its place in the list.
    pub fn of_workers<'a>(addresses: impl IntoIterator<Item = &'a PeerAddress>) -> Self {
        let entry = |(place, address): (u64, &PeerAddress)| {
            let record = WorkerRecord {
                address: address.to_string(),
                host: address.host().to_owned(),
                weight: 1.0,
                ram_budget_bytes: 0,
                absent_layers: Vec::new(),
                container_digest: String::new(),
                incarnation: place,
                draining: false,
            };
            let value = serde_json::to_string(&record).expect("a record of numbers and text");
            (format!("{WORKERS}{address}"), value)
        };
        Self::new((0..).zip(addresses).map(entry).collect())
    }

    fn snapshot(model: &Model) -> Snapshot {
        Snapshot {
            revision: model.revision(),
            entries: model.entries().clone(),
            lease: LEASE,
            disconnected: None,
        }
    }

    fn apply(&self, conditions: &[Condition], writes: Vec<Write>) -> Result<Written, StoreError> {
        check_write(conditions, &writes)
            .map_err(|detail| StoreError::Refused { store: self.describe(), detail })?;
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        let written = model.apply(LEASE, conditions, writes);
        // Under the lock, so that no older state is published after a newer one.
        self.view.send_if_modified(|view| {
            let changed = view.revision != model.revision();
            if changed {
                *view = Self::snapshot(&model);
            }
            changed
        });
        Ok(written)
    }
}

#[tonic::async_trait]
impl MembershipStore for FixedStore {
    fn kind(&self) -> &'static str {
        "static"
    }

    fn describe(&self) -> String {
        "the static list of this process".to_owned()
    }

    fn watch(&self) -> watch::Receiver<Snapshot> {
        self.view.subscribe()
    }

    fn announce(&self, key: &str, value: String) {
        if let Err(error) = self.apply(&[], vec![Write::PutLeased { key: key.to_owned(), value }]) {
            tracing::error!(%error, "cannot announce");
        }
    }

    fn withdraw(&self, key: &str) {
        if !self.view.borrow().owns(key) {
            return;
        }
        if let Err(error) = self.apply(&[], vec![Write::Delete { key: key.to_owned() }]) {
            tracing::error!(%error, "cannot withdraw");
        }
    }

    async fn write(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> Result<Written, StoreError> {
        self.apply(&conditions, writes)
    }

    async fn leave(&self) {
        let view = self.view.borrow().clone();
        for key in view.entries.keys().filter(|key| !self.given.contains(*key)) {
            self.withdraw(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_stand_under_their_addresses() {
        let addresses: Vec<PeerAddress> =
            ["w:1", "[fd00::7]:2"].iter().map(|text| text.parse().unwrap()).collect();
        let view = FixedStore::of_workers(&addresses).view.borrow().clone();
        let keys: Vec<_> = view.entries.keys().map(String::as_str).collect();
        assert_eq!(keys, ["workers/[fd00::7]:2", "workers/w:1"]);
        let record: WorkerRecord =
            serde_json::from_str(&view.entries["workers/w:1"].value).unwrap();
        assert_eq!((record.address.as_str(), record.host.as_str()), ("w:1", "w"));
    }

    #[tokio::test]
    async fn who_leaves_takes_only_its_own_keys() {
        let store = FixedStore::new(BTreeMap::from([("workers/1".to_owned(), "w".to_owned())]));
        store.announce("coordinators/1", "c".to_owned());
        let put = Write::Put { key: "placement".to_owned(), value: "p".to_owned() };
        store.write(vec![], vec![put]).await.unwrap();
        store.withdraw("placement");
        assert_eq!(store.view.borrow().entries.len(), 3);
        store.leave().await;
        let view = store.view.borrow();
        assert_eq!(view.entries.keys().collect::<Vec<_>>(), ["placement", "workers/1"]);
    }
}
