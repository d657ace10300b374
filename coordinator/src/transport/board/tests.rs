//! Seats, greetings, placements and what the outside is told, without any link.

use std::collections::BTreeMap;

use shimmer_proto::{expert::v1::Identity, membership::Entry};

use super::*;
use crate::{
    placement::PlacedLayer,
    transport::{ClusterLayer, lane::Outlet, plans::Plan},
};

const EXPERTS: u32 = 8;

fn board(fixed: bool, own: &[u32]) -> Board {
    board_that_keeps(Duration::from_secs(30), fixed, own)
}

fn board_that_keeps(seats: Duration, fixed: bool, own: &[u32]) -> Board {
    let layer =
        ClusterLayer { layer: 1, slab_bytes: 4096, self_tests: vec![[0; 16]; EXPERTS as usize] };
    let model = ClusterModel {
        identity: Identity::default(),
        row_bytes: 68,
        hidden: 64,
        layers: vec![layer],
    };
    Board::new(&model, own, fixed, seats, Stage::Threads)
}

fn record(address: &str, draining: bool) -> String {
    let record = WorkerRecord {
        address: address.to_owned(),
        host: "h".to_owned(),
        weight: 1.0,
        ram_budget_bytes: 0,
        absent_layers: Vec::new(),
        container_digest: String::new(),
        incarnation: 1,
        draining,
    };
    serde_json::to_string(&record).unwrap()
}

fn snapshot(revision: u64, entries: &[(&str, String)]) -> Snapshot {
    let entry = |(key, value): &(&str, String)| {
        ((*key).to_owned(), Entry { value: value.clone(), revision, lease: 0 })
    };
    let entries: BTreeMap<String, Entry> = entries.iter().map(entry).collect();
    Snapshot { revision, entries, ..Snapshot::default() }
}

fn listed(count: u16) -> (Board, Vec<NewSeat>) {
    let board = board(true, &[]);
    let keys: Vec<(String, String)> = (0..count)
        .map(|i| (format!("workers/h{i}:7000"), record(&format!("h{i}:7000"), false)))
        .collect();
    let keys: Vec<(&str, String)> = keys.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
    let seats = board.follow(&snapshot(1, &keys));
    (board, seats)
}

fn hello(id: &str, weight: f64) -> WorkerHello {
    WorkerHello { worker_id: id.to_owned(), weight, ..WorkerHello::default() }
}

/// A placement on these seats, in force at once.
fn force(board: &Board, generation: u64, ids: &[&str]) {
    let candidate =
        |id: &&str| Candidate { id: (*id).to_owned(), weight: 1.0, ..Candidate::default() };
    let candidates: Vec<Candidate> = ids.iter().map(candidate).collect();
    let layers = [PlacedLayer { layer: 1, experts: EXPERTS, slab_bytes: 4096 }];
    let placement = Placement::compute(&layers, &candidates).unwrap();
    let ids: Vec<String> = ids.iter().map(|id| (*id).to_owned()).collect();
    let (seats, _) = board.seats_of(&ids).unwrap();
    let count = seats.iter().max().unwrap() + 1;
    let plan = Plan::new(generation, Arc::new(placement.reseated(&seats, count)));
    board.plan(|plans| {
        plans.prepare(plan);
        assert!(plans.offer(generation));
        assert!(plans.flip());
    });
}

fn serve(board: &Board, seat: &NewSeat, generation: u64) {
    let (requests, _queue) = tokio::sync::mpsc::channel(1);
    seat.lane.open(&Outlet { session: 1, requests, max_rows: 1 }, [generation, 0]);
    board.tell_ready(seat.worker, [generation, 0]);
    board.tell(seat.worker, LinkState::Serving, "");
}

fn states(board: &Board) -> Vec<String> {
    board.status().borrow().workers.iter().map(|worker| worker.state.clone()).collect()
}

fn hold(seat: &NewSeat) -> Option<LinkState> {
    seat.orders.borrow().hold.as_ref().map(|(state, _)| *state)
}

#[test]
fn hellos_that_do_not_fit_are_refused_by_name() {
    let (board, _) = listed(2);
    let greet = |seat, hello: &WorkerHello| board.greet(seat, 1, hello);
    greet(0, &hello("a", 1.0)).unwrap();
    assert!(greet(1, &hello("a", 1.0)).unwrap_err().contains("already used by h0:7000"));
    assert!(greet(1, &hello("b", 0.0)).unwrap_err().contains("worker b has weight 0"));
    assert!(greet(1, &hello("", 1.0)).unwrap_err().contains("is empty"));
    greet(1, &hello("b", 1.0)).unwrap();
}

