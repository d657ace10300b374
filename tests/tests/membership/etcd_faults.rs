//! A real etcd that loses its leader, its data or everybody's patience.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use shimmer_proto::membership::{
    MembershipStore, StoreError, Written,
    etcd::{EtcdConfig, EtcdStore},
};
use shimmer_tests::{
    etcd::{self, Etcd},
    wait::wait_until,
};

use super::{
    LEASE, absent, config, done, member, put, put_leased, runtime, values, view, wait_for_view,
    write,
};

/// Two members that have announced themselves and see each other.
fn pair(etcd: &Etcd) -> [Arc<EtcdStore>; 2] {
    let members = [member(etcd, 0), member(etcd, 1)];
    for (index, store) in members.iter().enumerate() {
        store.announce(&format!("workers/{index}"), format!("worker {index}"));
    }
    for store in &members {
        wait_for_view("both members", &**store, both);
    }
    members
}

fn both(view: &shimmer_proto::membership::Snapshot) -> bool {
    view.disconnected.is_none()
        && ["workers/0", "workers/1"].iter().all(|key| view.entries.contains_key(*key))
}

#[test]
fn a_killed_leader_costs_a_write_the_time_of_an_election() {
    if !etcd::available() {
        return;
    }
    let mut etcd = Etcd::start(3);
    let members = pair(&etcd);
    for round in 0..3 {
        let leader = etcd.leader();
        let held = view(&*members[0]).lease;
        etcd.kill(leader);
        let start = Instant::now();
        let key = format!("k/{round}");
        let revision = done(write(&*members[0], vec![absent(&key)], vec![put(&key, "1")]));
        println!("a write after the leader was killed: {} ms", start.elapsed().as_millis());
        let seen = wait_for_view("it", &*members[1], |view| view.revision >= revision);
        assert_eq!(seen.entries[&key].revision, revision);
        etcd.restart_all();
        // Nobody has lost a lease, and everybody is watching.
        let revision = done(write(&*members[1], vec![], vec![put_leased("k/after", "1")]));
        for store in &members {
            let seen =
                wait_for_view("both", &**store, |view| view.revision >= revision && both(view));
            assert!(seen.lease != 0);
        }
        assert_eq!(view(&*members[0]).lease, held);
    }
}

#[test]
fn a_node_that_hangs_is_left() {
    if !etcd::available() {
        return;
    }
    let mut etcd = Etcd::start(3);
    // The usual lease: a write has time for a try at the node that hangs, an election, and a busy machine.
    let lease = Duration::from_secs(10);
    let members = [0, 1].map(|seed| {
        let store = EtcdStore::start(EtcdConfig { lease, ..config(&etcd, seed) }).unwrap();
        store.announce(&format!("workers/{seed}"), "1".to_owned());
        store
    });
    for store in &members {
        wait_for_view("both members", store, both);
    }
    for node in 0..etcd.len() {
        etcd.signal(node, "STOP");
        let key = format!("h/{node}");
        let revision = done(write(&members[0], vec![], vec![put(&key, "1")]));
        for store in &members {
            wait_for_view("a write past a node that hangs", store, |view| {
                view.revision >= revision
            });
        }
        etcd.signal(node, "CONT");
        // The next one to hang must not be the second of three.
        etcd.wait_until_healthy();
    }
    for store in &members {
        wait_for_view("everybody", store, both);
    }
}

#[test]
fn an_etcd_that_is_away_changes_nothing_and_is_found_again() {
    if !etcd::available() {
        return;
    }
    let mut etcd = Etcd::start(3);
    let members = pair(&etcd);
    let before = view(&*members[0]);
    etcd.kill_all();
    let start = Instant::now();
    let away = wait_for_view("the outage", &*members[0], |view| view.disconnected.is_some());
    assert_eq!(away.entries, before.entries);
    let error = write(&*members[0], vec![], vec![put("a/x", "1")]).unwrap_err();
    let StoreError::Unreachable { waited, detail, .. } = &error else { panic!("{error}") };
    assert!(*waited < LEASE * 2, "{error}");
    assert!(detail.contains("onnection refused") || detail.contains("no answer"), "{error}");
    // Longer than every lease.
    let later = wait_for_view("its own lease to be in doubt", &*members[0], |view| view.lease == 0);
    assert_eq!(later.entries, before.entries);
    assert_eq!(later.disconnected.unwrap().since, away.disconnected.unwrap().since);
    while start.elapsed() < LEASE * 3 {
        assert_eq!(view(&*members[1]).entries.len(), before.entries.len());
        thread::sleep(Duration::from_millis(100));
    }
    members[0].announce("workers/late", "said while it was away".to_owned());
    etcd.restart_all();
    let back = Instant::now();
    for store in &members {
        wait_for_view("everybody again", &**store, |view| {
            both(view) && view.lease != 0 && view.entries.contains_key("workers/late")
        });
    }
    println!("everybody sees everybody {} ms after etcd was back", back.elapsed().as_millis());
    done(write(&*members[0], vec![], vec![put_leased("a/y", "1")]));
}

