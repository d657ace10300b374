//! One set of tests for every kind of store.

use std::{collections::BTreeMap, sync::Arc, thread};

use shimmer_proto::membership::{
    MAX_WRITE_BYTES, MembershipStore, StoreError, Written,
    fixed::FixedStore,
    memory::{MemoryCluster, MemoryStore},
};
use shimmer_tests::etcd::{self, Etcd};

use super::{
    LEASE, absent, delete, done, member, put, put_leased, runtime, values, view, wait_for_view,
    write,
};

/// Makes members of one store.
trait Bench: Sync {
    fn member(&self) -> Arc<dyn MembershipStore>;

    /// Lets leases of members run out that are gone.
    fn pass_lease(&self) {}

    /// Whether several members can share it.
    fn is_shared(&self) -> bool {
        true
    }
}

struct Fixed;

impl Bench for Fixed {
    fn member(&self) -> Arc<dyn MembershipStore> {
        Arc::new(FixedStore::new(BTreeMap::new()))
    }

    fn is_shared(&self) -> bool {
        false
    }
}

struct Memory(MemoryCluster);

impl Bench for Memory {
    fn member(&self) -> Arc<dyn MembershipStore> {
        let member: MemoryStore = self.0.member();
        Arc::new(member)
    }

    fn pass_lease(&self) {
        self.0.advance(LEASE);
    }
}

struct Real(Etcd);

impl Bench for Real {
    fn member(&self) -> Arc<dyn MembershipStore> {
        let store = member(&self.0, rand_seed());
        wait_for_view("a first answer", &*store, |view| view.disconnected.is_none());
        store
    }
}

/// Different for every member of this process.
fn rand_seed() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static MADE: AtomicU64 = AtomicU64::new(0);
    MADE.fetch_add(1, Ordering::Relaxed)
}

/// Everything, on one store: each part has keys of its own.
fn check(bench: &dyn Bench) {
    conditions_hold_all_or_nothing(bench);
    a_write_is_seen_at_its_revision(bench);
    announcements_come_change_and_go(bench);
    what_no_store_takes_is_refused(bench);
    who_leaves_takes_what_was_leased(bench);
    if bench.is_shared() {
        one_of_many_becomes_leader(bench);
        the_dead_go_with_their_lease(bench);
        the_newer_run_keeps_a_key(bench);
    }
}

fn conditions_hold_all_or_nothing(bench: &dyn Bench) {
    let store = bench.member();
    let first = done(write(&*store, vec![absent("c/a")], vec![put("c/a", "1"), put("c/b", "1")]));
    assert_eq!(write(&*store, vec![absent("c/a")], vec![put("c/c", "1")]), Ok(Written::Conflict));
    let seen = wait_for_view("the first write", &*store, |view| view.revision >= first);
    let (a, b) = (seen.unchanged("c/a"), seen.unchanged("c/b"));
    assert_eq!((a.revision, b.revision), (Some(first), Some(first)), "one revision for all");
    let second = done(write(&*store, vec![a.clone(), b.clone()], vec![put("c/a", "2")]));
    assert!(second > first);
    assert_eq!(write(&*store, vec![b.clone(), a], vec![put("c/b", "2")]), Ok(Written::Conflict));
    done(write(&*store, vec![b, absent("c/x")], vec![delete("c/b"), delete("c/x")]));
    let seen = wait_for_view("the removal", &*store, |view| !view.entries.contains_key("c/b"));
    assert_eq!((seen.entries["c/a"].value.as_str(), seen.entries["c/a"].revision), ("2", second));
    assert_eq!(seen.unchanged("c/b").revision, None);
    assert!(!seen.entries.contains_key("c/c"));
}

