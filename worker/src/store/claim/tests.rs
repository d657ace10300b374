use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{
    history,
    residency::Usage,
    store::{ExpertStore as _, LoadProgress, NoProgress, StoreError, WantedLayer, testing::Bench},
    tier_options::{RamSetting, TierOptions, UsageFile},
};

#[derive(Default)]
struct Counting {
    experts: AtomicU64,
    cancel_after: Option<u64>,
}

impl LoadProgress for Counting {
    fn loaded(&self, _bytes: u64) {
        self.experts.fetch_add(1, Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancel_after.is_some_and(|limit| self.experts.load(Relaxed) >= limit)
    }
}

fn wanted(layer: u32, experts: &[u32]) -> WantedLayer {
    WantedLayer { layer, experts: experts.to_vec() }
}

#[test]
fn what_fits_is_read_at_once_and_no_thread_stays() {
    let bench = Bench::new(64, TierOptions { pilot_workers: 8, ..TierOptions::default() });
    let progress = Counting::default();
    let claim = bench.store.claim(&bench.wanted(2, 12), &progress).unwrap();
    assert_eq!(progress.experts.load(Relaxed), 24);
    assert_eq!(bench.store.resident_bytes(), 24 * bench.slab);
    assert!(!*bench.store.wants_hints().borrow());
    assert!(!bench.store.shared().has_reader(), "nothing is left to read");
    let counted = bench.store.snapshot();
    assert_eq!((counted.experts_pinned, counted.slots, counted.slots_free), (24, 24, 0));
    bench.run(bench.layers[1], &[3, 1, 11]).unwrap();
    let counted = bench.store.snapshot();
    assert_eq!((counted.hits_pinned, counted.misses, counted.reads), (3, 0, 24));

    // A coordinator that comes back finds its experts.
    drop(claim);
    let again = Counting::default();
    let _claim = bench.store.claim(&bench.wanted(2, 12), &again).unwrap();
    assert_eq!(again.experts.load(Relaxed), 24);
    assert_eq!(bench.store.snapshot().reads, 24, "read once");
    bench.check_idle();
}

#[test]
fn what_does_not_fit_is_cached() {
    let bench = Bench::new(7, TierOptions::default());
    let progress = Counting::default();
    let _claim = bench.store.claim(&bench.wanted(2, 12), &progress).unwrap();
    assert_eq!(progress.experts.load(Relaxed), 0, "nothing is pinned without a history");
    assert!(*bench.store.wants_hints().borrow());
    let counted = bench.store.snapshot();
    assert_eq!((counted.slots, counted.slot_bytes), (7, 7 * bench.slab));
    bench.run(bench.layers[0], &[0, 1, 2, 3, 4, 5]).unwrap();
    bench.check_idle();
}

#[test]
fn a_history_pins_the_most_used() {
    let mut usage = Usage::default();
    usage.add(0, 0, &[0, 5, 0, 9]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    let digest = Bench::new(1, TierOptions::default()).container.digest().to_owned();
    history::save(&path, &digest, &usage).unwrap();
    let usage = Some(UsageFile { path, read_only: true });
    let options = TierOptions { pilot_workers: 0, usage, ..TierOptions::default() };
    let bench = Bench::new(8, options);
    assert_eq!(bench.layers[0], 0, "the tiny model begins with experts");
    let _claim = bench.claim(2, 12);
    assert_eq!(bench.store.snapshot().experts_pinned, 2);
    assert!(bench.store.is_ready(0, &[1, 3]));
}

#[test]
fn two_claims_share_the_memory() {
    let bench = Bench::new(12, TierOptions { pilot_workers: 1, ..TierOptions::default() });
    let (one, two) = (bench.layers[0], bench.layers[1]);
    let first = bench.store.claim(&[wanted(one, &[0, 1, 2, 3, 4, 5, 6, 7])], &NoProgress).unwrap();
    assert_eq!(bench.store.snapshot().experts_pinned, 8);
    // Together they do not fit, so both are cached.
    let second = bench.store.claim(&[wanted(two, &[0, 1, 2, 3, 4, 5, 6, 7])], &NoProgress).unwrap();
    let counted = bench.store.snapshot();
    assert_eq!((counted.experts_pinned, counted.slots), (0, 12));
    assert!(counted.evictions_claim > 0);
    for _ in 0..2 {
        bench.run(one, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        bench.run(two, &[7, 6, 5, 4, 3, 2, 1, 0]).unwrap();
    }
    bench.check_idle();
    drop(first);
    // What nobody claims makes room.
    let progress = Counting::default();
    let third = bench.store.claim(&[wanted(two, &[8, 9])], &progress).unwrap();
    assert_eq!(bench.store.snapshot().experts_pinned, 10);
    bench.run(two, &[0, 7, 8, 9]).unwrap();
    assert_eq!(bench.store.snapshot().slots, 12);
    assert!(!*bench.store.wants_hints().borrow());
    bench.check_idle();
    drop((second, third));
}

#[test]
fn a_claim_that_fails_leaves_no_claim() {
    let bench = Bench::new(6, TierOptions { ram: RamSetting::All, ..TierOptions::default() });
    let layer = bench.layers[0];
    let held = bench.store.claim(&[wanted(layer, &[0, 1])], &NoProgress).unwrap();
    let check = |experts: &[u32], progress: &dyn LoadProgress, expected: &str| {
        let error = bench.store.claim(&[wanted(layer, experts)], progress).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
        bench.check_idle();
        let counted = bench.store.snapshot();
        assert_eq!(counted.experts_pinned, 2, "only what is claimed");
        bench.run(layer, &[1, 0]).unwrap();
    };
    check(&[0, 1, 2, 3, 4, 5, 6], &NoProgress, "--ram all wants 7 experts");
    check(&[2, 99], &NoProgress, "the container has no expert 99");
    bench.reader.set_broken(layer, 4, true);
    let expected = format!("the reader was closed before expert 4 of layer {layer}");
    check(&[2, 3, 4, 5], &NoProgress, &expected);
    let cancel = Counting { cancel_after: Some(0), ..Counting::default() };
    check(&[2, 3], &cancel, "the load was cancelled");
    bench.reader.set_broken(layer, 4, false);
    let _all = bench.store.claim(&[wanted(layer, &[2, 3, 4, 5])], &NoProgress).unwrap();
    assert_eq!(bench.store.snapshot().experts_pinned, 6);
    drop(held);
}

#[test]
fn memory_in_use_is_not_taken() {
    let bench = Bench::new(2, TierOptions { pilot_workers: 0, ..TierOptions::default() });
    let (one, two) = (bench.layers[0], bench.layers[1]);
    let first = bench.claim(1, 2);
    let mut round = bench.store.round(one, &[0, 1]);
    let mut ready = Vec::new();
    round.next(&mut ready).unwrap();
    drop(first);
    std::thread::scope(|scope| {
        let claim = scope.spawn(|| bench.store.claim(&[wanted(two, &[0, 1])], &NoProgress));
        let before: Vec<Vec<u8>> = ready.iter().map(|ready| ready.lease.to_vec()).collect();
        // The claim waits for the leases, whose bytes stay.
        bench.wait_for(|bench| bench.cap(one) == 0);
        assert!(ready.iter().zip(&before).all(|(ready, before)| *ready.lease == before[..]));
        ready.clear();
        drop(round);
        drop(claim.join().unwrap().unwrap());
    });
    assert!(matches!(
        bench.store.claim(&[wanted(99, &[0])], &NoProgress),
        Err(StoreError::NoSuchExpert { layer: 99, .. })
    ));
    bench.check_idle();
}

/// Two coordinators share a worker that has room for one of them; one leaves, and the other one gets what it left.
#[test]
fn those_that_stay_get_what_others_leave() {
    let bench = Bench::new(12, TierOptions { pilot_workers: 1, ..TierOptions::default() });
    let (one, two) = (bench.layers[0], bench.layers[1]);
    let first = bench.store.claim(&[wanted(one, &[0, 1, 2, 3, 4, 5, 6, 7])], &NoProgress).unwrap();
    let mut hints = bench.store.wants_hints();
    assert!(!*hints.borrow_and_update());
    let second = bench.store.claim(&[wanted(two, &[0, 1, 2, 3, 4, 5, 6, 7])], &NoProgress).unwrap();
    assert!(hints.has_changed().unwrap() && *hints.borrow_and_update(), "now some are on disk");
    assert_eq!(bench.store.snapshot().experts_pinned, 0);
    drop(second);
    bench.wait_for(|bench| bench.store.snapshot().experts_pinned == 8);
    bench.wait_for(|_| hints.has_changed().unwrap());
    assert!(!*hints.borrow_and_update(), "nothing is left to read ahead");
    let reads = bench.reader.reads.load(Relaxed);
    bench.run(one, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    assert_eq!(bench.reader.reads.load(Relaxed), reads);
    bench.check_idle();
    drop(first);
}

/// Settings hold for each assignment by itself: the change from one to the next is not refused because both at a time do not
/// fit.
#[test]
fn two_assignments_of_one_worker_may_be_too_large_together() {
    let all = TierOptions { ram: RamSetting::All, ..TierOptions::default() };
    let cap = TierOptions { cap: Some(4), ..TierOptions::default() };
    for options in [all, cap] {
        let bench = Bench::new(4, TierOptions { pilot_workers: 0, ..options });
        let (one, two) = (bench.layers[0], bench.layers[1]);
        let before = bench.store.claim(&[wanted(one, &[0, 1, 2, 3])], &NoProgress).unwrap();
        let after = bench.store.claim(&[wanted(two, &[0, 1, 2, 3])], &NoProgress).unwrap();
        for layer in [one, two] {
            assert_eq!(bench.run(layer, &[0, 1, 2, 3]).unwrap().len(), 4);
        }
        assert_eq!(bench.store.snapshot().slots, 4);
        drop(before);
        bench.wait_for(|bench| bench.cap(two) == 4);
        bench.wait_for(|bench| bench.store.snapshot().experts_pinned == 4);
        bench.run(two, &[0, 1, 2, 3]).unwrap();
        bench.check_idle();
        drop(after);
    }
}
