use std::sync::mpsc;

use super::*;

#[test]
fn every_hint_is_followed_once_and_a_full_ring_drops() {
    let (seen, hints) = mpsc::channel();
    let (gate, turns) = mpsc::channel::<()>();
    let turns = Mutex::new(turns);
    let pilots = Pilots::start(3, move |hint| {
        // The test lets each one pass.
        turns.lock().unwrap().recv().unwrap();
        seen.send(hint).unwrap();
    })
    .unwrap();
    let counters = TierCounters::default();
    let experts: Vec<u32> = (0..64).collect();
    for layer in 0..8 {
        pilots.hint(&counters, layer, u64::MAX - u64::from(layer), &experts);
    }
    let dropped = counters.snapshot().prefetch_dropped_ring_full;
    let (all, kept) = (8 * 64, 8 * 64 - dropped);
    // Three were taken before they had to wait, at most.
    assert!((HINTS_MAX..=HINTS_MAX + 3).contains(&kept), "{dropped} of {all} dropped");
    (0..kept).for_each(|_| gate.send(()).unwrap());
    let mut followed: Vec<Hint> = (0..kept).map(|_| hints.recv().unwrap()).collect();
    followed.sort_by_key(|hint| (hint.layer, hint.expert));
    followed.dedup();
    assert_eq!(followed.len() as u64, kept);
    assert!(followed.iter().all(|hint| hint.time == u64::MAX - u64::from(hint.layer)));
    // Pilots that sleep end.
    drop(pilots);
    assert!(hints.recv().is_err());
}

#[test]
fn a_hint_travels_in_two_words() {
    let hint = Hint { layer: u32::MAX, expert: 7, time: 1 << 40 };
    assert_eq!(unpack(pack(hint)), hint);
}
