//! Who belongs to a cluster: a small store of keys that every member watches, with keys that vanish with whoever wrote them.
//!
//! [`MembershipStore`] is the seam. Implementations keep themselves connected: a caller sees a [`Snapshot`] that may be old,
//! never an error that it must retry. What the keys mean stands in [`records`].

pub mod records;

use std::{collections::BTreeMap, fmt, time::Duration};

use tokio::sync::watch;

/// Everything the store holds for one cluster, as far as this member knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Grows with every change; 0 before the first answer of the store.
    pub revision: u64,
    /// By key, without the cluster's prefix.
    pub entries: BTreeMap<String, Entry>,
    /// Why the snapshot may be old; none while the store answers.
    pub disconnected: Option<String>,
}

/// A value and the revision that wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Usually JSON of a type in [`records`].
    pub value: String,
    /// Revision of the last write of this key; a fencing number.
    pub revision: u64,
}

/// What a write depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The key that is compared.
    pub key: String,
    /// Its [`Entry::revision`]; none for a key that must not exist.
    pub revision: Option<u64>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Writes a key that stays.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// Writes a key that vanishes when this member's lease ends.
    PutLeased {
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// Removes a key; nothing happens if there is none.
    Delete {
        /// The key.
        key: String,
    },
}

/// How a conditional write ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// All conditions held; the revision of the write.
    Done(u64),
    /// A condition did not hold; nothing was written.
    Conflict,
}

/// Why a write could not be made. It may have happened all the same when its answer was lost: conditions make it safe to
/// try again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The store did not answer in time.
    #[error("the membership store {store} did not answer within {} ms: {detail}", waited.as_millis())]
    Unreachable {
        /// Where it is.
        store: String,
        /// How long the write was tried.
        waited: Duration,
        /// The last error.
        detail: String,
    },
    /// The store refused: credentials, a full disk, a value that is too large.
    #[error("the membership store {store} refused: {detail}")]
    Refused {
        /// Where it is.
        store: String,
        /// What it said.
        detail: String,
    },
    /// This kind of store cannot do that.
    #[error("{detail}")]
    Unsupported {
        /// What and why.
        detail: String,
    },
}

/// Where the members of a cluster find each other.
#[tonic::async_trait]
pub trait MembershipStore: Send + Sync + fmt::Debug {
    /// "static", "memory" or "etcd".
    fn kind(&self) -> &'static str;

    /// Follows the store. The value is the newest known state; changes in between may be skipped.
    fn watch(&self) -> watch::Receiver<Snapshot>;

    /// Keeps a leased key in the store for as long as this member lives, whatever happens to leases, connections and the
    /// store itself. Another call for the key replaces its value. Returns at once.
    fn announce(&self, key: &str, value: String);

    /// Ends an announcement and removes its key, soon.
    fn withdraw(&self, key: &str);

    /// Applies all writes in one transaction if all conditions hold. Bounded in time.
    async fn write(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> Result<Written, StoreError>;

    /// Withdraws everything that is announced and gives the lease back, within a bounded time. The store is not used
    /// after this.
    async fn leave(&self);
}
