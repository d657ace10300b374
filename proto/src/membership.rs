//! Who belongs to a cluster: a small store of keys that every member watches, with keys that vanish with whoever wrote them.
//!
//! [`MembershipStore`] is the seam. Implementations keep themselves connected: a caller sees a [`Snapshot`] that may be old,
//! never an error that it must retry. What the keys mean stands in [`records`].

mod announcements;
pub mod etcd;
pub mod fixed;
pub mod memory;
mod model;
pub mod records;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::{Duration, SystemTime},
};

use tokio::sync::watch;

use crate::identity::shown;

/// Everything the store holds for one cluster, as far as this member knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Grows with every change; 0 before the first answer of the store. It falls only when the store lost its data.
    pub revision: u64,
    /// By key, without the cluster's prefix.
    pub entries: BTreeMap<String, Entry>,
    /// The lease that this member's leased keys hang on, as far as it knows; 0 while it has none.
    pub lease: u64,
    /// Why the snapshot may be old; none while the store answers.
    pub disconnected: Option<Outage>,
}

impl Snapshot {
    /// Whether this member wrote the key under the lease that it still has. A key that an earlier run of this member left
    /// behind is not its own.
    pub fn owns(&self, key: &str) -> bool {
        self.lease != 0 && self.entries.get(key).is_some_and(|entry| entry.lease == self.lease)
    }

    /// The condition that a key is as it stands here, absent if it is absent here.
    pub fn unchanged(&self, key: &str) -> Condition {
        let revision = self.entries.get(key).map(|entry| entry.revision);
        Condition { key: key.to_owned(), revision }
    }
}

/// How long the store has not answered, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outage {
    /// What the last try ended with.
    pub cause: String,
    /// Since when nothing has been heard of the store.
    pub since: SystemTime,
}

/// A value and the revision that wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entry {
    /// Usually JSON of a type in [`records`].
    pub value: String,
    /// Revision of the last write of this key; a fencing number.
    pub revision: u64,
    /// The lease with which the key vanishes; 0 for a key that stays.
    pub lease: u64,
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

impl Write {
    /// The key that is changed.
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::PutLeased { key, .. } | Self::Delete { key } => key,
        }
    }

    /// Bytes of the value; 0 for a removal.
    fn value_bytes(&self) -> usize {
        match self {
            Self::Put { value, .. } | Self::PutLeased { value, .. } => value.len(),
            Self::Delete { .. } => 0,
        }
    }
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

/// Most changes, and most conditions, of one write: etcd's own limit for a transaction.
pub const MAX_WRITES: usize = 128;

/// Most bytes of keys and values in one write. etcd takes requests of 1.5 MiB; the rest is for what surrounds them.
pub const MAX_WRITE_BYTES: usize = 1 << 20;

/// Longest key, bytes: a folder and the id of a member.
pub const MAX_KEY_BYTES: usize = 512;

/// Refuses what not every kind of store would take, before it is sent to one.
fn check_write(conditions: &[Condition], writes: &[Write]) -> Result<(), String> {
    let mut keys = BTreeSet::new();
    if let Some(twice) = writes.iter().map(Write::key).find(|key| !keys.insert(*key)) {
        return Err(format!("key '{}' is written twice in one write", shown(twice)));
    }
    let all = || conditions.iter().map(|c| c.key.as_str()).chain(writes.iter().map(Write::key));
    if let Some(bad) = all().find(|key| key.is_empty() || key.len() > MAX_KEY_BYTES) {
        let (key, bytes) = (shown(bad), bad.len());
        return Err(format!("key '{key}' has {bytes} bytes; it must have 1 to {MAX_KEY_BYTES}"));
    }
    if writes.len() > MAX_WRITES || conditions.len() > MAX_WRITES {
        return Err(format!(
            "{} changes under {} conditions in one write; at most {MAX_WRITES} of each",
            writes.len(),
            conditions.len()
        ));
    }
    let bytes =
        all().map(str::len).sum::<usize>() + writes.iter().map(Write::value_bytes).sum::<usize>();
    if bytes > MAX_WRITE_BYTES {
        let largest = writes.iter().max_by_key(|write| write.value_bytes());
        let key = largest.map_or_else(String::new, |write| shown(write.key()));
        return Err(format!(
            "a write of {bytes} bytes, most of them under '{key}'; at most {MAX_WRITE_BYTES}"
        ));
    }
    Ok(())
}

/// Where the members of a cluster find each other.
#[tonic::async_trait]
pub trait MembershipStore: Send + Sync + fmt::Debug {
    /// "static", "memory" or "etcd".
    fn kind(&self) -> &'static str;

    /// What it is and where, for people: `etcd at http://10.0.0.1:2379`.
    fn describe(&self) -> String;

    /// Follows the store. The value is the newest known state; changes in between may be skipped.
    fn watch(&self) -> watch::Receiver<Snapshot>;

    /// Keeps a leased key in the store for as long as this member lives, whatever happens to leases, connections and the
    /// store itself. Another call for the key replaces its value. Returns at once. A value that [`write`](Self::write)
    /// would refuse for its size is not announced, and the log says so.
    fn announce(&self, key: &str, value: String);

    /// Ends an announcement and removes its key, soon.
    fn withdraw(&self, key: &str);

    /// Applies all writes in one transaction if all conditions hold. Bounded in time. The state that it leads to may reach
    /// [`watch`](Self::watch) later than the answer comes back.
    ///
    /// # Errors
    /// After [`StoreError::Unreachable`] the write may have happened.
    async fn write(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> Result<Written, StoreError>;

    /// Withdraws everything that is announced and gives the lease back, within a bounded time. The store is not used
    /// after this.
    async fn leave(&self);
}
