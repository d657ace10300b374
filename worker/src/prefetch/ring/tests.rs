#[cfg(not(feature = "loom"))]
mod threads {
    use std::{
        sync::atomic::{AtomicU64, Ordering::Relaxed},
        thread,
    };

    use super::super::Ring;

    #[test]
    fn items_come_in_order_and_a_full_ring_takes_none() {
        let ring = Ring::new(2);
        assert_eq!(ring.pop(), None);
        for lap in 0..5 {
            assert!(ring.push([lap, 1]));
            assert!(ring.push([lap, 2]));
            assert!(!ring.push([lap, 3]), "full");
            assert_eq!(ring.pop(), Some([lap, 1]));
            assert!(ring.push([lap, 4]));
            assert_eq!(ring.pop(), Some([lap, 2]));
            assert_eq!(ring.pop(), Some([lap, 4]));
            assert_eq!(ring.pop(), None);
        }
    }

    #[test]
    fn every_item_that_was_put_is_taken_once() {
        const ITEMS: u64 = 20_000;
        let ring = Ring::new(8);
        let taken: Vec<AtomicU64> = (0..2 * ITEMS).map(|_| AtomicU64::new(0)).collect();
        let left = AtomicU64::new(2 * ITEMS);
        let put = |first: u64| {
            for value in first..first + ITEMS {
                while !ring.push([value, !value]) {
                    thread::yield_now();
                }
            }
        };
        let take = || {
            while left.load(Relaxed) > 0 {
                let Some([value, check]) = ring.pop() else {
                    thread::yield_now();
                    continue;
                };
                assert_eq!(check, !value, "both words are of one item");
                taken[usize::try_from(value).unwrap()].fetch_add(1, Relaxed);
                left.fetch_sub(1, Relaxed);
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| put(0));
            scope.spawn(|| put(ITEMS));
            for _ in 0..3 {
                scope.spawn(take);
            }
        });
        assert!(taken.iter().all(|count| count.load(Relaxed) == 1));
    }
}

#[cfg(feature = "loom")]
mod models {
    use loom::{sync::Arc, thread};

    use super::super::Ring;

    /// Every interleaving of one producer and two consumers over two laps of a ring.
    #[test]
    fn loom_ring_takes_each_item_once() {
        loom::model(|| {
            let ring = Arc::new(Ring::new(1));
            let take = |ring: &Arc<Ring>| {
                let ring = Arc::clone(ring);
                thread::spawn(move || ring.pop())
            };
            let consumers = [take(&ring), take(&ring)];
            let put: Vec<bool> = (1..=2).map(|value| ring.push([value, !value])).collect();
            let mut taken: Vec<_> =
                consumers.into_iter().filter_map(|thread| thread.join().unwrap()).collect();
            while let Some(item) = ring.pop() {
                taken.push(item);
            }
            assert!(taken.iter().all(|[value, check]| *check == !*value));
            let mut values: Vec<u64> = taken.iter().map(|item| item[0]).collect();
            values.sort_unstable();
            let expected: Vec<u64> =
                (1..=2).zip(put).filter(|(_, put)| *put).map(|p| p.0).collect();
            assert_eq!(values, expected);
        });
    }

    /// Two producers meet in the last free place.
    #[test]
    fn loom_ring_keeps_what_two_producers_put() {
        loom::model(|| {
            let ring = Arc::new(Ring::new(1));
            let other = Arc::clone(&ring);
            let producer = thread::spawn(move || other.push([1, !1]));
            let here = ring.push([2, !2]);
            let there = producer.join().unwrap();
            assert!(here ^ there, "one place takes one item");
            let [value, check] = ring.pop().expect("the item that was put");
            assert_eq!((value, check), if there { (1, !1) } else { (2, !2) });
            assert_eq!(ring.pop(), None);
        });
    }
}
