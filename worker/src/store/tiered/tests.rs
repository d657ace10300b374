use std::{
    thread,
    time::{Duration, Instant},
};

use super::*;
use crate::{
    prefetch::Hint,
    store::{NoProgress, testing::Bench, upkeep::RE_PIN_WORKS},
    tier_options::{PinSetting, Policy},
};

fn pilots(cap: u32, workers: u8) -> TierOptions {
    TierOptions { cap: Some(cap), pilot_workers: workers, ..TierOptions::default() }
}

#[test]
fn a_hint_brings_the_expert_before_it_is_wanted() {
    let bench = Bench::new(1000, pilots(3, 1));
    let layer = bench.layers[1];
    let _claim = bench.claim(2, 12);
    assert!(*bench.store.wants_hints().borrow());
    bench.store.hint(layer, &[4, 9]);
    bench.wait_for(|bench| bench.store.is_ready(layer, &[4, 9]));
    bench.run(layer, &[4, 9, 1]).unwrap();
    bench.run(layer, &[4, 9, 1]).unwrap();
    let counted = bench.store.snapshot();
    assert_eq!((counted.prefetch_issued, counted.prefetch_useful), (2, 2));
    assert_eq!((counted.hits_cache, counted.misses), (5, 1));
    assert_eq!(counted.demand_cold.reads, 1, "demand reads only");
    bench.check_idle();
}

#[test]
fn hints_are_dropped_for_a_reason() {
    let bench = Bench::new(1000, pilots(2, 1));
    let layer = bench.layers[0];
    let claim = bench.claim(1, 12);
    let check = |experts: &[u32], reason: fn(&TierSnapshot) -> u64| {
        let before = reason(&bench.store.snapshot());
        bench.store.hint(layer, experts);
        bench.wait_for(|bench| reason(&bench.store.snapshot()) == before + experts.len() as u64);
    };
    bench.run(layer, &[0, 1]).unwrap();
    check(&[0, 1], |c| c.prefetch_dropped_duplicate);
    let mut round = bench.store.round(layer, &[0, 1]);
    let mut ready = Vec::new();
    round.next(&mut ready).unwrap();
    check(&[5], |c| c.prefetch_dropped_started);
    ready.clear();
    drop(round);
    // Both residents have been used three times, the newcomer never.
    bench.run(layer, &[0, 1]).unwrap();
    check(&[5], |c| c.prefetch_dropped_guard);
    bench.reader.set_broken(layer, 6, true);
    let shared = bench.store.shared();
    let time = shared.layer(layer).unwrap().lock().slots.time();
    bench.run(layer, &[2, 3]).unwrap();
    let late = |expert| Hint { layer, expert, time };
    let before = bench.store.snapshot().prefetch_dropped_started;
    shared.follow(late(7));
    assert_eq!(bench.store.snapshot().prefetch_dropped_started, before + 1, "work came first");
    check(&[6], |c| c.prefetch_dropped_failed);
    bench.check_idle();
    drop(claim);
    check(&[7], |c| c.prefetch_dropped_started);
}

#[test]
fn work_waits_for_a_read_that_a_pilot_began() {
    let bench = Bench::new(1000, pilots(2, 2));
    let layer = bench.layers[0];
    let _claim = bench.claim(1, 12);
    bench.reader.hold();
    bench.store.hint(layer, &[4, 5]);
    bench.reader.wait_held(layer, &[4, 5]);
    bench.reader.set_broken(layer, 5, true);
    thread::scope(|scope| {
        let work = scope.spawn(|| bench.run(layer, &[4, 5]));
        bench.wait_for(|bench| bench.store.snapshot().prefetch_late == 2);
        bench.reader.pass(layer, 5);
        bench.wait_for(|bench| bench.store.snapshot().prefetch_dropped_failed == 1);
        // Now the work reads it itself.
        bench.reader.set_broken(layer, 5, false);
        bench.reader.release();
        let mut order = work.join().unwrap().unwrap();
        order.sort_unstable();
        assert_eq!(order, [4, 5]);
    });
    assert_eq!(bench.store.snapshot().prefetch_useful, 0, "it came too late");
    bench.check_idle();
}

