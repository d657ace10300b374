use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn fence(step: u64, layer: u32, part: u32) -> Fence {
    Fence { epoch: 1, generation: 1, step, layer, attempt: 0, part }
}

fn check(ledger: &mut Ledger, worker: usize, fence: &Fence, expected: Verdict) {
    assert_eq!(ledger.settle(worker, Some(fence)), expected, "{fence:?}");
}

#[test]
fn only_what_is_out_is_accepted_and_only_once() {
    let mut ledger = Ledger::new();
    for (worker, part) in [(0, 0), (0, 1), (1, 0)] {
        ledger.expect(worker, Some(&fence(4, 2, part))).unwrap();
    }
    assert_eq!(ledger.waiting_for().collect::<Vec<_>>(), [0, 1]);
    check(&mut ledger, 0, &fence(4, 2, 1), Verdict::Accept);
    check(&mut ledger, 0, &fence(4, 2, 1), Verdict::Duplicate);
    check(&mut ledger, 1, &fence(4, 2, 1), Verdict::Unknown);
    check(&mut ledger, 1, &fence(4, 1, 0), Verdict::Stale);
    check(&mut ledger, 1, &fence(4, 3, 0), Verdict::Unknown);
    check(&mut ledger, 1, &Fence { epoch: 0, ..fence(4, 2, 0) }, Verdict::Stale);
    check(&mut ledger, 1, &Fence { generation: 2, ..fence(4, 2, 0) }, Verdict::Unknown);
    check(&mut ledger, 1, &Fence { attempt: 1, ..fence(4, 2, 0) }, Verdict::Unknown);
    check(&mut ledger, 1, &fence(4, 2, 0), Verdict::Accept);
    assert_eq!(ledger.settle(0, None), Verdict::Unknown);
    assert_eq!((ledger.outstanding(0), ledger.outstanding(1)), (1, 0));
    assert_eq!(ledger.dropped(), Dropped { duplicate: 1, stale: 2, unknown: 5 });
}

#[test]
fn the_next_layer_abandons_what_is_out() {
    let mut ledger = Ledger::new();
    ledger.expect(0, Some(&fence(4, 2, 0))).unwrap();
    ledger.expect(0, Some(&fence(4, 3, 0))).unwrap();
    check(&mut ledger, 0, &fence(4, 2, 0), Verdict::Stale);
    check(&mut ledger, 0, &fence(4, 3, 0), Verdict::Accept);
    let error = ledger.expect(0, Some(&fence(3, 9, 0))).unwrap_err();
    assert!(matches!(
        error,
        FenceError::Backwards { step: 3, layer: 9, current_step: 4, current_layer: 3 }
    ));
}

#[test]
fn a_later_attempt_replaces_the_earlier_one() {
    let mut ledger = Ledger::new();
    let (first, second) = (fence(1, 0, 0), Fence { attempt: 1, ..fence(1, 0, 0) });
    ledger.expect(0, Some(&first)).unwrap();
    assert!(matches!(ledger.expect(0, Some(&first)), Err(FenceError::Repeated { .. })));
    ledger.expect(0, Some(&second)).unwrap();
    assert_eq!(ledger.outstanding(0), 1);
    check(&mut ledger, 0, &first, Verdict::Stale);
    check(&mut ledger, 0, &second, Verdict::Accept);
    check(&mut ledger, 0, &second, Verdict::Duplicate);
}

#[test]
fn work_sent_again_after_a_refusal_is_waited_for_again() {
    let mut ledger = Ledger::new();
    let (first, second) = (fence(1, 0, 0), Fence { attempt: 1, ..fence(1, 0, 0) });
    ledger.expect(0, Some(&first)).unwrap();
    check(&mut ledger, 0, &first, Verdict::Accept);
    assert_eq!(ledger.outstanding(0), 0);
    ledger.expect(0, Some(&second)).unwrap();
    assert_eq!(ledger.outstanding(0), 1);
    check(&mut ledger, 0, &first, Verdict::Stale);
    check(&mut ledger, 0, &second, Verdict::Accept);
    assert_eq!(ledger.outstanding(0), 0);
}

#[test]
fn a_lost_worker_owes_nothing() {
    let mut ledger = Ledger::new();
    ledger.expect(0, Some(&fence(1, 0, 0))).unwrap();
    ledger.expect(1, Some(&fence(1, 0, 0))).unwrap();
    assert_eq!(ledger.forget(0), 1);
    assert_eq!(ledger.waiting_for().collect::<Vec<_>>(), [1]);
    check(&mut ledger, 0, &fence(1, 0, 0), Verdict::Unknown);
    assert_eq!(ledger.expect(0, None), Err(FenceError::Missing));
}

proptest! {
    // Whatever arrives in whatever order, an attempt of a part is accepted at most once, and only while it is the one that is out.
    #[test]
    fn an_attempt_is_accepted_at_most_once(
        events in prop::collection::vec((any::<bool>(), 0usize..3, 0u64..3, 0u32..3, 0u32..2, 0u32..3), 0..200),
    ) {
        let mut ledger = Ledger::new();
        let mut sent = BTreeMap::new();
        let mut summed = BTreeSet::new();
        let mut newest = (0, 0);
        let mut dropped = 0;
        for (is_send, worker, step, layer, attempt, part) in events {
            let fence = Fence { attempt, ..fence(step, layer, part) };
            if is_send {
                if ledger.expect(worker, Some(&fence)).is_ok() {
                    prop_assert!((step, layer) >= newest);
                    newest = (step, layer);
                    sent.insert((worker, step, layer, part), attempt);
                }
            } else if ledger.settle(worker, Some(&fence)) == Verdict::Accept {
                prop_assert_eq!(sent.get(&(worker, step, layer, part)), Some(&attempt));
                prop_assert_eq!((step, layer), newest);
                prop_assert!(summed.insert((worker, step, layer, part, attempt)));
            } else {
                dropped += 1;
            }
        }
        let counts = ledger.dropped();
        prop_assert_eq!(counts.duplicate + counts.stale + counts.unknown, dropped);
    }
}