#[test]
fn workers_of_a_list_may_swap_addresses() {
    let (board, _) = listed(2);
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    board.greet(1, 1, &hello("b", 1.0)).unwrap();
    board.tell_ended(0, LinkState::Lost, "");
    board.tell_ended(1, LinkState::Lost, "");
    board.greet(0, 2, &hello("b", 1.0)).unwrap();
    board.greet(1, 2, &hello("a", 1.0)).unwrap();
    let ids = ["a".to_owned(), "b".to_owned()];
    assert_eq!(board.seats_of(&ids).unwrap().0, [1, 0]);
}

#[test]
fn a_worker_that_is_registered_must_be_who_its_record_says() {
    let board = board(false, &[]);
    let seats = board.follow(&snapshot(1, &[("workers/a", record("x:1", false))]));
    assert_eq!(seats.len(), 1);
    let refusal = board.greet(0, 1, &hello("b", 1.0)).unwrap_err();
    assert!(refusal.contains("worker b answers at the address that worker a has"), "{refusal}");
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
}

#[test]
fn seats_follow_records_and_have_a_limit() {
    let board = board(false, &[]);
    let seats = board.follow(&snapshot(1, &[("workers/a", record("x:1", false))]));
    let orders = seats[0].orders.clone();
    assert_eq!(orders.borrow().address, Some("x:1".parse().unwrap()));
    let moved = [("workers/a", record("y:1", false)), ("workers/b", record("x:1", false))];
    let more = board.follow(&snapshot(2, &moved));
    assert_eq!(more.iter().map(|seat| seat.worker).collect::<Vec<_>>(), [1]);
    assert_eq!(orders.borrow().address, Some("y:1".parse().unwrap()));
    let broken = [("workers/a", "{".to_owned()), ("workers/c", record("no port", false))];
    assert!(board.follow(&snapshot(3, &broken)).is_empty(), "what cannot be read seats nobody");
    assert_eq!(board.roster().borrow().len(), 2);
    let many: Vec<(String, String)> =
        (0..MAX_WORKERS + 9).map(|i| (format!("workers/n{i}"), record("z:1", false))).collect();
    let many: Vec<(&str, String)> = many.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
    board.follow(&snapshot(4, &many));
    assert_eq!(board.roster().borrow().len(), MAX_WORKERS);
    assert!(board.seats_of(&["unknown".to_owned()]).is_none());
}

#[test]
fn a_worker_that_only_the_placement_names_has_a_seat_without_an_address() {
    let board = board(false, &[]);
    let (seats, made) = board.seats_of(&["a".to_owned()]).unwrap();
    assert_eq!((seats.as_slice(), made.len()), (&[0][..], 1));
    assert_eq!(made[0].orders.borrow().address, None);
    assert!(board.follow(&snapshot(1, &[("workers/a", record("x:1", false))])).is_empty());
    assert_eq!(made[0].orders.borrow().address, Some("x:1".parse().unwrap()));
}

#[test]
fn the_cluster_is_complete_when_somebody_can_compute_every_layer() {
    let (board, seats) = listed(2);
    let complete = || board.status().borrow().complete;
    board.greet(0, 1, &WorkerHello { absent_layers: vec![1], ..hello("a", 1.0) }).unwrap();
    board.greet(1, 1, &hello("b", 1.0)).unwrap();
    force(&board, 1, &["b"]);
    serve(&board, &seats[0], 1);
    assert!(!complete(), "a has no file of the layer");
    serve(&board, &seats[1], 1);
    board.tell_resident(1, 4, 16_384);
    assert!(complete());
    assert_eq!(board.status().borrow().workers[1].bytes, 16_384);
    seats[1].lane.shut();
    board.tell_ended(1, LinkState::Lost, "gone");
    assert!(!complete());
    assert_eq!(board.told(1), (LinkState::Lost, "gone".to_owned()));

    let own = super::tests::board(true, &[1]);
    force(&own, 1, &["a"]);
    assert!(own.status().borrow().complete, "the coordinator has a copy of its own");
}

