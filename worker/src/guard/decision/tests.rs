use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

/// A process that will hold 100 MiB, 60 of them experts, 40 of those cache, and leaves 16 unused.
fn guard() -> Guard {
    let mut guard = Guard::new(40 * MIB, 16 * MIB);
    guard.promised(0, 60 * MIB);
    guard
}

const CACHE: CacheBytes =
    CacheBytes { planned: 40 * MIB, now: 40 * MIB, least: 4 * MIB, slot: MIB };

fn check(anonymous: Option<u64>, headroom: Option<u64>, cache: CacheBytes, expected: Decision) {
    let reading = Reading {
        anonymous: anonymous.map(|bytes| bytes * MIB),
        headroom: headroom.map(|bytes| bytes * MIB),
    };
    assert_eq!(guard().decide(reading, cache), expected, "{reading:?}");
}

#[test]
fn what_is_still_to_come_must_fit_into_what_is_left() {
    check(Some(30), Some(86), CACHE, Decision::Keep);
    check(Some(30), Some(78), CACHE, Decision::Keep);
    check(Some(30), Some(77), CACHE, Decision::Shrink(9 * MIB));
    check(Some(100), Some(7), CACHE, Decision::Shrink(9 * MIB));
    // The process itself grew: what it holds beyond the projection is gone from the headroom already.
    check(Some(120), Some(0), CACHE, Decision::Shrink(16 * MIB));
    check(Some(120), Some(500), CACHE, Decision::Keep);
}

#[test]
fn a_slot_for_each_layer_always_stays() {
    check(Some(100), Some(0), CacheBytes { now: 10 * MIB, ..CACHE }, Decision::Shrink(6 * MIB));
    check(Some(100), Some(0), CacheBytes { now: 4 * MIB, ..CACHE }, Decision::Keep);
}

#[test]
fn unknown_figures_do_not_evict() {
    check(None, None, CACHE, Decision::Keep);
    check(None, Some(16), CACHE, Decision::Keep);
    check(None, Some(7), CACHE, Decision::Shrink(9 * MIB));
    check(Some(108), None, CACHE, Decision::Keep);
    check(Some(109), None, CACHE, Decision::Shrink(9 * MIB));
}

#[test]
fn the_cache_grows_back_after_a_time_without_shortage() {
    let mut guard = guard();
    guard.promised(60 * MIB, 50 * MIB);
    let cache = CacheBytes { now: 30 * MIB, ..CACHE };
    let reading = Reading { anonymous: Some(90 * MIB), headroom: Some(100 * MIB) };
    let mut checks = 0;
    let decision = loop {
        checks += 1;
        match guard.decide(reading, cache) {
            Decision::Keep => {}
            other => break other,
        }
    };
    assert_eq!((checks, decision), (CALM_CHECKS, Decision::Grow(5 * MIB)));
}

proptest! {
    /// Whatever the others take, the cache settles, and it is as large as it may be within a step.
    #[test]
    fn a_constant_world_comes_to_rest(others in 0u64..=100, held in 40u64..=100) {
        const HOST: u64 = 200;
        let mut guard = guard();
        let mut cache = CACHE;
        let mut changes = Vec::new();
        for check in 0..100 * CALM_CHECKS {
            let experts = 20 * MIB + cache.now;
            let anonymous = (held * MIB).min(40 * MIB + experts);
            let headroom = (HOST * MIB).saturating_sub(others * MIB + anonymous);
            let before = cache.now;
            match guard.decide(Reading { anonymous: Some(anonymous), headroom: Some(headroom) }, cache) {
                Decision::Keep => {}
                Decision::Shrink(bytes) => cache.now -= bytes,
                Decision::Grow(bytes) => cache.now += bytes,
            }
            if cache.now != before {
                guard.promised(before, cache.now);
                changes.push(check);
            }
            prop_assert!((cache.least..=cache.planned).contains(&cache.now));
        }
        prop_assert!(changes.len() <= 1, "{changes:?}");
        let peak = 60 * MIB + cache.now + others * MIB;
        prop_assert!(peak + 8 * MIB <= HOST * MIB || cache.now == cache.least);
    }
}
