use super::*;

const TTL: Duration = Duration::from_secs(10);

fn cluster() -> (MemoryCluster, MemoryStore, MemoryStore) {
    let cluster = MemoryCluster::new(TTL);
    let (one, two) = (cluster.member(), cluster.member());
    one.announce("workers/1", "one".to_owned());
    two.announce("workers/2", "two".to_owned());
    (cluster, one, two)
}

fn keys(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.entries.keys().map(String::as_str).collect()
}

fn view(member: &MemoryStore) -> Snapshot {
    member.watch().borrow().clone()
}

fn put(key: &str) -> Vec<Write> {
    vec![Write::Put { key: key.to_owned(), value: String::new() }]
}

#[test]
fn a_member_that_is_cut_off_goes_with_its_lease_and_comes_back_with_its_announcements() {
    let (cluster, one, two) = cluster();
    cluster.advance(TTL * 3);
    assert_eq!(keys(&view(&two)), ["workers/1", "workers/2"]);
    let before = view(&one);
    one.disconnect();
    cluster.advance(TTL - Duration::from_millis(1));
    assert_eq!(keys(&view(&two)), ["workers/1", "workers/2"]);
    assert!(view(&one).owns("workers/1"));
    cluster.advance(Duration::from_millis(1));
    assert_eq!(keys(&view(&two)), ["workers/2"]);
    let during = view(&one);
    assert_eq!((during.entries.len(), during.lease), (2, 0), "it keeps its last view");
    let since = SystemTime::UNIX_EPOCH + TTL * 3;
    assert_eq!(during.disconnected.map(|outage| outage.since), Some(since));
    one.reconnect();
    assert_eq!(keys(&view(&two)), ["workers/1", "workers/2"]);
    let after = view(&one);
    assert!(after.disconnected.is_none() && after.owns("workers/1"));
    assert_ne!(after.lease, before.lease);
}

#[test]
fn a_short_cut_changes_nothing_but_what_was_withdrawn_meanwhile() {
    let (cluster, one, two) = cluster();
    one.announce("drains/1", String::new());
    one.disconnect();
    one.withdraw("drains/1");
    cluster.advance(TTL / 2);
    assert_eq!(keys(&view(&two)), ["drains/1", "workers/1", "workers/2"]);
    let before = view(&two).entries["workers/1"].clone();
    one.reconnect();
    assert_eq!(keys(&view(&two)), ["workers/1", "workers/2"]);
    assert_eq!(view(&two).entries["workers/1"], before);
}

#[test]
fn a_store_that_was_away_has_lost_nobody() {
    let (cluster, one, two) = cluster();
    let before = view(&one);
    cluster.stop();
    cluster.advance(TTL * 360);
    let during = view(&one);
    assert!(during.disconnected.is_some() && during.entries == before.entries);
    assert_eq!(during.lease, 0, "it cannot know whether it still has its lease");
    assert!(matches!(two.write_now(&[], put("a")), Err(StoreError::Unreachable { .. })));
    cluster.start();
    assert_eq!(view(&one), before);
}

#[test]
fn a_store_that_lost_its_data_is_filled_again() {
    let (cluster, one, two) = cluster();
    for _ in 0..9 {
        two.write_now(&[], put("placement")).unwrap();
    }
    let before = view(&one).revision;
    cluster.wipe();
    assert_eq!(keys(&view(&one)), ["workers/1", "workers/2"]);
    assert!(view(&one).revision < before);
}

#[test]
fn a_restored_store_is_what_it_was_and_is_filled_again() {
    let (cluster, one, two) = cluster();
    one.write_now(&[], put("kept")).unwrap();
    let backup = cluster.backup();
    let revision = view(&one).revision;
    two.expire_lease();
    one.write_now(&[], put("lost")).unwrap();
    one.fault_writes([WriteFault::Late]);
    assert!(one.write_now(&[], put("late")).is_err());
    drop(one);
    cluster.advance(TTL);
    assert_eq!(keys(&view(&two)), ["kept", "lost", "workers/2"]);
    cluster.restore(&backup);
    assert_eq!(keys(&view(&two)), ["kept", "workers/1", "workers/2"], "one was there then");
    assert_eq!(view(&two).entries["kept"].revision, revision);
    assert!(view(&two).owns("workers/2"), "announced again, on a lease that is there");
    cluster.advance(TTL);
    assert_eq!(keys(&view(&two)), ["kept", "workers/2"], "nobody renews the lease of the dead");
}

#[test]
fn an_expired_lease_is_replaced_at_once() {
    let (_cluster, one, two) = cluster();
    let before = view(&two).entries["workers/1"].clone();
    one.expire_lease();
    let after = view(&two).entries["workers/1"].clone();
    assert!(after.revision > before.revision && after.lease != before.lease);
}

#[test]
fn the_dead_are_forgotten() {
    let (cluster, one, two) = cluster();
    drop(one);
    assert_eq!(keys(&view(&two)), ["workers/1", "workers/2"]);
    cluster.advance(TTL);
    assert_eq!(keys(&view(&two)), ["workers/2"]);
    assert_eq!(cluster.shared.lock().members.len(), 1);
}

#[test]
fn each_fault_of_a_write() {
    let (cluster, one, two) = cluster();
    let holds = |key: &str| cluster.snapshot().entries.contains_key(key);
    one.fault_writes([WriteFault::LoseRequest, WriteFault::LoseAnswer, WriteFault::Late]);
    for key in ["lost", "answered", "late"] {
        assert!(matches!(one.write_now(&[], put(key)), Err(StoreError::Unreachable { .. })));
    }
    assert_eq!([holds("lost"), holds("answered"), holds("late")], [false, true, false]);
    let absent = view(&two).unchanged("late");
    one.release_writes();
    assert!(holds("late"));
    assert_eq!(two.write_now(&[absent], put("late")), Ok(Written::Conflict));
}

#[test]
fn a_blind_member_writes_under_conditions_that_no_longer_hold() {
    let (_cluster, one, two) = cluster();
    one.hold_view();
    two.write_now(&[], put("leader")).unwrap();
    let stale = view(&one).unchanged("leader");
    assert_eq!(one.write_now(&[stale], put("leader")), Ok(Written::Conflict));
    one.release_view();
    let fresh = view(&one).unchanged("leader");
    assert!(matches!(one.write_now(&[fresh], put("leader")), Ok(Written::Done(_))));
}

#[tokio::test]
async fn a_delayed_write_waits() {
    let (cluster, one, _two) = cluster();
    one.fault_writes([WriteFault::Delay]);
    let release = async {
        assert!(!cluster.snapshot().entries.contains_key("a"));
        one.release_writes();
    };
    let (written, ()) = tokio::join!(biased; one.write(vec![], put("a")), release);
    assert!(matches!(written, Ok(Written::Done(_))));
}
