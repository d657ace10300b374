use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

fn layer(experts: u32, slots: usize, rules: Rules) -> LayerResidency<usize> {
    let mut layer = LayerResidency::new(experts, rules);
    layer.attach(0..slots);
    (0..experts).for_each(|expert| layer.claim(expert));
    layer
}

fn lfru() -> Rules {
    Rules { policy: Policy::Lfru, guard: true }
}

/// One work on some experts, each loaded when it is not there.
fn work(layer: &mut LayerResidency<usize>, experts: &[u32]) -> Vec<Option<u32>> {
    layer.begin_work(experts);
    let evicted = experts.iter().filter_map(|&expert| match layer.demand(expert) {
        Demand::Hit(grant) => {
            layer.release(grant);
            None
        }
        Demand::Load(Load { ticket, memory, evicted }) => {
            assert_eq!(layer.complete(ticket, memory), (expert, Origin::Demand));
            let Demand::Hit(grant) = layer.demand(expert) else { panic!("it was just loaded") };
            layer.release(grant);
            Some(evicted)
        }
        other => panic!("{other:?}"),
    });
    let evicted = evicted.collect();
    layer.end_work();
    evicted
}

fn loaded_by_prefetch(layer: &mut LayerResidency<usize>, expert: u32) -> Result<Option<u32>, Skip> {
    layer.prefetch(expert).map(|Load { ticket, memory, evicted }| {
        layer.complete(ticket, memory);
        evicted
    })
}

#[test]
fn a_slot_goes_through_its_states() {
    let mut layer = layer(4, 1, Rules::default());
    layer.begin_work(&[0]);
    let Demand::Load(load) = layer.demand(0) else { panic!("nothing is resident") };
    assert_eq!(load.evicted, None);
    assert!(matches!(layer.demand(0), Demand::Loading(Origin::Demand)));
    assert!(matches!(layer.demand(1), Demand::Full));
    assert!(!layer.is_resident(0));
    layer.complete(load.ticket, load.memory);
    let Demand::Hit(grant) = layer.demand(0) else { panic!("it is resident") };
    assert!(!grant.pinned && !grant.prefetched);
    assert!(matches!(layer.demand(1), Demand::Full), "a leased slot is not a victim");
    layer.release(grant);
    let Demand::Load(load) = layer.demand(1) else { panic!("the slot is idle") };
    assert_eq!(load.evicted, Some(0));
    assert!(!layer.is_resident(0) && !layer.is_resident(1));
}

#[test]
fn a_failed_load_gives_its_slot_to_the_next() {
    let mut layer = layer(4, 2, Rules::default());
    let Demand::Load(load) = layer.demand(3) else { panic!("nothing is resident") };
    let memory = load.memory;
    assert_eq!(layer.fail(load.ticket, load.memory), (3, Origin::Demand));
    assert_eq!(layer.counts(), SlotCounts { cap: 2, free: 2, ..SlotCounts::default() });
    let Demand::Load(load) = layer.demand(2) else { panic!("nothing is resident") };
    assert_eq!(load.memory, memory);
}

#[test]
#[should_panic(expected = "a load ends once")]
fn a_load_does_not_end_twice() {
    let mut layer = layer(4, 1, Rules::default());
    let Demand::Load(load) = layer.demand(3) else { panic!("nothing is resident") };
    let ticket = Ticket::from_bits(load.ticket.to_bits());
    layer.complete(load.ticket, load.memory);
    layer.complete(ticket, 0);
}

#[test]
fn lru_evicts_the_oldest_and_lfru_the_least_used() {
    for (rules, evicted) in [(Rules::default(), 0), (lfru(), 1)] {
        let mut layer = layer(4, 2, rules);
        for _ in 0..3 {
            work(&mut layer, &[0]);
        }
        work(&mut layer, &[1]);
        assert_eq!(work(&mut layer, &[2]), [Some(evicted)], "{rules:?}");
    }
}

#[test]
fn pinned_and_unclaimed_experts() {
    let mut layer = layer(4, 2, Rules::default());
    work(&mut layer, &[0, 1]);
    assert!(layer.set_pinned(0, true));
    assert!(!layer.set_pinned(3, true), "only what is resident is pinned");
    assert_eq!(work(&mut layer, &[2]), [Some(1)]);
    layer.unclaim(0);
    assert_eq!(layer.counts().pinned, 0);
    assert_eq!(work(&mut layer, &[3]), [Some(0)], "nobody claims it");
    assert!(layer.place(1).is_none(), "an assignment does not evict what others claim");
    layer.unclaim(2);
    assert_eq!(layer.place(1).expect("nobody claims 2").evicted, Some(2));
}