fn a_write_is_seen_at_its_revision(bench: &dyn Bench) {
    let store = bench.member();
    let mut follower = store.watch();
    follower.mark_unchanged();
    let mut last = 0;
    for value in ["1", "2", "3"] {
        last = done(write(&*store, vec![], vec![put("s/a", value)]));
    }
    let seen = wait_for_view("the last write", &*store, |view| view.revision >= last);
    assert_eq!(seen.entries["s/a"].value, "3");
    assert!(follower.has_changed().unwrap());
    if bench.is_shared() {
        let other = bench.member();
        let seen = wait_for_view("it, elsewhere", &*other, |view| view.revision >= last);
        assert_eq!(seen.entries["s/a"].revision, last);
    }
}

fn announcements_come_change_and_go(bench: &dyn Bench) {
    let store = bench.member();
    let follower = if bench.is_shared() { bench.member() } else { Arc::clone(&store) };
    store.announce("workers/1", "one".to_owned());
    let has = |value: &'static str| {
        move |view: &_| values(view).get("workers/1").is_some_and(|found| *found == value)
    };
    let seen = wait_for_view("an announcement", &*follower, has("one"));
    assert_ne!(seen.entries["workers/1"].lease, 0);
    wait_for_view("its owner to know", &*store, |view| view.owns("workers/1"));
    if bench.is_shared() {
        assert!(!view(&*follower).owns("workers/1"));
    }
    store.announce("workers/1", "two".to_owned());
    wait_for_view("its change", &*follower, has("two"));
    store.withdraw("workers/1");
    wait_for_view("its end", &*follower, |view| !view.entries.contains_key("workers/1"));
    store.withdraw("workers/1");
    store.announce("workers/1", "three".to_owned());
    wait_for_view("its return", &*follower, has("three"));
    store.withdraw("workers/1");
    wait_for_view("its last end", &*follower, |view| !view.entries.contains_key("workers/1"));
}

fn what_no_store_takes_is_refused(bench: &dyn Bench) {
    let store = bench.member();
    let refused = |writes, part: &str| match write(&*store, vec![], writes) {
        Err(StoreError::Refused { detail, .. }) => assert!(detail.contains(part), "{detail}"),
        other => panic!("{other:?} instead of a refusal"),
    };
    refused(vec![put("r/a", "1"), delete("r/a")], "'r/a' is written twice");
    refused(vec![put("", "1")], "has 0 bytes");
    refused(vec![put(&"k".repeat(513), "1")], "has 513 bytes");
    refused((0..129).map(|n| put(&format!("r/{n}"), "1")).collect(), "129 changes");
    let half = "x".repeat(MAX_WRITE_BYTES / 2);
    refused(vec![put("r/a", &half), put("r/b", &half)], "under 'r/");
    // The largest that is allowed is taken, and read back.
    let largest = "x".repeat(MAX_WRITE_BYTES - "r/large".len());
    done(write(&*store, vec![], vec![put("r/large", &largest)]));
    let seen = wait_for_view("a large value", &*store, |view| view.entries.contains_key("r/large"));
    assert_eq!(seen.entries["r/large"].value.len(), largest.len());
    done(write(&*store, vec![], vec![delete("r/large")]));
    store.announce("r/huge", "x".repeat(MAX_WRITE_BYTES + 1));
    store.announce("r/small", "x".to_owned());
    let seen = wait_for_view("the one that fits", &*store, |view| view.owns("r/small"));
    assert!(!seen.entries.contains_key("r/huge"));
    store.withdraw("r/small");
}

fn who_leaves_takes_what_was_leased(bench: &dyn Bench) {
    let store = bench.member();
    let follower = if bench.is_shared() { bench.member() } else { Arc::clone(&store) };
    store.announce("l/announced", "1".to_owned());
    done(write(&*store, vec![], vec![put_leased("l/leased", "1"), put("l/kept", "1")]));
    wait_for_view("all three", &*follower, |view| {
        ["l/announced", "l/leased", "l/kept"].iter().all(|key| view.entries.contains_key(*key))
    });
    runtime().block_on(store.leave());
    let seen = wait_for_view("the rest", &*follower, |view| {
        !view.entries.contains_key("l/announced") && !view.entries.contains_key("l/leased")
    });
    assert!(seen.entries.contains_key("l/kept"));
}

