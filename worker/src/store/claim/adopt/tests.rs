use std::sync::atomic::Ordering::Relaxed;

use crate::{
    store::{ExpertStore as _, NoProgress, StoreError, WantedLayer, testing::Bench},
    tier_options::{RamSetting, TierOptions},
};

fn options() -> TierOptions {
    TierOptions { pilot_workers: 0, ..TierOptions::default() }
}

fn wanted(layer: u32, experts: &[u32]) -> WantedLayer {
    WantedLayer { layer, experts: experts.to_vec() }
}

/// Slots and pins of a layer.
fn slots(bench: &Bench, layer: u32) -> (usize, usize) {
    let counts = bench.store.shared().layer(layer).unwrap().lock().slots.counts();
    (counts.cap, counts.pinned)
}

/// A worker of two layers with memory for so many experts owns 4 of each layer, and 2 in the first of them are adopted. The
/// slots and pins that both layers have then; nothing was read for it, and everything can be computed.
fn check(memory: u64, options: TierOptions, expected: [(usize, usize); 2]) {
    let bench = Bench::new(memory, options);
    let (one, two) = (bench.layers[0], bench.layers[1]);
    let owned = bench.claim(2, 4);
    let reads = bench.reader.reads.load(Relaxed);
    let before = [slots(&bench, one), slots(&bench, two)];
    let adopted = bench.store.adopt(&wanted(one, &[8, 9])).unwrap();
    assert_eq!(bench.reader.reads.load(Relaxed), reads, "nothing is read ahead");
    assert_eq!([slots(&bench, one), slots(&bench, two)], expected, "{memory} slabs");
    for _ in 0..2 {
        assert_eq!(bench.run(one, &[0, 1, 2, 3, 8, 9]).unwrap().len(), 6);
        assert_eq!(bench.run(two, &[0, 1, 2, 3]).unwrap().len(), 4);
        bench.check_idle();
    }
    assert!(bench.store.snapshot().slots <= memory, "the budget holds");
    drop(adopted);
    // Slots that nobody needs may stay.
    let pinned = |slots: [(usize, usize); 2]| slots.map(|(_, pinned)| pinned);
    bench.wait_for(|bench| pinned([slots(bench, one), slots(bench, two)]) == pinned(before));
    bench.check_idle();
    drop(owned);
}

#[test]
fn adopted_experts_get_slots_as_far_as_there_are_any() {
    // Everything fits, twice.
    check(64, options(), [(6, 4), (4, 4)]);
    // Room for one more.
    check(9, options(), [(5, 4), (4, 4)]);
    // None: a pin of the same layer has to go.
    check(8, options(), [(4, 3), (4, 4)]);
    // A cache takes them in as it is.
    check(5, options(), [(3, 0), (2, 0)]);
    check(64, TierOptions { cap: Some(3), ..options() }, [(3, 0), (3, 0)]);
    // --ram all holds for what is assigned.
    check(8, TierOptions { ram: RamSetting::All, ..options() }, [(4, 3), (4, 4)]);
}

#[test]
fn a_layer_without_a_slot_gets_one_from_another() {
    for (memory, experts, expected) in [
        // Of a cache.
        (5, 12, [(4, 0), (1, 0)]),
        // Of pins: two go, because one slot must stay for those that have none.
        (8, 8, [(7, 6), (1, 0)]),
    ] {
        let bench = Bench::new(memory, options());
        let (one, two) = (bench.layers[0], bench.layers[1]);
        let _owned = bench.claim(1, experts);
        let _adopted = bench.store.adopt(&wanted(two, &[3, 4])).unwrap();
        assert_eq!([slots(&bench, one), slots(&bench, two)], expected, "{memory} slabs");
        let all: Vec<u32> = (0..experts).collect();
        assert_eq!(bench.run(two, &[3, 4]).unwrap().len(), 2);
        assert_eq!(bench.run(one, &all).unwrap().len(), all.len());
        bench.check_idle();
    }
}

#[test]
fn what_cannot_be_adopted_is_named_and_changes_nothing() {
    let bench = Bench::new(1, options());
    let (one, two) = (bench.layers[0], bench.layers[1]);
    let _owned = bench.claim(1, 1);
    let error = bench.store.adopt(&wanted(two, &[3])).unwrap_err();
    assert!(matches!(error, StoreError::NoSlot { .. }), "{error}");
    assert!(error.to_string().starts_with("no layer can do without"), "{error}");
    let error = bench.store.adopt(&wanted(one, &[3, 99])).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchExpert { expert: 99, .. }), "{error}");
    assert_eq!([slots(&bench, one), slots(&bench, two)], [(1, 1), (0, 0)]);
    bench.run(one, &[0]).unwrap();
    bench.check_idle();
}

/// A claim that is being read waits for nobody, and nobody for it: not what is adopted in a layer that it pins in full.
#[test]
fn adopting_does_not_wait_for_a_claim_that_is_being_loaded() {
    let bench = Bench::new(8, options());
    let (one, two) = (bench.layers[0], bench.layers[1]);
    bench.reader.hold();
    std::thread::scope(|scope| {
        let claim = scope.spawn(|| bench.claim(2, 4));
        bench.wait_for(|bench| bench.store.snapshot().loads_in_flight == 8);
        let adopted = bench.store.adopt(&wanted(one, &[8, 9])).unwrap();
        bench.reader.release();
        let claim = claim.join().unwrap();
        assert_eq!([slots(&bench, one), slots(&bench, two)], [(4, 3), (4, 4)]);
        assert_eq!(bench.run(one, &[0, 1, 2, 3, 8, 9]).unwrap().len(), 6);
        bench.check_idle();
        // The coordinator places its experts anew, with what it had adopted before still claimed.
        let next = bench.store.claim(&bench.wanted(2, 4), &NoProgress).unwrap();
        assert_eq!(bench.run(one, &[0, 1, 2, 3, 8, 9]).unwrap().len(), 6);
        drop((claim, adopted));
        bench.wait_for(|bench| bench.store.snapshot().experts_pinned == 8);
        bench.check_idle();
        drop(next);
    });
}
