//! Keys, revisions and leases as etcd has them, as a plain value: what the stores without an etcd are made of.

use std::collections::{BTreeMap, BTreeSet};

use super::{Condition, Entry, Write, Written};

/// The keys of one cluster.
#[derive(Debug, Clone, Default)]
pub(super) struct Model {
    revision: u64,
    entries: BTreeMap<String, Entry>,
    leases: u64,
}

impl Model {
    /// Revision of the last change; an empty store is at 1, as etcd's is.
    pub(super) fn revision(&self) -> u64 {
        self.revision.max(1)
    }

    pub(super) fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// A lease that no key hangs on yet.
    pub(super) fn grant(&mut self) -> u64 {
        self.leases += 1;
        self.leases
    }

    /// Removes every key of a lease. Whether there was one.
    pub(super) fn revoke(&mut self, lease: u64) -> bool {
        let held = self.entries.values().any(|entry| entry.lease == lease);
        if held {
            self.revision = self.revision() + 1;
            self.entries.retain(|_, entry| entry.lease != lease);
        }
        held
    }

    /// Applies all writes at one new revision if all conditions hold. Removing what is not there is no change.
    pub(super) fn apply(
        &mut self,
        lease: u64,
        conditions: &[Condition],
        writes: Vec<Write>,
    ) -> Written {
        let holds = |c: &Condition| self.entries.get(&c.key).map(|e| e.revision) == c.revision;
        if !conditions.iter().all(holds) {
            return Written::Conflict;
        }
        let revision = self.revision() + 1;
        let mut changed = false;
        for write in writes {
            let (key, value, lease) = match write {
                Write::Put { key, value } => (key, value, 0),
                Write::PutLeased { key, value } => (key, value, lease),
                Write::Delete { key } => {
                    changed |= self.entries.remove(&key).is_some();
                    continue;
                }
            };
            self.entries.insert(key, Entry { value, revision, lease });
            changed = true;
        }
        if changed {
            self.revision = revision;
        }
        Written::Done(self.revision())
    }

    /// Holds what it held at some time, revisions as well: a store that was restored from a backup. Gives the leases that
    /// keys hang on.
    pub(super) fn restore(&mut self, from: &Self) -> BTreeSet<u64> {
        self.entries.clone_from(&from.entries);
        self.revision = from.revision;
        self.entries.values().map(|entry| entry.lease).filter(|&lease| lease != 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str) -> Write {
        Write::Put { key: key.to_owned(), value: "v".to_owned() }
    }

    fn when(key: &str, revision: Option<u64>) -> Condition {
        Condition { key: key.to_owned(), revision }
    }

    fn check(conditions: &[Condition], writes: Vec<Write>, expected: Written, keys: &[&str]) {
        let mut model = Model::default();
        assert_eq!(model.apply(0, &[], vec![put("a"), put("b")]), Written::Done(2));
        assert_eq!(model.apply(0, conditions, writes), expected);
        assert_eq!(model.entries.keys().map(String::as_str).collect::<Vec<_>>(), keys);
    }

    #[test]
    fn all_conditions_or_nothing() {
        check(&[], vec![put("c")], Written::Done(3), &["a", "b", "c"]);
        check(&[when("a", Some(2))], vec![put("c")], Written::Done(3), &["a", "b", "c"]);
        check(&[when("a", Some(1))], vec![put("c")], Written::Conflict, &["a", "b"]);
        check(&[when("a", None)], vec![put("c")], Written::Conflict, &["a", "b"]);
        check(&[when("c", Some(2))], vec![put("c")], Written::Conflict, &["a", "b"]);
        let both = [when("a", Some(2)), when("c", Some(2))];
        check(&both, vec![put("c")], Written::Conflict, &["a", "b"]);
        let gone = Write::Delete { key: "x".to_owned() };
        check(&[when("c", None)], vec![gone], Written::Done(2), &["a", "b"]);
    }

    #[test]
    fn keys_go_with_their_lease() {
        let mut model = Model::default();
        let (one, two) = (model.grant(), model.grant());
        let leased = |key: &str| Write::PutLeased { key: key.to_owned(), value: String::new() };
        model.apply(one, &[], vec![leased("a"), leased("b")]);
        model.apply(two, &[], vec![leased("b"), put("c")]);
        assert!(model.revoke(one));
        assert!(!model.revoke(one));
        assert_eq!(model.entries.keys().map(String::as_str).collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(model.revision(), 4);
    }
}