#[test]
fn a_member_that_starts_without_etcd_is_there_when_etcd_is() {
    if !etcd::available() {
        return;
    }
    let mut etcd = Etcd::start(1);
    etcd.kill(0);
    let store = member(&etcd, 0);
    store.announce("workers/0", "early".to_owned());
    let first = view(&*store);
    assert_eq!((first.revision, first.lease), (0, 0));
    assert!(first.disconnected.is_some());
    wait_for_view("a cause", &*store, |view| {
        view.disconnected.as_ref().is_some_and(|outage| outage.cause.contains("onnection refused"))
    });
    etcd.restart_all();
    wait_for_view("the announcement", &*store, |view| view.owns("workers/0"));
}

#[test]
fn compaction_while_a_member_is_cut_off_does_not_matter() {
    if !etcd::available() {
        return;
    }
    let etcd = Etcd::start(3);
    let reachable = member(&etcd, 0);
    // A member that knows one node only, which then hangs.
    let mut only = config(&etcd, 0);
    only.endpoints.truncate(1);
    let cut = EtcdStore::start(only).unwrap();
    cut.announce("workers/cut", "1".to_owned());
    wait_for_view("the member", &*reachable, |view| view.entries.contains_key("workers/cut"));
    etcd.signal(0, "STOP");
    wait_for_view("the outage", &cut, |view| view.disconnected.is_some());
    let mut last = 0;
    for round in 0..20 {
        last = done(write(&*reachable, vec![], vec![put("c/a", &round.to_string())]));
    }
    done(write(&*reachable, vec![], vec![super::delete("c/gone"), put("c/b", "1")]));
    etcd.ctl(&["compact", &last.to_string(), "--physical"]);
    wait_for_view("its lease to end", &*reachable, |view| {
        !view.entries.contains_key("workers/cut")
    });
    etcd.signal(0, "CONT");
    let seen = wait_for_view("what happened", &cut, |view| {
        view.disconnected.is_none() && view.revision >= last && view.owns("workers/cut")
    });
    assert_eq!(values(&seen)["c/a"], "19");
    wait_for_view("it, again", &*reachable, |view| view.entries.contains_key("workers/cut"));
}

#[test]
fn compaction_under_a_watch_does_not_matter() {
    if !etcd::available() {
        return;
    }
    let etcd = Etcd::start(1);
    let members = pair(&etcd);
    for round in 0..5 {
        let revision = done(write(&*members[0], vec![], vec![put("u/a", &round.to_string())]));
        etcd.ctl(&["compact", &revision.to_string(), "--physical"]);
    }
    let last = done(write(&*members[0], vec![], vec![put("u/b", "1")]));
    let seen = wait_for_view("the last write", &*members[1], |view| view.revision >= last);
    assert_eq!((values(&seen)["u/a"], values(&seen)["u/b"]), ("4", "1"));
}

#[test]
fn an_etcd_that_was_set_up_again_is_filled_again() {
    if !etcd::available() {
        return;
    }
    let mut etcd = Etcd::start(1);
    let members = pair(&etcd);
    for _ in 0..50 {
        done(write(&*members[0], vec![], vec![put("placement", "old")]));
    }
    let before = wait_for_view("the last write", &*members[1], |view| view.revision >= 50);
    etcd.wipe();
    etcd.restart_all();
    for store in &members {
        let seen = wait_for_view("everybody in a new store", &**store, |view| {
            view.revision < before.revision && both(view)
        });
        assert!(!seen.entries.contains_key("placement"));
    }
    done(write(&*members[0], vec![absent("placement")], vec![put("placement", "new")]));
}

