use super::*;

#[cfg(not(feature = "loom"))]
#[test]
fn jobs_are_claimed_in_order_and_only_in_their_generation() {
    let cursor = Cursor::new();
    let first = cursor.publish(2);
    assert_eq!(cursor.claim(first, 2), Some(0));
    assert_eq!(cursor.claim(first, 2), Some(1));
    assert_eq!(cursor.claim(first, 2), None);
    let second = cursor.publish(1);
    assert_eq!(cursor.claim(first, 2), None);
    assert_eq!(cursor.claim(second, 1), Some(0));
    let empty = cursor.publish(0);
    assert_eq!(cursor.claim(empty, 0), None);
    let full = cursor.publish(JOBS_MAX);
    assert!((0..JOBS_MAX).all(|job| cursor.claim(full, JOBS_MAX) == Some(job)));
}

#[cfg(not(feature = "loom"))]
#[test]
#[should_panic(expected = "jobs of the batch before are left")]
fn a_batch_ends_before_the_next_begins() {
    let cursor = Cursor::new();
    cursor.publish(1);
    cursor.publish(1);
}

/// Two batches over the same fields, a thread that publishes both, and two that claim. A claimer that has seen the first
/// batch may be late for it by any amount.
#[cfg(feature = "loom")]
#[test]
fn loom_a_late_thread_never_takes_a_job_of_the_next_batch() {
    use loom::{
        sync::{Arc, atomic::AtomicU64 as Word},
        thread,
    };

    /// What the jobs of a batch need. Rewritten for the next batch, without any order of its own.
    struct Board {
        cursor: Cursor,
        fields: [Word; 2],
        taken: Word,
    }

    impl Board {
        fn publish(&self, mark: u64) -> Generation {
            for (index, field) in self.fields.iter().enumerate() {
                field.store(mark + index as u64, Ordering::Relaxed);
            }
            self.cursor.publish(2)
        }

        fn take(&self, generation: Generation, mark: u64) -> u64 {
            let mut claimed = 0;
            while let Some(index) = self.cursor.claim(generation, 2) {
                assert_eq!(self.fields[index].load(Ordering::Relaxed), mark + index as u64);
                claimed += 1;
                self.taken.fetch_add(1, Ordering::AcqRel);
            }
            claimed
        }
    }

    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let fields = [Word::new(0), Word::new(0)];
        let board = Arc::new(Board { cursor: Cursor::new(), fields, taken: Word::new(0) });
        let first = board.publish(10);
        let claimers: Vec<_> = (0..2)
            .map(|_| {
                let board = Arc::clone(&board);
                thread::spawn(move || board.take(first, 10))
            })
            .collect();
        let mut own = board.take(first, 10);
        // The fields of a batch are free once all its jobs are taken, not once they are claimed.
        if board.taken.load(Ordering::Acquire) == 2 {
            let second = board.publish(20);
            own += board.take(second, 20);
            assert_eq!(
                board.taken.load(Ordering::Acquire),
                4,
                "nobody else knows the second batch"
            );
        }
        let others: u64 = claimers.into_iter().map(|claimer| claimer.join().unwrap()).sum();
        assert_eq!(own + others, board.taken.load(Ordering::Acquire));
        assert!(own + others == 2 || own + others == 4);
    });
}
