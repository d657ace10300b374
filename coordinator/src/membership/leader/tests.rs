use proptest::prelude::*;
use shimmer_proto::membership::{
    MembershipStore as _,
    memory::{MemoryCluster, MemoryStore, WriteFault},
    records::{COORDINATORS, CoordinatorRecord, DRAINS, WORKERS, WorkerRecord},
};

use super::*;
use crate::membership::view::{Greeting, LinkFacts};

const DIGEST: &str = "41aa";

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// A store, coordinators that ask their cores, and workers that are up or not.
struct World {
    store: MemoryCluster,
    now: Instant,
    coordinators: Vec<(Leader, MemoryStore)>,
    links: BTreeMap<String, LinkFacts>,
}

impl World {
    fn new(coordinators: usize, listed: Option<usize>) -> Self {
        let store = MemoryCluster::new(seconds(10));
        let of = |index: usize| {
            let config = LeaderConfig {
                id: format!("c{index}"),
                container_digest: DIGEST.to_owned(),
                layers: (0..2)
                    .map(|layer| PlacedLayer { layer, experts: 4, slab_bytes: 10 })
                    .collect(),
                copies: 2,
                listed,
                timings: Timings::default(),
            };
            (Leader::new(config), store.member())
        };
        let coordinators = (0..coordinators).map(of).collect();
        Self { store, now: Instant::now(), coordinators, links: BTreeMap::new() }
    }

    fn link(&mut self, id: &str, up: bool) {
        let absent = Candidate { id: id.to_owned(), weight: 1.0, ..Candidate::default() };
        let link = self.links.entry(id.to_owned()).or_insert(LinkFacts {
            address: format!("{id}:1"),
            greeting: Some(Greeting { candidate: absent, draining: false }),
            up,
            since: self.now,
            refused: None,
        });
        if link.up != up {
            (link.up, link.since) = (up, self.now);
        }
    }

    fn candidate(&mut self, id: &str) -> &mut Candidate {
        &mut self.links.get_mut(id).unwrap().greeting.as_mut().unwrap().candidate
    }

    fn view(&self, coordinator: usize) -> (View, Snapshot) {
        let snapshot = self.coordinators[coordinator].1.watch().borrow().clone();
        let links: Vec<_> = self.links.values().cloned().collect();
        (View::new(&snapshot, &links, DIGEST), snapshot)
    }

    /// Asks one coordinator once and carries out what it says.
    fn ask(&mut self, coordinator: usize) -> Decision {
        let (view, snapshot) = self.view(coordinator);
        let (leader, store) = &mut self.coordinators[coordinator];
        let decision = leader.decide(&view, &snapshot, self.now);
        if let Some(Duty::Campaign(write) | Duty::Propose { write, .. }) = &decision.duty {
            let outcome = store.write_now(&write.conditions, write.writes.clone());
            leader.settled(&outcome, self.now);
        }
        decision
    }

    /// Lets time pass in steps of 100 ms.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_millis(100);
            self.store.advance(Duration::from_millis(100));
            (0..self.coordinators.len()).for_each(|c| drop(self.ask(c)));
        }
    }

    fn record(&self) -> Option<PlacementRecord> {
        let snapshot = self.store.snapshot();
        Some(serde_json::from_str(&snapshot.entries.get(PLACEMENT)?.value).unwrap())
    }

    /// Generation and workers of the placement; 0 and nobody without one.
    fn placed(&self) -> (u64, Vec<String>) {
        self.record().map_or((0, Vec::new()), |record| (record.generation, record.workers))
    }

    fn write(&self, write: Write) {
        self.coordinators[0].1.write_now(&[], vec![write]).unwrap();
    }
}

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// One coordinator that has placed on these workers.
fn settled(workers: &[&str]) -> World {
    let mut world = World::new(1, None);
    workers.iter().for_each(|id| world.link(id, true));
    world.pass(seconds(3));
    assert_eq!(world.placed(), (1, ids(workers)));
    world
}

#[test]
fn a_list_is_placed_when_all_have_greeted() {
    let mut world = World::new(1, Some(2));
    world.link("a", true);
    world.pass(seconds(5));
    assert_eq!(world.placed(), (0, Vec::new()));
    world.link("b", true);
    world.pass(Duration::from_millis(100));
    assert_eq!(world.placed(), (1, ids(&["a", "b"])));
    assert_eq!(world.record().unwrap().reason, "first placement: a, b");
}

