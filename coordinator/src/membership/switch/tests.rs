use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{
    heat::HeatMap,
    placement::{Candidate, PlacedLayer, PlacementInput},
};

const PATIENCE: Duration = Duration::from_secs(5);

/// A placement on some of the seats.
fn placed(generation: u64, seats: &[usize], copies: usize) -> Numbered {
    let named =
        |seat: &usize| Candidate { id: format!("w{seat}"), weight: 1.0, ..Candidate::default() };
    let candidates: Vec<_> = seats.iter().map(named).collect();
    let layers = [PlacedLayer { layer: 0, experts: 16, slab_bytes: 1 }];
    let heat = HeatMap::default();
    let input = PlacementInput { layers: &layers, candidates: &candidates, copies, heat: &heat };
    let placement = Placement::plan(&input).unwrap().reseated(seats, 4);
    Numbered { generation, placement: Arc::new(placement) }
}

fn assigned(actions: &[SwitchAction]) -> Vec<(usize, u64)> {
    let of = |action: &SwitchAction| match action {
        SwitchAction::Assign { worker, generation, .. } => Some((*worker, *generation)),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

/// Generation 1 in force on seats 0 and 1.
fn serving(now: Instant, copies: usize) -> Switch {
    let mut switch = Switch::new(PATIENCE);
    switch.connected(0);
    switch.connected(1);
    let actions = switch.new_record(placed(1, &[0, 1], copies), now);
    assert_eq!(assigned(&actions), [(0, 1), (1, 1)]);
    switch.ready(0, 1);
    assert_eq!(switch.step_boundary(now), []);
    switch.ready(1, 1);
    let released = |worker| SwitchAction::Release { worker, generation: 1 };
    let flip = SwitchAction::Flip { generation: 1 };
    assert_eq!(switch.step_boundary(now), [flip, released(0), released(1)]);
    assert!(switch.serves(0) && switch.serves(1));
    switch
}

#[test]
fn the_old_generation_serves_until_all_of_the_new_one_are_ready() {
    let now = Instant::now();
    let mut switch = serving(now, 1);
    switch.connected(2);
    assert_eq!(
        assigned(&switch.new_record(placed(2, &[0, 1, 2], 1), now)),
        [(0, 2), (1, 2), (2, 2)]
    );
    switch.ready(0, 2);
    switch.ready(1, 2);
    assert_eq!(switch.step_boundary(now + PATIENCE * 100), [], "worker 2 is loading");
    assert_eq!(switch.current().unwrap().generation, 1);
    switch.ready(2, 2);
    assert_eq!(switch.step_boundary(now)[0], SwitchAction::Flip { generation: 2 });
    assert!(switch.next().is_none() && switch.serves(2));
}

#[test]
fn a_newer_record_takes_the_place_of_one_that_is_being_prepared() {
    let now = Instant::now();
    let mut switch = serving(now, 1);
    switch.new_record(placed(2, &[0], 1), now);
    switch.new_record(placed(3, &[1], 1), now);
    assert_eq!(switch.new_record(placed(2, &[0], 1), now), [], "not newer");
    switch.ready(0, 2);
    switch.ready(1, 2);
    assert_eq!(switch.step_boundary(now), [], "ready for what is no longer wanted");
    switch.ready(1, 3);
    let actions = switch.step_boundary(now);
    assert_eq!(actions[0], SwitchAction::Flip { generation: 3 });
    assert_eq!(actions.len(), 3, "both may forget, also the one that has nothing to do");
}

#[test]
fn a_worker_that_is_away_is_waited_for_a_while() {
    let now = Instant::now();
    let mut switch = serving(now, 1);
    switch.new_record(placed(2, &[0, 1], 1), now);
    switch.away(1, now);
    assert_eq!(switch.due(), None, "worker 0 is loading, however long that takes");
    switch.ready(0, 2);
    assert_eq!(switch.due(), Some(now + PATIENCE));
    assert_eq!(switch.step_boundary(now + PATIENCE - Duration::from_millis(1)), []);
    assert_eq!(switch.step_boundary(now + PATIENCE)[0], SwitchAction::Flip { generation: 2 });
    // It returns, holds nothing, and gets what is in force.
    assert_eq!(assigned(&switch.connected(1)), [(1, 2)]);
    assert!(!switch.serves(1));
    switch.ready(1, 2);
    assert!(switch.serves(1));
}

#[test]
fn a_worker_whose_experts_have_other_copies_is_not_waited_for() {
    let now = Instant::now();
    let mut switch = serving(now, 2);
    switch.new_record(placed(2, &[0, 1], 2), now);
    switch.away(1, now);
    switch.ready(0, 2);
    assert_eq!(switch.step_boundary(now)[0], SwitchAction::Flip { generation: 2 });
}

#[test]
fn a_worker_that_stumbles_again_and_again_is_not_waited_for() {
    let now = Instant::now();
    let mut switch = serving(now, 1);
    switch.new_record(placed(2, &[0, 2], 1), now);
    switch.ready(0, 2);
    for _ in 0..STUMBLES_MAX {
        switch.connected(2);
        assert_eq!(switch.step_boundary(now), []);
        switch.away(2, now);
    }
    assert_eq!(switch.step_boundary(now), []);
    switch.connected(2);
    assert_eq!(switch.step_boundary(now)[0], SwitchAction::Flip { generation: 2 });
}

#[test]
fn a_worker_that_loads_what_is_overtaken_does_not_stumble() {
    let now = Instant::now();
    let mut switch = serving(now, 1);
    for generation in 2..2 + u64::from(STUMBLES_MAX) {
        switch.new_record(placed(generation, &[0, 2], 1), now);
        switch.connected(2);
        switch.ready(2, generation - 1);
        switch.away(2, now);
    }
    switch.ready(0, 1 + u64::from(STUMBLES_MAX));
    switch.connected(2);
    assert_eq!(switch.step_boundary(now), [], "it is waited for");
}

#[test]
fn every_connected_worker_is_assigned_something_even_nothing() {
    let now = Instant::now();
    let mut switch = Switch::new(PATIENCE);
    switch.connected(0);
    switch.connected(3);
    let actions = switch.new_record(placed(1, &[0], 1), now);
    let empty = SwitchAction::Assign { worker: 3, generation: 1, layers: Vec::new() };
    assert!(actions.contains(&empty), "it may have to stand in: {actions:?}");
}

#[derive(Debug, Clone)]
enum Event {
    Record(u64, Vec<usize>),
    Connected(usize),
    Away(usize),
    Ready(usize, u64),
    Boundary(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let seats = prop::collection::btree_set(0..4_usize, 1..4)
        .prop_map(|s: BTreeSet<_>| s.into_iter().collect());
    prop_oneof![
        (1..8_u64, seats).prop_map(|(generation, seats)| Event::Record(generation, seats)),
        (0..4_usize).prop_map(Event::Connected),
        (0..4_usize).prop_map(Event::Away),
        (0..4_usize, 1..8_u64).prop_map(|(worker, generation)| Event::Ready(worker, generation)),
        (0..4000_u64).prop_map(Event::Boundary),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever happens, generations only grow, a flip is to what was prepared, and a worker is said to serve only if it
    /// became ready in its present session.
    #[test]
    fn generations_never_go_back(events in prop::collection::vec(event(), 1..60)) {
        let mut now = Instant::now();
        let mut switch = Switch::new(PATIENCE);
        let mut ready: BTreeSet<(usize, u64)> = BTreeSet::new();
        let mut up: BTreeSet<usize> = BTreeSet::new();
        let mut in_force = 0;
        for event in events {
            match event {
                Event::Record(generation, seats) => {
                    for (worker, _) in assigned(&switch.new_record(placed(generation, &seats, 2), now)) {
                        prop_assert!(up.contains(&worker));
                    }
                }
                Event::Connected(worker) => {
                    up.insert(worker);
                    ready.retain(|(of, _)| *of != worker);
                    let given = assigned(&switch.connected(worker));
                    prop_assert!(in_force == 0 || given.contains(&(worker, in_force)));
                }
                Event::Away(worker) => {
                    up.remove(&worker);
                    ready.retain(|(of, _)| *of != worker);
                    switch.away(worker, now);
                }
                Event::Ready(worker, generation) => {
                    if up.contains(&worker) {
                        ready.insert((worker, generation));
                    }
                    switch.ready(worker, generation);
                }
                Event::Boundary(ms) => {
                    now += Duration::from_millis(ms);
                    let wanted = switch.next().map(|next| next.generation);
                    for action in switch.step_boundary(now) {
                        match action {
                            SwitchAction::Flip { generation } => {
                                prop_assert!(generation > in_force && Some(generation) == wanted);
                                in_force = generation;
                            }
                            SwitchAction::Release { worker, generation } => {
                                prop_assert!(up.contains(&worker) && generation == in_force);
                            }
                            SwitchAction::Assign { .. } => prop_assert!(false, "nothing is assigned here"),
                        }
                    }
                }
            }
            prop_assert_eq!(switch.current().map_or(0, |n| n.generation), in_force);
            // Whoever waits for that time finds that something happens then, and need not ask again and again.
            if let Some(due) = switch.due() {
                let mut later = switch.clone();
                prop_assert!(!later.step_boundary(due).is_empty() && later.due().is_none());
            }
            for worker in 0..4 {
                prop_assert!(!switch.serves(worker) || ready.contains(&(worker, in_force)));
            }
        }
        // Nothing is prepared for ever: everybody gone, and patience.
        (0..4).for_each(|worker| switch.away(worker, now));
        switch.step_boundary(now + PATIENCE);
        prop_assert!(switch.next().is_none());
    }
}
