use std::{sync::Barrier, thread};

use crate::{
    store::{ExpertStore as _, StoreError, testing::Bench},
    tier_options::{PinSetting, TierOptions},
};

fn cap(cap: u32) -> TierOptions {
    TierOptions { cap: Some(cap), pilot_workers: 0, ..TierOptions::default() }
}

#[test]
fn every_expert_comes_once_whatever_the_cache_holds() {
    for pipeline in [true, false] {
        for slots in [1, 2, 3, 8, 12] {
            let options = TierOptions { pipeline, ..cap(slots) };
            let bench = Bench::new(1000, options);
            let _claim = bench.claim(2, 12);
            for wanted in [&[3][..], &[0, 1, 2, 3, 4, 5, 6, 7, 8], &[11, 3, 0], &[3, 0, 11]] {
                let mut order = bench.run(bench.layers[0], wanted).unwrap();
                order.sort_unstable();
                let mut expected = wanted.to_vec();
                expected.sort_unstable();
                assert_eq!(order, expected, "{slots} slots, pipeline {pipeline}");
                bench.check_idle();
            }
            let counted = bench.store.snapshot();
            assert_eq!(counted.hits_cache + counted.hits_pinned + counted.misses, 16);
            assert_eq!(counted.works, 4);
            assert_eq!(counted.slots, u64::from(slots) * 2);
        }
    }
}

#[test]
fn what_is_there_comes_first_and_the_rest_as_it_comes() {
    let bench = Bench::new(1000, cap(6));
    let layer = bench.layers[1];
    let _claim = bench.claim(2, 12);
    bench.run(layer, &[5, 7]).unwrap();
    bench.reader.hold();
    let wanted = [1, 5, 2, 7, 3];
    let mut round = bench.store.round(layer, &wanted);
    assert_eq!(round.missed(), 3);
    assert_eq!(bench.take(&mut *round, layer, &wanted).unwrap(), [5, 7]);
    bench.reader.wait_held(layer, &[1, 2, 3]);
    for expert in [3, 1, 2] {
        bench.reader.pass(layer, expert);
        assert_eq!(bench.take(&mut *round, layer, &wanted).unwrap(), [expert]);
    }
    assert!(bench.take(&mut *round, layer, &wanted).unwrap().is_empty());
    drop(round);
    bench.check_idle();
    let counted = bench.store.snapshot();
    assert_eq!((counted.hits_cache, counted.misses), (2, 5));
    assert_eq!(counted.loads_in_flight_max, 3);
    assert!(counted.felt_wait_us > 0);
}

#[test]
fn without_the_pipeline_everything_is_read_first() {
    let bench = Bench::new(1000, TierOptions { pipeline: false, ..cap(6) });
    let layer = bench.layers[0];
    let _claim = bench.claim(1, 12);
    bench.run(layer, &[5]).unwrap();
    let wanted = [1, 5, 2];
    let mut round = bench.store.round(layer, &wanted);
    let mut ready = bench.take(&mut *round, layer, &wanted).unwrap();
    ready.sort_unstable();
    assert_eq!(ready, [1, 2, 5]);
    assert_eq!(bench.store.snapshot().loads_in_flight_max, 1);
}

#[test]
fn a_ready_round_is_all_or_nothing() {
    let bench = Bench::new(1000, cap(4));
    let layer = bench.layers[0];
    let _claim = bench.claim(1, 12);
    bench.run(layer, &[1, 2]).unwrap();
    let before = bench.store.snapshot();
    assert!(!bench.store.is_ready(layer, &[1, 3]));
    assert!(bench.store.ready_round(layer, &[1, 3]).is_none());
    assert_eq!(bench.store.snapshot(), before, "nothing has happened");
    assert!(bench.store.is_ready(layer, &[2, 1]));
    let mut round = bench.store.ready_round(layer, &[2, 1]).unwrap();
    assert_eq!(bench.take(&mut *round, layer, &[2, 1]).unwrap(), [2, 1]);
    drop(round);
    assert_eq!(bench.store.snapshot().hits_cache, 2);
    bench.check_idle();
}

