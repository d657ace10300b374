//! Which announced keys have to be written or removed, given what the store holds. A plain state machine.
//!
//! A key belongs to the run of a member that wrote it last: the first write of a run takes the key from whoever holds it,
//! usually an earlier run of the same member whose lease has not ended yet. From then on a key that somebody else has
//! taken is left to them until it is gone. Two processes under one id so settle on the newer one instead of fighting.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Condition, Entry, Snapshot};

/// Leases of this run that are remembered; keys of older ones are long gone.
const LEASES: usize = 16;

/// What this run has written.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    done: BTreeMap<String, Entry>,
    leases: VecDeque<u64>,
    /// Keys whose condition did not hold, with the revision of the snapshot that it came from.
    stale: BTreeMap<String, u64>,
    /// Keys that somebody else has taken.
    taken: BTreeSet<String>,
    /// Revision of the last snapshot.
    seen: u64,
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) key: String,
    /// None removes the key.
    pub(super) value: Option<String>,
    /// None writes whatever stands there.
    pub(super) condition: Option<Condition>,
}

impl Announcements {
    /// The next write that brings the store to what is wanted, if one is needed and can be made.
    pub(super) fn next(
        &mut self,
        wanted: &BTreeMap<String, String>,
        snapshot: &Snapshot,
        lease: u64,
    ) -> Option<Change> {
        if self.leases.back() != Some(&lease) {
            self.leases.push_back(lease);
            while self.leases.len() > LEASES {
                self.leases.pop_front();
            }
        }
        if snapshot.revision < self.seen {
            // The store lost its data: what was written does not stand there any more.
            self.done.values_mut().for_each(|entry| entry.revision = 0);
            self.stale.clear();
        }
        self.seen = snapshot.revision;
        let unwanted = self.done.keys().filter(|key| !wanted.contains_key(*key)).cloned();
        let unwanted: Vec<String> = unwanted.collect();
        if let Some(change) = unwanted.iter().find_map(|key| self.remove(key, snapshot)) {
            return Some(change);
        }
        wanted.iter().find_map(|(key, value)| self.put(key, value, snapshot, lease))
    }

    /// The store took a write.
    pub(super) fn written(&mut self, change: &Change, lease: u64, revision: u64) {
        self.stale.remove(&change.key);
        match &change.value {
            Some(value) => {
                let entry = Entry { value: value.clone(), revision, lease };
                self.done.insert(change.key.clone(), entry);
            }
            None => {
                self.done.remove(&change.key);
            }
        }
    }

    /// The condition of a write did not hold: the snapshot is behind. The key waits until it has moved on.
    pub(super) fn conflict(&mut self, change: &Change) {
        self.stale.insert(change.key.clone(), self.seen);
    }

    /// Tries keys again that wait for a newer snapshot.
    pub(super) fn retry(&mut self) {
        self.stale.clear();
    }

    /// Keys that somebody else holds.
    pub(super) fn taken(&self) -> &BTreeSet<String> {
        &self.taken
    }

    /// What stands under a key as far as is known: the snapshot, unless this run has written since.
    fn known<'a>(&'a self, key: &str, snapshot: &'a Snapshot) -> Option<&'a Entry> {
        let own = self.done.get(key).filter(|own| own.revision > snapshot.revision);
        own.or_else(|| snapshot.entries.get(key))
    }

    fn waits(&self, key: &str, snapshot: &Snapshot) -> bool {
        self.stale.get(key) == Some(&snapshot.revision)
    }

    fn put(&mut self, key: &str, value: &str, snapshot: &Snapshot, lease: u64) -> Option<Change> {
        let known = self.known(key, snapshot);
        if let Some(entry) = known.filter(|e| e.lease == lease && e.value == value).cloned() {
            self.taken.remove(key);
            self.done.insert(key.to_owned(), entry);
            return None;
        }
        let ours = known.is_none_or(|entry| self.leases.contains(&entry.lease));
        let condition = self.done.contains_key(key).then(|| Condition {
            key: key.to_owned(),
            revision: known.map(|entry| entry.revision),
        });
        if condition.is_some() && !ours {
            self.taken.insert(key.to_owned());
            return None;
        }
        self.taken.remove(key);
        if condition.is_some() && self.waits(key, snapshot) {
            return None;
        }
        Some(Change { key: key.to_owned(), value: Some(value.to_owned()), condition })
    }

