//! Faults of drives, memory and devices under a whole store, with every backend: the right bytes or a named error, and all
//! slots afterwards.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
};

use super::{ExpertStore as _, NoProgress, OpenReader, StoreError, TierSetup, testing::Bench};
use crate::{
    TierSnapshot,
    io::{Answer, BACKENDS, faulty_reader},
    memory::{Granted, map_granted, with_refusing_device},
    tier_options::{IoBackend, TierOptions},
};

/// No fault; others are numbers of the tests' own.
const NONE: u32 = 0;

const WANTED: [u32; 7] = [0, 3, 4, 7, 8, 10, 11];

/// A store whose reads go through `faults`, which is told what `state` holds.
fn bench(
    io: IoBackend,
    state: &Arc<AtomicU32>,
    faults: fn(u32, Answer, &mut [u8]) -> Answer,
) -> Bench {
    let options = TierOptions { cap: Some(3), io, pilot_workers: 2, ..TierOptions::default() };
    let state = Arc::clone(state);
    Bench::with(1000, options.clone(), |setup: &mut TierSetup| {
        let (container, counters) = (Arc::clone(&setup.container), Arc::clone(&setup.counters));
        let open = move || {
            let state = Arc::clone(&state);
            let faults = move |answer, bytes: &mut [u8]| faults(state.load(Relaxed), answer, bytes);
            Ok(faulty_reader(&container, &options, &counters, faults))
        };
        setup.open = OpenReader(Box::new(open));
    })
}

/// Works and hints before, during and after a fault that does what `during` says.
fn check(
    faults: fn(u32, Answer, &mut [u8]) -> Answer,
    during: impl Fn(Result<Vec<u32>, StoreError>),
    counted: impl Fn(&TierSnapshot),
) {
    for io in BACKENDS {
        let state = Arc::new(AtomicU32::new(NONE));
        let bench = bench(io, &state, faults);
        let _claim = bench.claim(2, 12);
        for fault in [NONE, 1, NONE] {
            state.store(fault, Relaxed);
            for &layer in bench.layers[..2].iter().chain(&bench.layers[..2]) {
                bench.store.hint(layer, &[1, 2, 5]);
                let outcome = bench.run(layer, &WANTED);
                if fault == NONE {
                    assert_eq!(outcome.unwrap().len(), WANTED.len());
                } else {
                    during(outcome);
                }
                bench.check_idle();
            }
            if fault != NONE {
                counted(&bench.store.snapshot());
            }
        }
    }
}

fn right(outcome: Result<Vec<u32>, StoreError>) {
    assert_eq!(outcome.unwrap().len(), WANTED.len());
}

#[test]
fn short_and_interrupted_reads_change_nothing_of_a_work() {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let faults = |state, answer: Answer, bytes: &mut [u8]| {
        // Without a rhythm: reads that take turns must not meet the same fault each time.
        let dice = CALLS.fetch_add(1, Relaxed).wrapping_mul(0x9E37_79B9) >> 16;
        match dice % 3 {
            _ if state == NONE => answer,
            0 => Err(libc::EINTR),
            1 => {
                let count = answer?.min(5000);
                bytes[count..].fill(0xEE);
                Ok(count)
            }
            _ => answer,
        }
    };
    check(faults, right, |counted| assert_eq!(counted.read_errors, 0));
}

#[test]
fn a_dead_drive_refuses_works_by_name_until_it_is_back() {
    let faults = |state, answer: Answer, bytes: &mut [u8]| {
        if state == NONE {
            return answer;
        }
        bytes.fill(0xEE);
        Err(libc::EIO)
    };
    let refused = |outcome: Result<Vec<u32>, StoreError>| {
        let error = outcome.unwrap_err();
        assert!(error.expert().is_some_and(|expert| WANTED.contains(&expert)), "{error}");
        let text = error.to_string();
        assert!(text.contains("layer-00") && text.contains("(os error 5)"), "{text}");
    };
    check(faults, refused, |counted| assert!(counted.read_errors >= 4));
}

#[test]
fn a_prefetch_that_fails_costs_a_work_nothing() {
    let faults = |state, answer: Answer, _: &mut [u8]| {
        let pilot = thread::current().name().is_some_and(|name| name.contains("-pilot-"));
        if state != NONE && pilot { Err(libc::EIO) } else { answer }
    };
    for io in BACKENDS {
        let state = Arc::new(AtomicU32::new(1));
        let bench = bench(io, &state, faults);
        let layer = bench.layers[0];
        let _claim = bench.claim(1, 12);
        bench.store.hint(layer, &[1, 2]);
        bench.wait_for(|bench| bench.store.snapshot().prefetch_dropped_failed == 2);
        bench.check_idle();
        assert_eq!(bench.store.snapshot().slots_free, 3, "the slots are free again");
        right(bench.run(layer, &WANTED));
        bench.check_idle();
    }
    check(faults, right, |counted| {
        assert_eq!(counted.read_errors, counted.prefetch_dropped_failed)
    });
}

#[test]
fn memory_that_is_refused_in_mid_claim_leaves_what_was_claimed() {
    let granted = Granted::default();
    let options = TierOptions { cap: Some(3), pilot_workers: 0, ..TierOptions::default() };
    let allocator = map_granted(&granted);
    let bench = Bench::with(1000, options, |setup| setup.allocator = allocator);
    granted.set(1);
    let _one = bench.claim(1, 12);
    let (first, second) = (bench.layers[0], bench.layers[1]);
    right(bench.run(first, &WANTED));
    for _ in 0..3 {
        let error = bench.store.claim(&bench.wanted(2, 12), &NoProgress).unwrap_err();
        assert!(error.to_string().starts_with("mapping "), "{error}");
        assert!(matches!(error, StoreError::Map { layer, .. } if layer == second), "{error}");
        bench.check_idle();
        assert_eq!((bench.cap(first), bench.cap(second)), (3, 0));
        right(bench.run(first, &WANTED));
    }
    granted.set(1);
    let _both = bench.claim(2, 12);
    right(bench.run(second, &WANTED));
    bench.check_idle();
    assert_eq!((bench.cap(first), bench.cap(second)), (3, 3));
}

#[test]
fn a_device_that_refuses_slots_changes_no_byte_and_keeps_none() {
    for call in 1..=7 {
        let (known, allocator) = with_refusing_device(call);
        let options = TierOptions { cap: Some(3), pilot_workers: 0, ..TierOptions::default() };
        let bench = Bench::with(1000, options, |setup| setup.allocator = allocator);
        let claim = bench.claim(2, 12);
        for &layer in &bench.layers[..2] {
            right(bench.run(layer, &WANTED));
            bench.store.shrink(bench.slab);
            right(bench.run(layer, &WANTED));
        }
        bench.check_idle();
        drop(claim);
        drop(bench);
        assert_eq!(known(), 0, "call {call}");
    }
}