#[test]
fn a_lease_that_somebody_revokes_is_replaced() {
    if !etcd::available() {
        return;
    }
    let etcd = Etcd::start(1);
    let members = pair(&etcd);
    let before = wait_for_view("the lease", &*members[0], |view| view.owns("workers/0"));
    etcd.ctl(&["lease", "revoke", &format!("{:x}", before.lease)]);
    let after = wait_for_view("another lease", &*members[0], |view| {
        view.owns("workers/0") && view.lease != before.lease
    });
    assert!(after.entries["workers/0"].revision > before.entries["workers/0"].revision);
    // A write finds out before the next renewal does.
    etcd.ctl(&["lease", "revoke", &format!("{:x}", after.lease)]);
    let revision =
        done(write(&*members[0], vec![absent("leader")], vec![put_leased("leader", "0")]));
    wait_for_view("its lease", &*members[0], |view| {
        view.revision >= revision && view.owns("leader")
    });
}

#[test]
fn a_key_that_somebody_removes_is_announced_again() {
    if !etcd::available() {
        return;
    }
    let etcd = Etcd::start(1);
    let members = pair(&etcd);
    let before = view(&*members[1]).entries["workers/0"].revision;
    etcd.ctl(&["del", "/shimmer/test/workers/0"]);
    wait_for_view("it again", &*members[1], |view| {
        view.entries.get("workers/0").is_some_and(|entry| entry.revision > before)
    });
    // What others write into the same etcd is not seen.
    etcd.ctl(&["put", "/shimmer/test2/workers/0", "x"]);
    etcd.ctl(&["put", "/shimmer/test/seen", "x"]);
    let seen = wait_for_view("a key", &*members[1], |view| view.entries.contains_key("seen"));
    assert_eq!(seen.entries.len(), 3, "{seen:?}");
}

#[test]
fn leaving_is_bounded_and_ends_the_thread() {
    if !etcd::available() {
        return;
    }
    let mut etcd = Etcd::start(1);
    let members = pair(&etcd);
    let start = Instant::now();
    runtime().block_on(members[0].leave());
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    wait_for_view("its end", &*members[1], |view| !view.entries.contains_key("workers/0"));
    assert!(matches!(
        write(&*members[0], vec![], vec![put("x", "1")]),
        Err(StoreError::Unreachable { .. })
    ));
    etcd.kill(0);
    let start = Instant::now();
    runtime().block_on(members[1].leave());
    assert!(start.elapsed() < LEASE, "{:?}", start.elapsed());
    let threads = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
            .filter(|name| name.trim() == "membership")
            .count()
    };
    let stopped = member(&etcd, 3);
    // A thread gives itself its name.
    wait_until("the thread to begin", Duration::from_secs(30), || threads() >= 1);
    drop(stopped);
    drop(members);
    // Under a runner with one process per test there are no others'.
    if std::env::var_os("NEXTEST").is_some() {
        assert_eq!(threads(), 0);
    }
}

#[test]
fn a_lost_answer_is_not_a_conflict() {
    if !etcd::available() {
        return;
    }
    // The node is stopped while writes are on their way: some happen, and their answers come after the try was given up.
    let etcd = Etcd::start(1);
    let store = member(&etcd, 0);
    wait_for_view("a first answer", &*store, |view| view.disconnected.is_none());
    for round in 0..10 {
        let key = format!("w/{round}");
        let written = thread::scope(|scope| {
            let writing =
                scope.spawn(|| write(&*store, vec![absent(&key)], vec![put(&key, "mine")]));
            thread::sleep(Duration::from_micros(200 * round));
            etcd.signal(0, "STOP");
            thread::sleep(Duration::from_millis(700));
            etcd.signal(0, "CONT");
            writing.join().unwrap()
        });
        let Ok(Written::Done(revision)) = written else { panic!("round {round}: {written:?}") };
        let seen = wait_for_view("it", &*store, |view| view.revision >= revision);
        assert_eq!((values(&seen)[key.as_str()], seen.entries[&key].revision), ("mine", revision));
    }
}