#[test]
fn shrinking_takes_idle_slots_now_and_the_others_when_they_come_back() {
    let bench = Bench::new(1000, pilots(6, 0));
    let (one, two) = (bench.layers[0], bench.layers[1]);
    let _claim = bench.claim(2, 12);
    let wanted = [0, 1, 2, 3, 4, 5];
    bench.run(two, &wanted).unwrap();
    let mut round = bench.store.round(one, &wanted);
    let mut ready = Vec::new();
    while ready.len() < 6 {
        round.next(&mut ready).unwrap();
    }
    assert_eq!(bench.store.shrink(4 * bench.slab), 4 * bench.slab);
    assert_eq!((bench.cap(one), bench.cap(two)), (4, 4));
    let counted = bench.store.snapshot();
    assert_eq!((counted.evictions_shrink, counted.guard_shrinks), (2, 1), "leases keep theirs");
    ready.clear();
    drop(round);
    bench.check_idle();
    // One slot stays in each layer, and that is enough.
    assert_eq!(bench.store.shrink(u64::MAX), 6 * bench.slab);
    assert_eq!(bench.store.shrink(1), 0);
    bench.run(one, &wanted).unwrap();
    bench.check_idle();
    // The next claim plans anew, and takes the released slots into use again.
    let mappings = bench.store.snapshot().mappings;
    let _more = bench.claim(2, 12);
    assert_eq!((bench.cap(one), bench.cap(two)), (6, 6));
    assert_eq!(bench.store.snapshot().mappings, mappings);
    bench.run(one, &wanted).unwrap();
    bench.check_idle();
}

#[test]
fn pins_follow_use() {
    let slab = Bench::new(1, TierOptions::default()).slab;
    let bench = Bench::new(1000, TierOptions { pin: PinSetting::Bytes(2 * slab), ..pilots(2, 0) });
    let layer = bench.layers[0];
    let _claim = bench.claim(1, 12);
    for _ in 0..RE_PIN_WORKS {
        bench.run(layer, &[7, 8]).unwrap();
    }
    let counted = bench.store.snapshot();
    assert_eq!((counted.repins, counted.experts_pinned), (2, 2));
    bench.run(layer, &[0, 1, 2, 3]).unwrap();
    bench.run(layer, &[7, 8]).unwrap();
    assert_eq!(bench.store.snapshot().hits_pinned, 2);
    bench.check_idle();
}

/// A generator of its own for each thread of a test.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from((self.0 >> 33) % u64::from(below)).unwrap()
    }

    fn experts(&mut self, most: u32) -> Vec<u32> {
        let mut experts: Vec<u32> = (0..=self.roll(most)).map(|_| self.roll(12)).collect();
        experts.sort_unstable();
        experts.dedup();
        experts
    }
}

/// Work, pilots, re-pinning, shrinking, claims and failing reads at once: every byte is right, every work ends, and no slot
/// is lost. SHIMMER_TEST_STRESS_SECONDS sets how long.
#[test]
fn everything_at_once_loses_no_slot_and_changes_no_byte() {
    let seconds = std::env::var("SHIMMER_TEST_STRESS_SECONDS").ok();
    let seconds = seconds.map_or(2, |text| text.parse().unwrap());
    let slab = Bench::new(1, TierOptions::default()).slab;
    for (policy, pipeline) in [(Policy::Lru, true), (Policy::Lfru, true), (Policy::Lru, false)] {
        let pin = PinSetting::Bytes(3 * slab);
        let bench = Bench::new(40, TierOptions { policy, pipeline, pin, ..pilots(4, 3) });
        let _claim = bench.claim(2, 12);
        let until = Instant::now() + Duration::from_secs(seconds) / 3;
        let going = || Instant::now() < until;
        thread::scope(|scope| {
            for session in 0..3 {
                let (bench, going) = (&bench, &going);
                scope.spawn(move || {
                    let mut dice = Dice(session);
                    while going() {
                        let layer = bench.layers[dice.roll(2) as usize];
                        bench.store.hint(bench.layers[dice.roll(2) as usize], &dice.experts(6));
                        let wanted = dice.experts(8);
                        if let Ok(order) = bench.run(layer, &wanted) {
                            assert_eq!(order.len(), wanted.len());
                        }
                    }
                });
            }
            scope.spawn(|| {
                let mut dice = Dice(77);
                while going() {
                    let (layer, expert) = (bench.layers[dice.roll(2) as usize], dice.roll(12));
                    bench.reader.set_broken(layer, expert, true);
                    thread::yield_now();
                    bench.reader.set_broken(layer, expert, false);
                    bench.store.shrink(u64::from(dice.roll(3)) * bench.slab);
                    if dice.roll(4) == 0 {
                        // May fail on a broken expert; then it leaves nothing behind.
                        let wanted = bench.wanted(2, 1 + dice.roll(12));
                        drop(bench.store.claim(&wanted, &NoProgress));
                    }
                }
            });
        });
        bench.check_idle();
        let counted = bench.store.snapshot();
        assert!(counted.works > 0 && counted.misses > 0, "{counted:?}");
        assert_eq!(counted.loads_in_flight, 0);
    }
}