#[test]
fn a_list_is_placed_without_those_that_stay_away() {
    let mut world = World::new(1, Some(3));
    world.link("a", true);
    world.pass(seconds(9));
    assert_eq!(world.placed().0, 0);
    world.pass(seconds(2));
    assert_eq!(world.placed(), (1, ids(&["a"])));
}

#[test]
fn registered_workers_are_placed_when_no_more_come() {
    let mut world = World::new(1, None);
    for id in ["a", "b", "c"] {
        world.link(id, true);
        world.pass(Duration::from_millis(1500));
        assert_eq!(world.placed().0, 0, "{id}");
    }
    world.pass(seconds(1));
    assert_eq!(world.placed(), (1, ids(&["a", "b", "c"])));
}

#[test]
fn a_join_is_acted_on_soon_and_a_loss_late() {
    let mut world = settled(&["a", "b"]);
    world.link("c", true);
    world.pass(Duration::from_millis(900));
    assert_eq!(world.placed().0, 1);
    world.pass(Duration::from_millis(500));
    assert_eq!(world.placed(), (2, ids(&["a", "b", "c"])));
    world.link("a", false);
    world.pass(seconds(29));
    assert_eq!(world.placed().0, 2);
    // It was nearly too late, and nothing changes.
    world.link("a", true);
    world.pass(seconds(60));
    assert_eq!(world.placed().0, 2);
    world.link("a", false);
    world.pass(seconds(32));
    assert_eq!(world.placed(), (3, ids(&["b", "c"])));
    assert_eq!(world.record().unwrap().reason, "left: a");
}

/// A leader that has just been started, and a placement of workers that it never saw.
fn restarted(workers: &[&str]) -> World {
    let mut world = settled(workers);
    let (leader, _) = &world.coordinators[0];
    let config = leader.config.clone();
    world.coordinators[0].0 = Leader::new(config);
    world.links.clear();
    world
}

#[test]
fn a_join_does_not_wait_for_the_dead() {
    // Everything was stopped; other workers come.
    let mut world = restarted(&["a", "b"]);
    world.pass(seconds(2));
    ["c", "d"].iter().for_each(|id| world.link(id, true));
    world.pass(seconds(9));
    assert_eq!(world.placed().0, 1, "the others may come back");
    let hindrance = world.ask(0).hindrance;
    assert_eq!(hindrance.as_deref(), Some("worker a has not been seen here and may come back"));
    world.pass(seconds(2));
    assert_eq!(world.placed(), (2, ids(&["c", "d"])));
    assert_eq!(world.record().unwrap().reason, "joined: c, d; left: a, b");
}

#[test]
fn whom_a_new_leader_never_saw_is_waited_for_as_any_other() {
    let mut world = restarted(&["a", "b"]);
    world.link("a", true);
    world.pass(seconds(29));
    assert_eq!(world.placed().0, 1, "nobody else needs a placement");
    world.pass(seconds(3));
    assert_eq!(world.placed(), (2, ids(&["a"])));
    // It comes back in time.
    let mut world = restarted(&["a", "b"]);
    world.link("a", true);
    world.pass(seconds(20));
    world.link("b", true);
    world.pass(seconds(60));
    assert_eq!(world.placed().0, 1);
}

#[test]
fn a_leader_that_is_deposed_goes_on_counting_whom_it_misses() {
    let mut world = restarted(&["a", "b"]);
    world.link("a", true);
    for _ in 0..4 {
        world.pass(seconds(9));
        world.coordinators[0].1.expire_lease();
    }
    assert_eq!(world.placed(), (2, ids(&["a"])));
}

#[test]
fn a_worker_whose_lease_lasts_is_waited_for_longer() {
    let mut world = settled(&["a", "b"]);
    let worker = world.store.member();
    let record = WorkerRecord {
        address: "a:1".to_owned(),
        host: String::new(),
        weight: 1.0,
        ram_budget_bytes: 0,
        absent_layers: Vec::new(),
        container_digest: DIGEST.to_owned(),
        incarnation: 1,
        draining: false,
    };
    worker.announce(&format!("{WORKERS}a"), serde_json::to_string(&record).unwrap());
    world.link("a", false);
    world.pass(seconds(119));
    assert_eq!(world.placed().0, 1);
    world.pass(seconds(3));
    assert_eq!(world.placed(), (2, ids(&["b"])));
}