fn one_of_many_becomes_leader(bench: &dyn Bench) {
    let members: Vec<_> = (0..4).map(|_| bench.member()).collect();
    let written: Vec<_> = thread::scope(|scope| {
        let campaigns: Vec<_> = members
            .iter()
            .map(|store| {
                scope.spawn(|| {
                    write(&**store, vec![absent("leader")], vec![put_leased("leader", "me")])
                })
            })
            .collect();
        campaigns.into_iter().map(|campaign| campaign.join().unwrap().unwrap()).collect()
    });
    let won: Vec<_> = written.iter().filter(|w| **w != Written::Conflict).collect();
    let [Written::Done(revision)] = won[..] else { panic!("{written:?}") };
    let winner = written.iter().position(|w| *w != Written::Conflict).unwrap();
    for (index, store) in members.iter().enumerate() {
        let seen = wait_for_view("the leader", &**store, |view| view.revision >= *revision);
        assert_eq!(seen.entries["leader"].revision, *revision);
        assert_eq!(seen.owns("leader"), index == winner, "equal values do not make a leader");
    }
    runtime().block_on(members[winner].leave());
    let other = &members[(winner + 1) % members.len()];
    wait_for_view("no leader", &**other, |view| !view.entries.contains_key("leader"));
    done(write(&**other, vec![absent("leader")], vec![put_leased("leader", "me")]));
    runtime().block_on(other.leave());
}

fn the_dead_go_with_their_lease(bench: &dyn Bench) {
    let follower = bench.member();
    let victim = bench.member();
    victim.announce("d/announced", "1".to_owned());
    done(write(&*victim, vec![], vec![put_leased("d/leased", "1")]));
    wait_for_view("the living", &*follower, |view| {
        view.entries.contains_key("d/announced") && view.entries.contains_key("d/leased")
    });
    drop(victim);
    assert!(view(&*follower).entries.contains_key("d/announced"), "nobody has left");
    bench.pass_lease();
    wait_for_view("its end", &*follower, |view| {
        !view.entries.contains_key("d/announced") && !view.entries.contains_key("d/leased")
    });
}

fn the_newer_run_keeps_a_key(bench: &dyn Bench) {
    let (older, newer) = (bench.member(), bench.member());
    older.announce("workers/n", "older".to_owned());
    wait_for_view("the older run", &*newer, |view| view.entries.contains_key("workers/n"));
    newer.announce("workers/n", "newer".to_owned());
    wait_for_view("the newer run", &*older, |view| {
        view.entries.get("workers/n").is_some_and(|entry| entry.value == "newer")
    });
    // Something else that the older one does reaches everybody, without its taking the key back.
    older.announce("n/other", "1".to_owned());
    wait_for_view("the older one's other key", &*newer, |view| {
        view.entries.contains_key("n/other")
    });
    older.announce("workers/n", "older again".to_owned());
    older.announce("n/last", "1".to_owned());
    let seen = wait_for_view("its last key", &*newer, |view| view.entries.contains_key("n/last"));
    assert!(seen.owns("workers/n") && seen.entries["workers/n"].value == "newer");
    runtime().block_on(newer.leave());
    wait_for_view("the older run again", &*older, |view| view.owns("workers/n"));
}

#[test]
fn the_static_list_keeps_the_promises() {
    check(&Fixed);
}

#[test]
fn the_store_in_memory_keeps_the_promises() {
    check(&Memory(MemoryCluster::new(LEASE)));
}

#[test]
fn one_node_of_etcd_keeps_the_promises() {
    if etcd::available() {
        check(&Real(Etcd::start(1)));
    }
}

#[test]
fn three_nodes_of_etcd_keep_the_promises() {
    if etcd::available() {
        check(&Real(Etcd::start(3)));
    }
}
