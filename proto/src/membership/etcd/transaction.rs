//! Writes as transactions of etcd, and what their answers mean.

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse};

use super::watcher::number;
use crate::membership::{Condition, Write};

/// One write under conditions.
#[derive(Debug, Clone)]
pub(super) struct Transaction {
    conditions: Vec<(String, i64)>,
    changes: Vec<Change>,
}

#[derive(Debug, Clone)]
struct Change {
    key: String,
    /// None removes the key.
    value: Option<String>,
    lease: i64,
}

/// What stands under a changed key.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    value: Vec<u8>,
    revision: u64,
    lease: i64,
}

impl Transaction {
    /// `lease` is for the leased ones of the writes.
    pub(super) fn new(
        prefix: &str,
        conditions: &[Condition],
        writes: &[Write],
        lease: u64,
    ) -> Self {
        let lease = i64::try_from(lease).unwrap_or(0);
        let full = |key: &str| format!("{prefix}{key}");
        let conditions = conditions
            .iter()
            // Etcd compares a key that is not there as if its revision were 0.
            .map(|c| (full(&c.key), i64::try_from(c.revision.unwrap_or(0)).unwrap_or(i64::MAX)))
            .collect();
        let changes = writes
            .iter()
            .map(|write| {
                let (value, lease) = match write {
                    Write::Put { value, .. } => (Some(value.clone()), 0),
                    Write::PutLeased { value, .. } => (Some(value.clone()), lease),
                    Write::Delete { .. } => (None, 0),
                };
                Change { key: full(write.key()), value, lease }
            })
            .collect();
        Self { conditions, changes }
    }

    /// The request; `look` asks what stands there if the conditions do not hold.
    pub(super) fn request(&self, look: bool) -> Txn {
        let compares: Vec<Compare> = self
            .conditions
            .iter()
            .map(|(key, revision)| Compare::mod_revision(key.as_str(), CompareOp::Equal, *revision))
            .collect();
        let changes: Vec<TxnOp> = self
            .changes
            .iter()
            .map(|change| match &change.value {
                Some(value) => {
                    let options = PutOptions::new().with_lease(change.lease);
                    TxnOp::put(change.key.as_str(), value.as_str(), Some(options))
                }
                None => TxnOp::delete(change.key.as_str(), None),
            })
            .collect();
        let looks: Vec<TxnOp> = self
            .changes
            .iter()
            .filter(|_| look)
            .map(|change| TxnOp::get(change.key.as_str(), None))
            .collect();
        Txn::new().when(compares).and_then(changes).or_else(looks)
    }

    /// Whether the answer to a request that looked shows that an earlier try of the same write has happened: exactly what
    /// it would have written stands there, all of it at one revision, which is returned. Proof is a key that had another
    /// revision by the write's own conditions; without one the same value may have stood there before.
    pub(super) fn happened(&self, response: &TxnResponse) -> Option<u64> {
        let looks = response.op_responses();
        let found: Vec<Option<Found>> = looks
            .iter()
            .map(|look| match look {
                TxnOpResponse::Get(get) => get.kvs().first().map(|kv| Found {
                    value: kv.value().to_vec(),
                    revision: number(kv.mod_revision()),
                    lease: kv.lease(),
                }),
                _ => None,
            })
            .collect();
        self.matches(&found)
    }

    fn matches(&self, found: &[Option<Found>]) -> Option<u64> {
        if found.len() != self.changes.len() {
            return None;
        }
        let mut revision = None;
        for (change, found) in self.changes.iter().zip(found) {
            match (&change.value, found) {
                (None, None) => {}
                (Some(value), Some(found))
                    if found.value == value.as_bytes()
                        && found.lease == change.lease
                        && revision.is_none_or(|revision| revision == found.revision) =>
                {
                    revision = Some(found.revision);
                }
                _ => return None,
            }
        }
        // A removal leaves nothing behind that would tell who made it.
        let revision = revision?;
        let was_other = |(key, before): &(String, i64)| {
            let put = self.changes.iter().any(|c| c.value.is_some() && c.key == *key);
            put && number(*before) != revision
        };
        self.conditions.iter().any(was_other).then_some(revision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a write of "a" (it was at revision 4) and "b" and a removal of "c" makes of what stands there.
    fn check(found: &[Option<(&str, u64, i64)>], expected: Option<u64>) {
        let condition = Condition { key: "a".to_owned(), revision: Some(4) };
        let transaction = Transaction::new("/p/", &[condition], &writes(), 7);
        assert_eq!(transaction.matches(&stands(found)), expected);
    }

    fn writes() -> [Write; 3] {
        [
            Write::Put { key: "a".to_owned(), value: "1".to_owned() },
            Write::PutLeased { key: "b".to_owned(), value: "2".to_owned() },
            Write::Delete { key: "c".to_owned() },
        ]
    }

    fn stands(found: &[Option<(&str, u64, i64)>]) -> Vec<Option<Found>> {
        let found = found.iter().map(|found| {
            found.map(|(value, revision, lease)| Found { value: value.into(), revision, lease })
        });
        found.collect()
    }

    #[test]
    fn a_write_whose_answer_was_lost_is_recognised_by_what_stands_there() {
        check(&[Some(("1", 5, 0)), Some(("2", 5, 7)), None], Some(5));
        check(&[Some(("1", 5, 0)), Some(("2", 6, 7)), None], None);
        check(&[Some(("1", 5, 0)), Some(("2", 5, 8)), None], None);
        check(&[Some(("x", 5, 0)), Some(("2", 5, 7)), None], None);
        check(&[Some(("1", 5, 0)), Some(("2", 5, 7)), Some(("3", 4, 0))], None);
        check(&[None, Some(("2", 5, 7)), None], None);
        check(&[], None);
    }

    #[test]
    fn what_may_have_stood_there_before_proves_nothing() {
        check(&[Some(("1", 4, 0)), Some(("2", 4, 7)), None], None);
        let found = stands(&[Some(("1", 5, 0)), Some(("2", 5, 7)), None]);
        let other = Condition { key: "leader".to_owned(), revision: Some(3) };
        assert_eq!(Transaction::new("/p/", &[other], &writes(), 7).matches(&found), None);
        let removal = Write::Delete { key: "a".to_owned() };
        assert_eq!(Transaction::new("/p/", &[], &[removal], 0).matches(&[None]), None);
    }
}