#[test]
fn a_drain_is_followed_unless_nobody_else_can() {
    let mut world = settled(&["a", "b"]);
    world.candidate("b").absent_layers = vec![1];
    world.pass(seconds(2));
    assert_eq!(world.record().unwrap().reason, "changed: b");
    world.write(Write::Put { key: format!("{DRAINS}a"), value: String::new() });
    world.pass(seconds(5));
    assert_eq!(world.placed(), (2, ids(&["a", "b"])));
    let decision = world.ask(0);
    assert_eq!(decision.hindrance.as_deref(), Some("no worker has the experts of layer 1"));
    world.link("c", true);
    world.pass(seconds(2));
    assert_eq!(world.placed(), (3, ids(&["b", "c"])));
    world.write(Write::Delete { key: format!("{DRAINS}a") });
    world.pass(seconds(2));
    assert_eq!(world.placed(), (4, ids(&["a", "b", "c"])));
}

#[test]
fn what_nobody_can_serve_is_not_proposed() {
    let mut world = settled(&["a"]);
    world.link("a", false);
    world.pass(seconds(100));
    assert_eq!(world.placed().0, 1);
}

#[test]
fn nothing_is_written_while_the_store_is_away() {
    let mut world = settled(&["a"]);
    world.store.stop();
    world.link("b", true);
    world.pass(seconds(3600));
    assert_eq!(world.ask(0).duty, None);
    world.store.start();
    world.pass(seconds(2));
    assert_eq!(world.placed(), (2, ids(&["a", "b"])));
}

#[test]
fn another_coordinator_takes_over_and_the_old_leader_writes_nothing() {
    let mut world = World::new(2, None);
    world.link("a", true);
    world.pass(seconds(3));
    let leads = |world: &World, c: usize| world.coordinators[c].0.leads(&world.view(c).0);
    assert!(leads(&world, 0) && !leads(&world, 1));
    // It is cut off without knowing, and goes on deciding on what it last saw.
    world.coordinators[0].1.hold_view();
    world.coordinators[0].1.expire_lease();
    world.pass(seconds(1));
    assert!(leads(&world, 1));
    world.link("b", true);
    world.pass(seconds(3));
    let record = world.record().unwrap();
    assert_eq!((record.leader.as_str(), record.generation), ("c1", 2));
    world.coordinators[0].1.release_view();
    world.pass(seconds(3));
    assert_eq!(world.placed().0, 2);
}

#[test]
fn a_store_that_lost_its_data_begins_above_what_is_served() {
    let mut world = settled(&["a"]);
    world.link("b", true);
    world.pass(seconds(2));
    assert_eq!(world.placed().0, 2);
    world.store.wipe();
    world.pass(seconds(20));
    assert_eq!(world.placed(), (3, ids(&["a", "b"])));
}

/// Generation of the placement, after coordinator 1 says that it follows such a one.
fn after_telling(world: &mut World, follows: u64) -> u64 {
    let record = CoordinatorRecord {
        address: String::new(),
        admin_address: String::new(),
        container_digest: DIGEST.to_owned(),
        incarnation: 1,
        in_force: 0,
        follows,
    };
    let value = serde_json::to_string(&record).unwrap();
    world.coordinators[1].1.announce(&format!("{COORDINATORS}c1"), value);
    world.pass(seconds(3));
    world.placed().0
}

#[test]
fn a_store_that_went_back_gets_a_placement_above_what_is_followed() {
    let mut world = World::new(2, None);
    world.link("a", true);
    world.pass(seconds(3));
    let backup = world.store.backup();
    world.link("b", true);
    world.pass(seconds(2));
    assert_eq!(world.placed(), (2, ids(&["a", "b"])));
    world.store.restore(&backup);
    assert_eq!(world.placed(), (1, ids(&["a"])));
    world.pass(seconds(3));
    assert_eq!(world.placed(), (3, ids(&["a", "b"])), "the leader knows of 2");
    // The same workers, and one of the coordinators follows more than this leader ever saw.
    assert_eq!(after_telling(&mut world, 3), 3, "it follows what stands there");
    assert_eq!(after_telling(&mut world, 9), 10);
    assert!(world.record().unwrap().reason.starts_with("the store went back, from generation 9"));
    assert_eq!(after_telling(&mut world, 10), 10);
}

