//! The membership store: what all kinds of it promise, and what a real etcd can do to it.

mod cluster;
mod conformance;
mod etcd_faults;
mod security;
mod workers;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use shimmer_proto::membership::{
    Condition, MembershipStore, Snapshot, StoreError, Write, Written,
    etcd::{EtcdConfig, EtcdStore},
};
use shimmer_tests::{etcd::Etcd, wait::wait_for};
use tokio::runtime::{Builder, Runtime};

/// Far above what anything here takes, for machines that do much else.
const DEADLINE: Duration = Duration::from_secs(90);
/// Short enough to wait for, long enough not to run out on a busy machine.
const LEASE: Duration = Duration::from_secs(6);

/// A member of the cluster `test`.
fn config(etcd: &Etcd, seed: u64) -> EtcdConfig {
    EtcdConfig {
        endpoints: etcd.urls().iter().map(|url| url.parse().unwrap()).collect(),
        cluster: "test".parse().unwrap(),
        lease: LEASE,
        tls: None,
        user: None,
        seed,
    }
}

fn member(etcd: &Etcd, seed: u64) -> Arc<EtcdStore> {
    Arc::new(EtcdStore::start(config(etcd, seed)).unwrap())
}

fn view(store: &dyn MembershipStore) -> Snapshot {
    store.watch().borrow().clone()
}

fn wait_for_view(
    what: &str,
    store: &dyn MembershipStore,
    condition: impl Fn(&Snapshot) -> bool,
) -> Snapshot {
    wait_for(what, DEADLINE, || Some(view(store)).filter(|view| condition(view)))
}

/// The values by key.
fn values(snapshot: &Snapshot) -> BTreeMap<&str, &str> {
    snapshot.entries.iter().map(|(key, entry)| (key.as_str(), entry.value.as_str())).collect()
}

fn put(key: &str, value: &str) -> Write {
    Write::Put { key: key.to_owned(), value: value.to_owned() }
}

fn put_leased(key: &str, value: &str) -> Write {
    Write::PutLeased { key: key.to_owned(), value: value.to_owned() }
}

fn delete(key: &str) -> Write {
    Write::Delete { key: key.to_owned() }
}

fn absent(key: &str) -> Condition {
    Condition { key: key.to_owned(), revision: None }
}

fn runtime() -> Runtime {
    // Without a clock: a store has its own.
    Builder::new_current_thread().build().unwrap()
}

fn write(
    store: &dyn MembershipStore,
    conditions: Vec<Condition>,
    writes: Vec<Write>,
) -> Result<Written, StoreError> {
    runtime().block_on(store.write(conditions, writes))
}

fn done(written: Result<Written, StoreError>) -> u64 {
    match written {
        Ok(Written::Done(revision)) => revision,
        other => panic!("{other:?} instead of a write"),
    }
}