    fn remove(&mut self, key: &str, snapshot: &Snapshot) -> Option<Change> {
        self.taken.remove(key);
        let known = self.known(key, snapshot).filter(|entry| self.leases.contains(&entry.lease));
        let Some(revision) = known.map(|entry| entry.revision) else {
            self.done.remove(key);
            return None;
        };
        let condition = Some(Condition { key: key.to_owned(), revision: Some(revision) });
        let waits = self.waits(key, snapshot);
        (!waits).then(|| Change { key: key.to_owned(), value: None, condition })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "workers/1";

    fn wanted(value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(KEY.to_owned(), value.to_owned())])
    }

    /// A snapshot with the key as (value, revision, lease), if it is there.
    fn snapshot(revision: u64, entry: Option<(&str, u64, u64)>) -> Snapshot {
        let entries = entry.into_iter().map(|(value, revision, lease)| {
            (KEY.to_owned(), Entry { value: value.to_owned(), revision, lease })
        });
        Snapshot { revision, entries: entries.collect(), ..Snapshot::default() }
    }

    fn put(value: &str, condition: Option<Option<u64>>) -> Option<Change> {
        let condition = condition.map(|revision| Condition { key: KEY.to_owned(), revision });
        Some(Change { key: KEY.to_owned(), value: Some(value.to_owned()), condition })
    }

    fn removal(revision: u64) -> Option<Change> {
        let condition = Some(Condition { key: KEY.to_owned(), revision: Some(revision) });
        Some(Change { key: KEY.to_owned(), value: None, condition })
    }

    /// One that has written "a" at revision 5 on lease 1.
    fn written() -> Announcements {
        let mut own = Announcements::default();
        let first = own.next(&wanted("a"), &Snapshot::default(), 1);
        assert_eq!(first, put("a", None), "a run takes its keys, whatever it knows");
        own.written(&first.unwrap(), 1, 5);
        own
    }

    #[test]
    fn what_stands_is_not_written_again() {
        let mut own = written();
        assert_eq!(own.next(&wanted("a"), &Snapshot::default(), 1), None, "not seen yet");
        assert_eq!(own.next(&wanted("a"), &snapshot(6, Some(("a", 5, 1))), 1), None);
        let mut unsure = Announcements::default();
        unsure.next(&wanted("a"), &Snapshot::default(), 1);
        // The answer was lost, and the watch shows that it has happened.
        assert_eq!(unsure.next(&wanted("a"), &snapshot(5, Some(("a", 5, 1))), 1), None);
    }

    #[test]
    fn a_new_value_and_a_new_lease_are_written_over_what_is_known() {
        let mut own = written();
        assert_eq!(own.next(&wanted("b"), &snapshot(3, None), 1), put("b", Some(Some(5))));
        let seen = snapshot(6, Some(("a", 5, 1)));
        assert_eq!(own.next(&wanted("a"), &seen, 2), put("a", Some(Some(5))));
        assert_eq!(own.next(&wanted("a"), &snapshot(7, None), 2), put("a", Some(None)));
    }

    #[test]
    fn a_condition_that_does_not_hold_waits_for_news() {
        let mut own = written();
        let behind = snapshot(6, Some(("a", 5, 1)));
        let change = own.next(&wanted("a"), &behind, 2).unwrap();
        own.conflict(&change);
        assert_eq!(own.next(&wanted("a"), &behind, 2), None);
        assert_eq!(own.next(&wanted("a"), &snapshot(7, None), 2), put("a", Some(None)));
        own.conflict(&change);
        own.retry();
        assert_eq!(own.next(&wanted("a"), &snapshot(7, None), 2), put("a", Some(None)));
    }

    #[test]
    fn the_newer_run_keeps_a_key() {
        let mut own = written();
        let theirs = snapshot(9, Some(("x", 8, 77)));
        assert_eq!(own.next(&wanted("a"), &theirs, 1), None);
        assert!(own.taken().contains(KEY));
        assert_eq!(own.next(&wanted("a"), &theirs, 2), None, "nor with a new lease");
        assert_eq!(own.next(&wanted("a"), &snapshot(10, None), 2), put("a", Some(None)));
        assert!(own.taken().is_empty());
        assert_eq!(own.next(&BTreeMap::new(), &theirs, 2), None, "it is not ours to remove");
    }

    #[test]
    fn what_is_no_longer_wanted_is_removed() {
        let mut own = written();
        assert_eq!(own.next(&BTreeMap::new(), &snapshot(3, None), 1), removal(5));
        assert_eq!(own.next(&BTreeMap::new(), &snapshot(6, None), 1), None, "gone by itself");
        let mut own = written();
        let change = own.next(&BTreeMap::new(), &snapshot(6, Some(("a", 5, 1))), 2).unwrap();
        assert_eq!(Some(&change), removal(5).as_ref());
        own.written(&change, 2, 7);
        assert_eq!(own.next(&BTreeMap::new(), &snapshot(7, None), 2), None);
    }

    #[test]
    fn a_store_that_lost_its_data_is_filled_again() {
        let mut own = written();
        assert_eq!(own.next(&wanted("a"), &snapshot(6, Some(("a", 5, 1))), 1), None);
        assert_eq!(own.next(&wanted("a"), &snapshot(2, None), 1), put("a", Some(None)));
    }
}
