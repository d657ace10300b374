use std::time::Duration;

use shimmer_proto::membership::{Entry, Outage};

use super::*;

const DIGEST: &str = "41aa";

fn worker(address: &str) -> WorkerRecord {
    WorkerRecord {
        address: address.to_owned(),
        host: "h1".to_owned(),
        weight: 2.0,
        ram_budget_bytes: 100,
        absent_layers: vec![3],
        container_digest: DIGEST.to_owned(),
        incarnation: 5,
        draining: false,
    }
}

fn snapshot(entries: &[(&str, String)]) -> Snapshot {
    let entry = |(key, value): &(&str, String)| {
        ((*key).to_owned(), Entry { value: value.clone(), revision: 9, lease: 4 })
    };
    Snapshot { revision: 9, entries: entries.iter().map(entry).collect(), ..Snapshot::default() }
}

fn json(record: &impl serde::Serialize) -> String {
    serde_json::to_string(record).unwrap()
}

fn link(id: &str, address: &str, up: bool, since: Instant) -> LinkFacts {
    let candidate = Candidate { id: id.to_owned(), weight: 1.0, ..Candidate::default() };
    let greeting = Some(Greeting { candidate, draining: false });
    LinkFacts { address: address.to_owned(), greeting, up, since, refused: None }
}

fn refusal(view: &View, id: &str) -> String {
    match &view.members[id].excluded {
        Some(Exclusion::Refused { reason } | Exclusion::Quarantined { reason }) => reason.clone(),
        other => panic!("{id}: {other:?}"),
    }
}

#[test]
fn lease_and_link_make_four_cases() {
    let now = Instant::now();
    let record = [("workers/w1", json(&worker("a:1")))];
    let (with, without) = (snapshot(&record), snapshot(&[]));
    let check = |snapshot: &Snapshot, links: &[LinkFacts], expected: Reach, placeable: bool| {
        let view = View::new(snapshot, links, DIGEST);
        let member = &view.members["w1"];
        assert_eq!((member.reach, member.is_placeable()), (expected, placeable));
    };
    let (up, down) = ([link("w1", "a:1", true, now)], [link("w1", "a:1", false, now)]);
    check(&with, &up, Reach::Up, true);
    check(&without, &up, Reach::Up, true);
    check(&with, &down, Reach::Awaited { since: Some(now) }, false);
    check(&with, &[], Reach::Awaited { since: None }, false);
    check(&without, &down, Reach::Gone { since: now }, false);
    assert!(View::new(&without, &[], DIGEST).members.is_empty());
}

#[test]
fn a_greeting_is_believed_before_a_record_until_the_link_ends() {
    let now = Instant::now();
    let moved = snapshot(&[("workers/w1", json(&worker("b:2")))]);
    let up = View::new(&moved, &[link("w1", "a:1", true, now)], DIGEST);
    assert_eq!((up.members["w1"].candidate.weight, up.members["w1"].incarnation), (1.0, Some(5)));
    let down = View::new(&moved, &[link("w1", "a:1", false, now)], DIGEST);
    let member = &down.members["w1"];
    assert_eq!((member.candidate.weight, member.address.as_str()), (2.0, "b:2"));
}

#[test]
fn the_first_of_two_with_one_id_stays() {
    let now = Instant::now();
    let later = now + Duration::from_secs(1);
    let links = [link("w1", "b:2", true, later), link("w1", "a:1", true, now)];
    let view = View::new(&snapshot(&[]), &links, DIGEST);
    assert_eq!(view.members["w1"].address, "a:1");
    assert_eq!(view.complaints, ["worker id w1 at b:2 is already used by a:1; ids must be unique"]);
    // One that is down gives way without a word.
    let links = [link("w1", "a:1", false, now), link("w1", "b:2", true, later)];
    let view = View::new(&snapshot(&[]), &links, DIGEST);
    assert_eq!((view.members["w1"].address.as_str(), view.complaints.len()), ("b:2", 0));
}

#[test]
fn another_container_is_refused_by_name() {
    let mut record = worker("a:1");
    record.container_digest = "9f3c".to_owned();
    let view = View::new(&snapshot(&[("workers/w2", json(&record))]), &[], DIGEST);
    assert_eq!(
        refusal(&view, "w2"),
        "worker w2 has container digest 9f3c, this cluster serves 41aa"
    );
}

#[test]
fn drains_and_quarantines_exclude() {
    let now = Instant::now();
    let links = [link("w1", "a:1", true, now), link("w2", "a:2", true, now)];
    let quarantine =
        QuarantineRecord { reason: "expert 3".to_owned(), coordinator: "c1".to_owned() };
    let view = View::new(
        &snapshot(&[
            ("drains/w1", String::new()),
            ("drains/nobody", String::new()),
            ("quarantines/w2", json(&quarantine)),
        ]),
        &links,
        DIGEST,
    );
    assert_eq!(view.members["w1"].excluded, Some(Exclusion::Draining { by_operator: true }));
    assert_eq!(refusal(&view, "w2"), "expert 3 (c1)");
    assert!(view.members.values().all(|member| !member.is_placeable()));
    // What cannot be read still says that somebody distrusts it.
    let view = View::new(&snapshot(&[("quarantines/w2", "{".to_owned())]), &links, DIGEST);
    assert!(refusal(&view, "w2").starts_with("the record quarantines/w2 cannot be read"));
    // A worker that says so itself.
    let mut leaving = links;
    leaving[0].greeting.as_mut().unwrap().draining = true;
    let view = View::new(&snapshot(&[]), &leaving, DIGEST);
    assert_eq!(view.members["w1"].excluded, Some(Exclusion::Draining { by_operator: false }));
}

#[test]
fn a_bad_record_spoils_nothing_but_itself() {
    let mut heavy = worker("a:1");
    heavy.weight = -1.0;
    let long = format!("workers/{}", "x".repeat(65));
    let view = View::new(
        &snapshot(&[
            ("workers/w0", "not json".to_owned()),
            ("workers/w1", json(&heavy)),
            ("workers/w2", json(&worker("a:2"))),
            (&long, json(&worker("a:3"))),
            ("coordinators/c1", "[]".to_owned()),
            ("heat/c1", "{\"layers\":3}".to_owned()),
            ("something/else", "?".to_owned()),
        ]),
        &[],
        DIGEST,
    );
    assert_eq!(view.members.keys().collect::<Vec<_>>(), ["w2"]);
    let starts: Vec<&str> = view.complaints.iter().map(|c| &c[..c.len().min(28)]).collect();
    assert_eq!(
        starts,
        [
            "the record coordinators/c1 c",
            "the record heat/c1 cannot be",
            "the record workers/w0 cannot",
            "worker w1 has weight -1, exp",
            "worker id xxxxxxxxxxxxxxxxxx",
        ]
    );
}

#[test]
fn the_store_says_who_leads_and_whether_it_is_there() {
    let mut snapshot = snapshot(&[("leader", "c1".to_owned())]);
    let view = View::new(&snapshot, &[], DIGEST);
    assert_eq!(
        (view.leader, view.leads, view.connected),
        (Some(("c1".to_owned(), 9)), false, true)
    );
    snapshot.lease = 4;
    snapshot.disconnected =
        Some(Outage { cause: "gone".to_owned(), since: std::time::SystemTime::UNIX_EPOCH });
    let view = View::new(&snapshot, &[], DIGEST);
    assert_eq!((view.leads, view.connected), (true, false));
}
