use std::{collections::BTreeMap, time::SystemTime};

use shimmer_proto::membership::{
    Entry, Outage, Snapshot, StoreError,
    fixed::FixedStore,
    records::{
        COORDINATORS, DRAINS, LEADER, LayerRecord, PLACEMENT, PlacementRecord, QUARANTINES, WORKERS,
    },
};

use super::status;

fn record() -> PlacementRecord {
    PlacementRecord {
        generation: 4,
        container_digest: "d".to_owned(),
        leader: "c".to_owned(),
        leader_revision: 1,
        reason: "test".to_owned(),
        workers: vec!["a".to_owned(), "b".to_owned()],
        layers: vec![LayerRecord { layer: 1, copies: vec![vec![0, 1], vec![1], vec![1, 0]] }],
    }
}

fn snapshot(entries: &[(&str, String)]) -> Snapshot {
    let entry = |value: &String| Entry { value: value.clone(), ..Entry::default() };
    let entries = entries.iter().map(|(key, value)| ((*key).to_owned(), entry(value))).collect();
    Snapshot { entries, ..Snapshot::default() }
}

#[test]
fn shares_count_first_and_further_copies() {
    let record = record();
    let shares = status::shares(Some(&record));
    assert_eq!(shares, BTreeMap::from([("a", (1, 1)), ("b", (2, 1))]));
    assert!(status::shares(None).is_empty());
}

#[test]
fn a_placement_that_cannot_be_read_is_said() {
    assert_eq!(status::placement(&Snapshot::default()), Ok(None));
    let good = serde_json::to_string(&record()).unwrap();
    assert_eq!(status::placement(&snapshot(&[(PLACEMENT, good)])), Ok(Some(record())));
    let error = status::placement(&snapshot(&[(PLACEMENT, "{}".to_owned())])).unwrap_err();
    assert!(error.contains("`placement` cannot be read"), "{error}");
}

#[test]
fn coordinators_are_those_that_registered_or_this_one() {
    let alone = status::coordinators(&snapshot(&[(LEADER, "me".to_owned())]), "me", 3);
    assert_eq!((alone.len(), &*alone[0].id, alone[0].leads), (1, "me", true));
    assert_eq!(alone[0].generation, 3);
    let key = format!("{COORDINATORS}other");
    let value = r#"{"address":"o:1","admin_address":"o:2","container_digest":"d","incarnation":1,"in_force":2,"follows":3}"#;
    let entries = [(LEADER, "other".to_owned()), (&*key, value.to_owned())];
    let all = status::coordinators(&snapshot(&entries), "me", 3);
    assert_eq!((all.len(), &*all[0].admin_endpoint, all[0].leads), (1, "o:2", true));
    assert_eq!(all[0].generation, 2, "what it says itself");
    assert_eq!(status::followed(&snapshot(&entries)), 3);
    assert_eq!(status::followed(&Snapshot::default()), 0);
}

#[test]
fn a_store_that_is_away_says_why() {
    let store = FixedStore::new(BTreeMap::new());
    let outage = Outage { cause: "connection refused".to_owned(), since: SystemTime::now() };
    let away = Snapshot { disconnected: Some(outage), ..Snapshot::default() };
    let told = status::store(&store, &away);
    assert!(!told.connected && told.detail.contains("connection refused"), "{told:?}");
    let told = status::store(&store, &Snapshot::default());
    assert!(told.connected && told.kind == "static", "{told:?}");
}

#[test]
fn orders_about_workers_that_have_gone_can_be_undone() {
    let [drain, quarantine, worker] =
        [DRAINS, QUARANTINES, WORKERS].map(|folder| format!("{folder}{}", &folder[..1]));
    let entries = [&drain, &quarantine, &worker].map(|key| (key.as_str(), String::new()));
    assert_eq!(status::ordered(&snapshot(&entries)), ["d", "q"]);
}

#[test]
fn an_order_without_an_answer_may_still_be_carried_out() {
    let error = StoreError::Unreachable {
        store: "http://e:2379".to_owned(),
        waited: std::time::Duration::from_secs(5),
        detail: "connection refused".to_owned(),
    };
    let told = status::uncertain(&error, "shimmer drain w3 --undo");
    for part in ["http://e:2379", "may take effect", "shimmer status", "`shimmer drain w3 --undo`"]
    {
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn a_leader_that_holds_no_lease_is_none() {
    let leased = |lease: u64| {
        let mut snapshot = snapshot(&[(LEADER, "x".to_owned())]);
        snapshot.entries.get_mut(LEADER).unwrap().lease = lease;
        snapshot
    };
    assert_eq!(status::told_leader(&leased(7)), "x");
    assert_eq!(status::told_leader(&Snapshot::default()), "");
    let told = status::told_leader(&leased(0));
    assert!(told.starts_with("unknown: somebody else wrote \"x\" under `leader`"), "{told}");
}
