use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn scheduler(
    max_batch_rows: usize,
    prefill_chunk: usize,
    max_running: usize,
    pages: u32,
) -> Scheduler {
    Scheduler::new(
        StepLimits { max_batch_rows, prefill_chunk, max_running },
        PageAllocator::new(pages),
    )
}

fn admit_all(scheduler: &mut Scheduler) -> Vec<u64> {
    std::iter::from_fn(|| scheduler.admit()).map(|id| id.0).collect()
}

/// Plans a step, computes it, lets every finished prompt generate a token; returns (id, first, rows, last).
fn step(scheduler: &mut Scheduler) -> Vec<(u64, usize, usize, bool)> {
    let mut spans = Vec::new();
    scheduler.plan(&mut spans);
    for span in &spans {
        scheduler.advance(*span);
        if span.last {
            scheduler.extend(span.id);
        }
    }
    spans.iter().map(|span| (span.id.0, span.first, span.rows, span.last)).collect()
}

#[test]
fn decode_rows_go_before_prompt_chunks() {
    let mut scheduler = scheduler(8, 4, 4, 100);
    scheduler.enqueue(SequenceId(1), 1, 10);
    scheduler.enqueue(SequenceId(2), 6, 20);
    assert_eq!(admit_all(&mut scheduler), [1, 2]);
    assert_eq!(step(&mut scheduler), [(1, 0, 1, true), (2, 0, 4, false)]);
    scheduler.enqueue(SequenceId(3), 9, 20);
    assert_eq!(admit_all(&mut scheduler), [3]);
    assert_eq!(step(&mut scheduler), [(1, 1, 1, true), (2, 4, 2, true), (3, 0, 4, false)]);
    assert_eq!(step(&mut scheduler), [(1, 2, 1, true), (2, 6, 1, true), (3, 4, 4, false)]);
    assert_eq!(step(&mut scheduler), [(1, 3, 1, true), (2, 7, 1, true), (3, 8, 1, true)]);
}

#[test]
fn a_chunk_leaves_a_row_for_every_prompt_behind_it() {
    let mut scheduler = scheduler(4, 64, 3, 100);
    for id in 1..=3 {
        scheduler.enqueue(SequenceId(id), 10, 12);
    }
    admit_all(&mut scheduler);
    assert_eq!(step(&mut scheduler), [(1, 0, 2, false), (2, 0, 1, false), (3, 0, 1, false)]);
}

#[test]
fn admission_is_in_order_and_reserves_everything() {
    let mut scheduler = scheduler(8, 4, 4, 3);
    scheduler.enqueue(SequenceId(1), 60, 65);
    scheduler.enqueue(SequenceId(2), 60, 128);
    scheduler.enqueue(SequenceId(3), 1, 1);
    // Sequence 3 would fit, but 2 is before it.
    assert_eq!(admit_all(&mut scheduler), [1]);
    assert_eq!(scheduler.pages(SequenceId(1)), [0, 1]);
    assert!(scheduler.remove(SequenceId(1)));
    assert!(!scheduler.remove(SequenceId(1)));
    assert_eq!(admit_all(&mut scheduler), [2, 3]);
    assert!(scheduler.remove(SequenceId(3)) && scheduler.remove(SequenceId(2)));
    assert!(scheduler.is_idle());
}

#[derive(Clone, Debug)]
enum Action {
    Enqueue { prompt: usize, more: usize },
    Cancel(usize),
    Step,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (1_usize..200, 0_usize..100).prop_map(|(prompt, more)| Action::Enqueue { prompt, more }),
        (0_usize..20).prop_map(Action::Cancel),
        Just(Action::Step),
        Just(Action::Step),
    ]
}

proptest! {
    /// Whatever comes: rows stay below the limit, every running sequence advances in every step, pages are never shared,
    /// admission keeps the order, and in the end every page is free again.
    #[test]
    fn invariants(
        actions in prop::collection::vec(action(), 1..80),
        rows in 1_usize..40, chunk in 1_usize..40, running in 1_usize..6, pages in 5_u32..12,
    ) {
        let mut scheduler = scheduler(rows, chunk, running.min(rows), pages);
        let mut next = 0;
        let mut waiting: Vec<u64> = Vec::new();
        // Per running sequence: computed, known, and the known count at which it ends.
        let mut batch: BTreeMap<u64, (usize, usize, usize)> = BTreeMap::new();
        let mut shapes: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
        for action in actions.into_iter().chain(std::iter::repeat_n(Action::Step, 2000)) {
            match action {
                Action::Enqueue { prompt, more } => {
                    scheduler.enqueue(SequenceId(next), prompt, prompt + more);
                    shapes.insert(next, (prompt, prompt + more));
                    waiting.push(next);
                    next += 1;
                }
                Action::Cancel(nth) => {
                    let all: Vec<u64> = waiting.iter().chain(batch.keys()).copied().collect();
                    if let Some(id) = all.get(nth) {
                        prop_assert!(scheduler.remove(SequenceId(*id)));
                        waiting.retain(|waiting| waiting != id);
                        batch.remove(id);
                    }
                }
                Action::Step => {
                    for id in admit_all(&mut scheduler) {
                        prop_assert_eq!(waiting.remove(0), id);
                        batch.insert(id, (0, shapes[&id].0, shapes[&id].1));
                    }
                    let mut spans = Vec::new();
                    scheduler.plan(&mut spans);
                    prop_assert!(spans.iter().map(|span| span.rows).sum::<usize>() <= rows);
                    let planned: BTreeSet<u64> = spans.iter().map(|span| span.id.0).collect();
                    prop_assert_eq!(planned.len(), spans.len());
                    prop_assert!(planned.iter().eq(batch.keys()));
                    let used: Vec<u32> = batch.keys().flat_map(|id| scheduler.pages(SequenceId(*id)).to_vec()).collect();
                    prop_assert_eq!(used.iter().collect::<BTreeSet<_>>().len(), used.len());
                    for span in spans {
                        let (computed, known, end) = batch[&span.id.0];
                        prop_assert!(span.rows > 0 && span.rows <= chunk.max(1));
                        prop_assert_eq!((span.first, span.last), (computed, span.first + span.rows == known));
                        scheduler.advance(span);
                        if span.last && known == end {
                            prop_assert!(scheduler.remove(span.id));
                            batch.remove(&span.id.0);
                        } else {
                            if span.last {
                                scheduler.extend(span.id);
                            }
                            batch.insert(span.id.0, (computed + span.rows, known + usize::from(span.last), end));
                        }
                    }
                    if batch.is_empty() && waiting.is_empty() {
                        break;
                    }
                }
            }
        }
        // Every step moves every running sequence, so all of them ended.
        if waiting.is_empty() && batch.is_empty() {
            prop_assert!(scheduler.is_idle());
            prop_assert_eq!(scheduler.pages.available(), pages as usize);
        } else {
            prop_assert!(chunk.min(rows) < 8, "{waiting:?} {batch:?}");
        }
    }
}