#[test]
fn prefetch_is_kept_out_while_a_layer_is_worked_on() {
    let mut layer = layer(4, 2, Rules::default());
    let early = layer.prefetch(1).expect("there is room");
    assert_eq!(layer.prefetch(1).unwrap_err(), Skip::Duplicate);
    layer.begin_work(&[1]);
    assert_eq!(layer.prefetch(2).unwrap_err(), Skip::LayerStarted);
    assert!(matches!(layer.demand(1), Demand::Loading(Origin::Prefetch)));
    layer.complete(early.ticket, early.memory);
    let Demand::Hit(grant) = layer.demand(1) else { panic!("it is resident") };
    assert!(grant.prefetched);
    layer.release(grant);
    let Demand::Hit(grant) = layer.demand(1) else { panic!("it is resident") };
    assert!(!grant.prefetched, "only the first use");
    layer.release(grant);
    layer.end_work();
    assert_eq!(loaded_by_prefetch(&mut layer, 2), Ok(None));
}

#[test]
fn the_guard_spares_what_is_clearly_hotter() {
    for guard in [true, false] {
        let mut layer = layer(6, 2, Rules { policy: Policy::Lru, guard });
        for _ in 0..8 {
            work(&mut layer, &[0, 1]);
        }
        let expected = if guard { Err(Skip::Guard) } else { Ok(Some(0)) };
        assert_eq!(loaded_by_prefetch(&mut layer, 2), expected, "guard {guard}");
    }
    let mut layer = layer(6, 2, Rules::default());
    work(&mut layer, &[0, 1]);
    assert_eq!(loaded_by_prefetch(&mut layer, 2), Ok(Some(0)), "one use is not warm");
    assert_eq!(loaded_by_prefetch(&mut layer, 3), Ok(Some(1)));
    assert_eq!(
        loaded_by_prefetch(&mut layer, 4),
        Err(Skip::NoRoom),
        "hints for one work do not evict each other"
    );
    work(&mut layer, &[0]);
    assert!(loaded_by_prefetch(&mut layer, 4).is_ok(), "the next work's do");
}

#[test]
fn shrinking_takes_idle_slots_and_obeys_the_cap() {
    let mut layer = layer(8, 4, Rules::default());
    work(&mut layer, &[0, 1, 2]);
    layer.set_pinned(0, true);
    let Demand::Hit(grant) = layer.demand(1) else { panic!("it is resident") };
    assert_eq!(layer.shrink(1).len(), 2, "the free one and the idle one");
    assert_eq!((layer.attached(), layer.cap()), (2, 1));
    layer.release(grant);
    assert_eq!(layer.shrink(1).len(), 1);
    assert_eq!(layer.counts(), SlotCounts { cap: 1, resident: 1, pinned: 1, ..Default::default() });
    assert!(matches!(layer.demand(5), Demand::Full), "all that is left is pinned");
    layer.attach([7]);
    assert_eq!(layer.cap(), 2);
    assert!(matches!(layer.demand(5), Demand::Load(Load { memory: 7, .. })));
}

#[test]
fn re_pin_moves_the_flag_by_a_clear_margin_only() {
    let mut layer = layer(8, 4, Rules::default());
    work(&mut layer, &[0, 1]);
    layer.set_pinned(0, true);
    layer.set_pinned(1, true);
    for _ in 0..4 {
        work(&mut layer, &[2]);
    }
    assert_eq!(layer.re_pin(4), []);
    for _ in 0..4 {
        work(&mut layer, &[2, 3]);
    }
    assert_eq!(layer.re_pin(1), [RePin { pinned: 2, released: 0 }]);
    assert_eq!(layer.re_pin(4), []);
    assert_eq!(layer.counts().pinned, 2);
    assert_eq!(layer.uses()[2], 8);
}