#[test]
fn a_placement_of_another_container_is_replaced_from_the_start() {
    let mut world = settled(&["a"]);
    let mut record = world.record().unwrap();
    (record.generation, record.container_digest) = (8, "9f3c".to_owned());
    let value = serde_json::to_string(&record).unwrap();
    world.write(Write::Put { key: PLACEMENT.to_owned(), value });
    world.pass(seconds(3));
    assert_eq!(world.placed(), (9, ids(&["a"])));
    world.write(Write::Put { key: PLACEMENT.to_owned(), value: "{".to_owned() });
    world.pass(seconds(3));
    let decision = world.ask(0);
    assert_eq!(decision.duty, None);
    assert!(decision.hindrance.unwrap().starts_with("the record placement of"));
}

#[test]
fn a_rebalance_is_the_leaders() {
    let mut world = World::new(2, None);
    ["a", "b", "c"].iter().for_each(|id| world.link(id, true));
    world.pass(seconds(3));
    let (view, snapshot) = world.view(1);
    let error = world.coordinators[1].0.rebalance(&view, &snapshot, 5).unwrap_err();
    assert_eq!(error.to_string(), "coordinator c0 decides placements: ask there");
    let heat = "{\"layers\":[[0,[9.0,0.0,0.0,0.0]],[1,[9.0,0.0,0.0,0.0]]]}".to_owned();
    world.write(Write::Put { key: "heat/c1".to_owned(), value: heat });
    let (view, snapshot) = world.view(0);
    let (leader, store) = &mut world.coordinators[0];
    let plan = leader.rebalance(&view, &snapshot, 5).unwrap();
    assert_eq!(plan.record.generation, 2);
    assert!(plan.rebalance.imbalance_after <= plan.rebalance.imbalance_before);
    assert!(matches!(
        store.write_now(&plan.write.conditions, plan.write.writes),
        Ok(Written::Done(_))
    ));
    // The same workers: nothing is decided again.
    world.pass(seconds(10));
    assert_eq!(world.placed().0, 2);
    // Another one: what was moved stays.
    let moved = world.record().unwrap();
    world.link("d", true);
    world.pass(seconds(2));
    let after = world.record().unwrap();
    assert_eq!(after.generation, 3);
    for change in &plan.rebalance.moves {
        let copies = |record: &PlacementRecord| -> Vec<String> {
            let of = &record.layers[change.layer as usize].copies[change.expert as usize];
            of.iter().map(|&place| record.workers[usize::from(place)].clone()).collect()
        };
        assert_eq!(copies(&moved), copies(&after), "{change:?}");
    }
    assert!(!plan.rebalance.moves.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Members come and go, answers get lost, leases end, views stand still: generations grow by one, each write was made by
    /// who led, and in the end the placement is on those who are there.
    #[test]
    fn generations_grow_one_by_one(
        events in prop::collection::vec((0..8_usize, 0..3_usize, 0..4000_u64), 1..60),
    ) {
        let mut world = World::new(3, None);
        let mut last = 0;
        for (event, which, ms) in events {
            let id = ["a", "b", "c"][which];
            let store = &world.coordinators[which].1;
            match event {
                0 => world.link(id, true),
                1 => world.link(id, false),
                2 => store.expire_lease(),
                3 => store.fault_writes([[WriteFault::LoseAnswer, WriteFault::LoseRequest, WriteFault::Late][which]]),
                4 => store.hold_view(),
                5 => store.release_view(),
                6 => store.disconnect(),
                _ => {
                    store.reconnect();
                    store.release_writes();
                }
            }
            let end = world.now + Duration::from_millis(ms * 10);
            while world.now < end {
                world.pass(Duration::from_millis(500));
                let generation = world.placed().0;
                prop_assert!(generation == last || generation > last && generation <= last + 5);
                last = generation;
            }
        }
        for index in 0..3 {
            let store = &world.coordinators[index].1;
            store.release_view();
            store.reconnect();
            store.release_writes();
        }
        ["a", "b", "c"].iter().for_each(|id| world.link(id, true));
        world.pass(seconds(60));
        prop_assert_eq!(world.placed().1, ids(&["a", "b", "c"]));
    }
}