#[test]
fn who_leaves_serves_until_others_have_its_experts() {
    let board = board(false, &[]);
    let registered =
        |draining| [("workers/a", record("x:1", draining)), ("workers/b", record("y:1", false))];
    let seats = board.follow(&snapshot(1, &registered(false)));
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    board.greet(1, 1, &hello("b", 1.0)).unwrap();
    force(&board, 1, &["a", "b"]);
    serve(&board, &seats[0], 1);
    serve(&board, &seats[1], 1);
    assert_eq!(states(&board), ["serving", "serving"]);
    board.follow(&snapshot(2, &registered(true)));
    assert_eq!(states(&board), ["draining", "serving"]);
    assert!(seats[0].lane.is_leaving() && hold(&seats[0]).is_none());
    force(&board, 2, &["b"]);
    assert_eq!(hold(&seats[0]), Some(LinkState::Draining));
    board.follow(&snapshot(3, &registered(false)));
    assert_eq!(hold(&seats[0]), None, "it is wanted again");

    // As an operator wants it.
    let mut entries = registered(false).to_vec();
    entries.push(("drains/a", String::new()));
    board.follow(&snapshot(4, &entries));
    assert_eq!(hold(&seats[0]), Some(LinkState::Draining));
}

#[test]
fn who_says_goodbye_may_come_back() {
    let (board, seats) = listed(2);
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    board.greet(1, 1, &hello("b", 1.0)).unwrap();
    force(&board, 1, &["a", "b"]);
    board.tell_leaving(0);
    assert!(board.facts().borrow()[0].leaving && hold(&seats[0]).is_none());
    force(&board, 2, &["b"]);
    assert_eq!(hold(&seats[0]), Some(LinkState::Draining));
    board.tell_ended(0, LinkState::Draining, "");
    assert!(board.facts().borrow()[0].leaving, "its experts are not kept for it");
    assert_eq!(hold(&seats[0]), None);
    board.greet(0, 2, &hello("a", 1.0)).unwrap();
    assert!(!board.facts().borrow()[0].leaving);
}

#[test]
fn who_says_goodbye_while_nothing_runs_is_let_go_at_once() {
    // The only worker of a list: nobody could take over.
    let (board, seats) = listed(1);
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    force(&board, 1, &["a"]);
    serve(&board, &seats[0], 1);
    board.set_running(true);
    board.tell_leaving(0);
    assert_eq!(hold(&seats[0]), None, "a request runs");
    board.set_running(false);
    assert_eq!(hold(&seats[0]), Some(LinkState::Left), "the request has ended");
    board.set_running(true);
    assert_eq!(hold(&seats[0]), None, "it has not gone yet, and is needed again");
    board.set_running(false);
    board.tell_ended(0, LinkState::Lost, "left");
    assert_eq!(hold(&seats[0]), None, "it is called back");
    board.greet(0, 2, &hello("a", 1.0)).unwrap();
    assert_eq!(hold(&seats[0]), None, "it is there again and stays");

    // Whoever only an operator wants to leave serves on until others have its experts.
    let board = super::tests::board(false, &[]);
    let both = [("workers/a", record("x:1", false)), ("workers/b", record("y:1", false))];
    let seats = board.follow(&snapshot(1, &both));
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    force(&board, 1, &["a", "b"]);
    board.set_running(false);
    let drained = [both.as_slice(), &[("drains/a", String::new())]].concat();
    board.follow(&snapshot(2, &drained));
    assert!(seats[0].lane.is_leaving() && hold(&seats[0]).is_none());
}

#[test]
fn a_record_is_complained_of_once_for_each_version() {
    let board = board(false, &[]);
    let told = |revision: u64| board.lock().unreadable.0.get("workers/a") == Some(&revision);
    let broken = |revision: u64| snapshot(revision, &[("workers/a", "{".to_owned())]);
    board.follow(&broken(1));
    assert!(told(1));
    assert!(!board.lock().unreadable.is_news("workers/a", 1), "the same once more");
    assert!(board.lock().unreadable.is_news("workers/a", 2), "another one");
    board.follow(&snapshot(3, &[]));
    assert!(!told(2) && board.lock().unreadable.is_news("workers/a", 2), "it was gone");
}