#[test]
fn a_failed_read_refuses_the_work_and_loses_no_slot() {
    for pipeline in [true, false] {
        let bench = Bench::new(1000, TierOptions { pipeline, ..cap(2) });
        let layer = bench.layers[0];
        let _claim = bench.claim(1, 12);
        bench.reader.set_broken(layer, 4, true);
        for _ in 0..5 {
            let error = bench.run(layer, &[1, 4, 2, 3]).unwrap_err();
            assert_eq!(error.expert(), Some(4));
            assert!(matches!(error, StoreError::Read { .. }), "{error}");
            bench.check_idle();
        }
        assert!(bench.store.snapshot().read_errors >= 5);
        bench.run(layer, &[1, 2, 3]).unwrap();
        bench.reader.set_broken(layer, 4, false);
        assert_eq!(bench.run(layer, &[4]).unwrap(), [4]);
        bench.check_idle();
    }
}

#[test]
fn who_waits_for_a_read_that_fails_reads_itself() {
    let bench = Bench::new(1000, cap(3));
    let layer = bench.layers[0];
    let _claim = bench.claim(1, 12);
    bench.reader.hold();
    bench.reader.set_broken(layer, 4, true);
    thread::scope(|scope| {
        let first = scope.spawn(|| bench.run(layer, &[4]));
        bench.reader.wait_held(layer, &[4]);
        let mut second = bench.store.round(layer, &[4]);
        bench.reader.pass(layer, 4);
        let error = first.join().unwrap().unwrap_err();
        assert_eq!(error.expert(), Some(4), "it asked for the read");
        bench.reader.set_broken(layer, 4, false);
        bench.reader.release();
        assert_eq!(bench.take(&mut *second, layer, &[4]).unwrap(), [4]);
    });
    bench.check_idle();
}

#[test]
fn reads_outlive_a_round_that_is_dropped() {
    let bench = Bench::new(1000, cap(3));
    let layer = bench.layers[0];
    let _claim = bench.claim(1, 12);
    bench.reader.hold();
    let round = bench.store.round(layer, &[1, 2]);
    bench.reader.wait_held(layer, &[1, 2]);
    drop(round);
    bench.reader.release();
    bench.check_idle();
    assert!(bench.store.is_ready(layer, &[1, 2]), "what was read stays");
}

#[test]
fn rounds_that_share_one_slot_take_turns() {
    const WORKS: u32 = 40;
    for pipeline in [true, false] {
        let bench = Bench::new(1000, TierOptions { pipeline, ..cap(1) });
        let layer = bench.layers[0];
        let _claim = bench.claim(1, 12);
        let barrier = Barrier::new(4);
        thread::scope(|scope| {
            for session in 0..4 {
                let (bench, barrier) = (&bench, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    for work in 0..WORKS {
                        let wanted: Vec<u32> =
                            (0..5).map(|e| (e * 5 + work + session) % 12).collect();
                        let order = bench.run(layer, &wanted).unwrap();
                        assert_eq!(order.len(), wanted.len());
                    }
                });
            }
        });
        bench.check_idle();
        assert_eq!(bench.store.snapshot().works, u64::from(4 * WORKS));
    }
}

#[test]
fn pinned_experts_are_counted_apart_and_stay() {
    let options = TierOptions { pin: PinSetting::Bytes(u64::MAX), ..cap(1) };
    let slab = Bench::new(1, TierOptions::default()).slab;
    let bench = Bench::new(9, TierOptions { pin: PinSetting::Bytes(3 * slab), ..options });
    let layer = bench.layers[0];
    let _claim = bench.claim(1, 12);
    assert_eq!(bench.store.snapshot().experts_pinned, 3);
    for _ in 0..3 {
        bench.run(layer, &[0, 9, 1, 10, 2, 11]).unwrap();
    }
    let counted = bench.store.snapshot();
    assert_eq!((counted.hits_pinned, counted.experts_pinned), (9, 3));
    assert_eq!(counted.hits_cache + counted.misses, 9);
    assert!(counted.demand_cold.reads >= 3 && counted.demand_warm.reads > 0, "{counted:?}");
    bench.check_idle();
}
