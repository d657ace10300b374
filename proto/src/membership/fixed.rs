//! A list that is given at the start, private to the process: for `--workers` and for tests.
//!
//! Conditions and writes work as everywhere, so that whoever decides placements need not know that it is alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use tokio::sync::watch;

use super::{
    Condition, MembershipStore, Snapshot, StoreError, Write, Written, check_write, model::Model,
};

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