#[test]
fn a_quarantine_lasts_until_the_store_says_otherwise() {
    let board = board(false, &[]);
    let there = ("workers/a", record("x:1", false));
    let seats = board.follow(&snapshot(1, std::slice::from_ref(&there)));
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    board.quarantine(0, "expert 3 of layer 1");
    assert_eq!(states(&board), ["quarantined"]);
    assert_eq!(hold(&seats[0]), Some(LinkState::Quarantined));
    assert_eq!(board.unwritten_quarantines().len(), 1);
    board.follow(&snapshot(2, std::slice::from_ref(&there)));
    assert_eq!(hold(&seats[0]), Some(LinkState::Quarantined), "the store does not know yet");
    board.quarantine_written("a", 3);
    assert!(board.unwritten_quarantines().is_empty());
    let written = QuarantineRecord { reason: "r".to_owned(), coordinator: "c".to_owned() };
    let key = ("quarantines/a", serde_json::to_string(&written).unwrap());
    board.follow(&snapshot(3, &[there.clone(), key]));
    assert_eq!(board.status().borrow().workers[0].detail, "r");
    board.follow(&snapshot(4, std::slice::from_ref(&there)));
    assert_eq!(hold(&seats[0]), None, "readmitted");

    // Written and readmitted between two looks at the store.
    board.quarantine(0, "again");
    board.quarantine_written("a", 6);
    board.follow(&snapshot(5, std::slice::from_ref(&there)));
    assert!(hold(&seats[0]).is_some());
    board.follow(&snapshot(7, &[there]));
    assert_eq!(hold(&seats[0]), None);
}

#[test]
fn a_worker_without_record_and_experts_is_not_called() {
    let board = board(false, &[]);
    let both = [("workers/a", record("x:1", false)), ("workers/b", record("y:1", false))];
    let seats = board.follow(&snapshot(1, &both));
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    force(&board, 1, &["a"]);
    board.follow(&snapshot(2, &[]));
    assert_eq!(hold(&seats[0]), None, "the placement counts on it");
    assert_eq!(hold(&seats[1]), Some(LinkState::Lost));
    force(&board, 2, &["b"]);
    assert_eq!(hold(&seats[0]), None, "it keeps its link while it has one");
    board.tell_ended(0, LinkState::Lost, "gone");
    assert_eq!(hold(&seats[0]), Some(LinkState::Lost));
}

#[test]
fn who_said_goodbye_has_left_and_who_did_not_is_lost_for_a_while() {
    let mut board = board(false, &[]);
    let record_of = |id: &str, draining| (format!("workers/{id}"), record("x:1", draining));
    let follow = |board: &Board, revision, entries: &[(String, String)]| {
        let entries: Vec<(&str, String)> =
            entries.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        board.follow(&snapshot(revision, &entries));
    };
    let ids = ["stays", "told", "registered", "silent"];
    follow(&board, 1, &ids.map(|id| record_of(id, false)));
    let named: Vec<String> = board.roster().borrow().iter().map(|m| m.name.clone()).collect();
    let seat_of = |id: &str| named.iter().position(|name| name == id).unwrap();
    let [stays, told, registered, silent] = ids.map(seat_of);
    for seat in [stays, told, silent] {
        board.greet(seat, 1, &hello(&named[seat], 1.0)).unwrap();
    }
    force(&board, 1, &["stays"]);
    board.tell_leaving(told);
    // Another coordinator has the link to this one.
    follow(&board, 2, &ids.map(|id| record_of(id, id == "registered")));
    for seat in [told, silent] {
        board.tell_ended(seat, LinkState::Lost, "the worker ended the stream");
    }
    follow(&board, 3, &[record_of("stays", false)]);
    let of = |board: &Board| [told, registered, silent].map(|seat| states(board)[seat].clone());
    assert_eq!(of(&board), ["left", "left", "lost"]);
    assert!(board.due().is_some_and(|due| due > Instant::now() + LOST_FOR / 2));

    board.lost_for = Duration::ZERO;
    follow(&board, 4, &[record_of("stays", false)]);
    assert_eq!(of(&board), ["left", "left", "left"]);
    assert_eq!(board.due(), None);
    let detail = board.status().borrow().workers[silent].detail.clone();
    assert!(detail.contains("without goodbye"), "{detail}");

    // Whoever comes back is called again.
    follow(&board, 5, &ids.map(|id| record_of(id, false)));
    let holds = |id: &str| board.lock().seats[seat_of(id)].orders().borrow().hold.clone();
    assert_eq!(["told", "silent"].map(holds), [None, None]);
    board.greet(told, 2, &hello("told", 1.0)).unwrap();
    assert!(!board.facts().borrow()[told].leaving);
}

#[test]
fn a_refusal_is_remembered_while_the_worker_stays_as_it_is() {
    let (board, _) = listed(1);
    board.greet(0, 1, &hello("a", 1.0)).unwrap();
    board.tell_refused(0, "no room");
    board.tell_ended(0, LinkState::Refused, "no room");
    board.greet(0, 2, &hello("a", 1.0)).unwrap();
    let refused = || board.facts().borrow()[0].refused.clone();
    assert_eq!(refused().as_deref(), Some("no room"));
    board.greet(0, 3, &hello("a", 2.0)).unwrap();
    assert_eq!(refused(), None);
}