/// What may happen to a layer.
#[derive(Debug, Clone)]
enum Step {
    Demand(u32),
    Prefetch(u32),
    Place(u32),
    EndLoad { ok: bool },
    Release,
    Begin(u32),
    End,
    Shrink(usize),
    Attach,
    Pin(u32, bool),
    RePin,
    Claim(u32),
    Unclaim(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let expert = 0_u32..6;
    prop_oneof![
        6 => expert.clone().prop_map(Step::Demand),
        4 => expert.clone().prop_map(Step::Prefetch),
        1 => expert.clone().prop_map(Step::Place),
        6 => any::<bool>().prop_map(|ok| Step::EndLoad { ok }),
        4 => Just(Step::Release),
        2 => expert.clone().prop_map(Step::Begin),
        2 => Just(Step::End),
        1 => (0_usize..5).prop_map(Step::Shrink),
        1 => Just(Step::Attach),
        2 => (expert.clone(), any::<bool>()).prop_map(|(expert, pinned)| Step::Pin(expert, pinned)),
        1 => Just(Step::RePin),
        1 => expert.clone().prop_map(Step::Claim),
        1 => expert.prop_map(Step::Unclaim),
    ]
}

proptest! {
    /// Whatever the order of events: no memory is lost or seen twice, no expert is in two slots, counts add up.
    #[test]
    fn memory_is_neither_lost_nor_shared(steps in prop::collection::vec(step(), 1..200), lfru in any::<bool>()) {
        let policy = if lfru { Policy::Lfru } else { Policy::Lru };
        let mut layer = layer(6, 3, Rules { policy, guard: lfru });
        let (mut loads, mut grants, mut outside) = (VecDeque::new(), VecDeque::new(), Vec::new());
        let (mut running, mut claims) = (0, [1_u32; 6]);
        for step in steps {
            match step {
                Step::Demand(expert) => match layer.demand(expert) {
                    Demand::Hit(grant) => grants.push_back((expert, grant)),
                    Demand::Load(load) => loads.push_back((expert, load)),
                    Demand::Loading(_) => prop_assert!(loads.iter().any(|(e, _)| *e == expert)),
                    Demand::Full => {}
                },
                Step::Prefetch(expert) => match layer.prefetch(expert) {
                    Ok(load) => {
                        prop_assert_eq!(running, 0);
                        loads.push_back((expert, load));
                    }
                    Err(skip) => prop_assert!(skip != Skip::LayerStarted || running > 0),
                },
                Step::Place(expert) => loads.extend(layer.place(expert).map(|load| (expert, load))),
                Step::EndLoad { ok } => {
                    let Some((expert, Load { ticket, memory, .. })) = loads.pop_front() else { continue };
                    let ended = if ok { layer.complete(ticket, memory) } else { layer.fail(ticket, memory) };
                    prop_assert_eq!(ended.0, expert);
                    prop_assert_eq!(layer.is_resident(expert), ok);
                }
                Step::Release => {
                    if let Some((_, grant)) = grants.pop_front() {
                        layer.release(grant);
                    }
                }
                Step::Begin(expert) => {
                    running += 1;
                    layer.begin_work(&[expert]);
                }
                Step::End if running > 0 => {
                    running -= 1;
                    layer.end_work();
                }
                Step::End => {}
                Step::Shrink(cap) => outside.extend(layer.shrink(cap)),
                Step::Attach => layer.attach(outside.pop()),
                Step::Pin(expert, pinned) => {
                    let resident = layer.is_resident(expert);
                    prop_assert_eq!(layer.set_pinned(expert, pinned), resident);
                }
                Step::RePin => {
                    let before = layer.counts().pinned;
                    layer.re_pin(2);
                    prop_assert_eq!(layer.counts().pinned, before);
                }
                Step::Claim(expert) => {
                    claims[expert as usize] += 1;
                    layer.claim(expert);
                }
                Step::Unclaim(expert) if claims[expert as usize] > 0 => {
                    claims[expert as usize] -= 1;
                    layer.unclaim(expert);
                }
                Step::Unclaim(_) => {}
            }
            for (expert, grant) in &grants {
                prop_assert!(layer.is_resident(*expert), "expert {} is leased", expert);
                prop_assert_eq!(&*layer.resident(*expert).unwrap().memory, &*grant.memory);
            }
            let mut memories: Vec<usize> = outside.clone();
            memories.extend(loads.iter().map(|(_, load)| load.memory));
            memories.extend(layer.slots.iter().filter_map(|slot| match &slot.state {
                State::Free(memory) => Some(*memory),
                State::Resident(resident) => Some(*resident.memory),
                State::Detached | State::Reserved { .. } => None,
            }));
            memories.sort_unstable();
            prop_assert_eq!(memories, vec![0, 1, 2]);
            let counts = layer.counts();
            prop_assert_eq!(counts.free + counts.reserved + counts.resident, layer.attached());
            prop_assert_eq!(counts.reserved, loads.len());
            for (expert, slot) in (0_u32..).zip(&layer.by_expert) {
                let Some(slot) = slot else { continue };
                let holds = match &layer.slots[*slot as usize].state {
                    State::Reserved { expert, .. } => *expert,
                    State::Resident(resident) => resident.expert,
                    state => panic!("expert {expert} in a slot that is {state:?}"),
                };
                prop_assert_eq!(holds, expert);
            }
        }
    }
}