#[test]
fn two_hundred_workers_may_come_and_go() {
    let board = board_that_keeps(Duration::ZERO, false, &[]);
    let keep = ("workers/keep", record("k:1", false));
    let mut links = board.follow(&snapshot(1, std::slice::from_ref(&keep)));
    board.greet(0, 1, &hello("keep", 1.0)).unwrap();
    force(&board, 1, &["keep"]);
    for number in 0..200_u64 {
        let (id, address) = (format!("n{number}"), format!("n{number}:1"));
        let key = format!("workers/{id}");
        let there = [keep.clone(), (key.as_str(), record(&address, false))];
        links.extend(board.follow(&snapshot(2 * number + 2, &there)));
        let seat = board.seats_of(std::slice::from_ref(&id)).unwrap().0[0];
        assert_ne!(seat, 0, "the worker that stays keeps its seat");
        let orders = links[seat].orders.borrow().clone();
        assert_eq!(orders.address, Some(address.parse().unwrap()), "its link calls {id}");
        assert_eq!(orders.hold, None);
        assert_eq!(board.roster().borrow()[seat].name, id);
        board.greet(seat, number + 1, &hello(&id, 1.0)).unwrap();
        board.tell_ended(seat, LinkState::Lost, "gone");
        board.follow(&snapshot(2 * number + 3, std::slice::from_ref(&keep)));
    }
    let roster = board.roster().borrow().clone();
    assert_eq!((roster.len(), links.len()), (MAX_WORKERS, MAX_WORKERS));
    assert_eq!((roster[0].name.as_str(), roster[0].holder), ("keep", 0));
    let passed_on: u64 = roster.iter().map(|member| member.holder).sum();
    assert_eq!(passed_on, 201 - MAX_WORKERS as u64);
    // One that comes back is a worker like any other.
    let back = [keep.clone(), ("workers/n3", record("n3:2", false))];
    assert!(board.follow(&snapshot(500, &back)).is_empty());
    assert_eq!(board.roster().borrow().iter().filter(|member| member.name == "n3").count(), 1);
}

#[test]
fn a_seat_is_kept_for_whoever_somebody_counts_on() {
    let full = |seats_kept: Duration| {
        let board = board_that_keeps(seats_kept, false, &[]);
        let all: Vec<(String, String)> = (0..MAX_WORKERS)
            .map(|i| (format!("workers/n{i}"), record(&format!("n{i}:1"), false)))
            .collect();
        let all: Vec<(&str, String)> = all.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
        board.follow(&snapshot(1, &all));
        (
            board,
            all.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect::<Vec<_>>(),
        )
    };
    let comes = ("workers/new", record("n:1", false));
    let is_seated = |board: &Board| board.roster().borrow().iter().any(|m| m.name == "new");

    // All have records.
    let (board, all) = full(Duration::ZERO);
    let mut more: Vec<(&str, String)> = all.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
    more.push(comes.clone());
    board.follow(&snapshot(2, &more));
    assert!(!is_seated(&board));

    // Gone, but not for long: it is known when to look again.
    let (board, _) = full(Duration::from_secs(30));
    board.follow(&snapshot(2, &[]));
    assert_eq!(board.due(), None, "nobody waits for a seat");
    board.follow(&snapshot(3, std::slice::from_ref(&comes)));
    assert!(!is_seated(&board) && board.due().is_some_and(|due| due > Instant::now()));

    // Named by a placement, connected, or quarantined without the store's knowledge.
    let (board, _) = full(Duration::ZERO);
    let seated = board.roster().borrow().clone();
    let names: Vec<&str> =
        seated[..MAX_WORKERS - 2].iter().map(|member| member.name.as_str()).collect();
    force(&board, 1, &names);
    let (up, distrusted) = (MAX_WORKERS - 2, MAX_WORKERS - 1);
    board.greet(up, 1, &hello(&seated[up].name, 1.0)).unwrap();
    board.quarantine(distrusted, "lied");
    let placed = board.plans().borrow().clone();
    let holds_one = (0..up).filter(|&seat| placed.names(seat)).count();
    board.follow(&snapshot(2, &[]));
    board.follow(&snapshot(3, std::slice::from_ref(&comes)));
    // Workers beyond the number of experts hold none, and may go.
    assert_eq!(is_seated(&board), holds_one < up);
    let roster = board.roster().borrow().clone();
    assert!((0..up).filter(|&seat| placed.names(seat)).all(|seat| roster[seat].holder == 0));
    assert_eq!((roster[up].holder, roster[distrusted].holder), (0, 0));
}
