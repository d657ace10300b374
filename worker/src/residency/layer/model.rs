//! Models of the slot table under one lock, as the store uses it: loaders write a slot's memory outside the lock, readers
//! read it outside the lock. Loom tries every interleaving.

use std::sync::Arc;

use loom::{
    sync::{Condvar, Mutex, RwLock},
    thread,
};

use super::*;

/// A slot's memory that notices a reader beside a writer.
type Memory = RwLock<u32>;

struct Table {
    layer: Mutex<LayerResidency<Memory>>,
    changed: Condvar,
}

const NOTHING: u32 = u32::MAX;

impl Table {
    fn new(slots: usize) -> Arc<Self> {
        let mut layer = LayerResidency::new(3, Rules { policy: Policy::Lru, guard: false });
        layer.attach((0..slots).map(|_| RwLock::new(NOTHING)));
        (0..3).for_each(|expert| layer.claim(expert));
        Arc::new(Self { layer: Mutex::new(layer), changed: Condvar::new() })
    }

    fn load(&self, expert: u32, Load { ticket, memory, .. }: Load<Memory>, ok: bool) {
        let mut slab = memory.try_write().expect("nobody reads a slot that is loaded");
        *slab = if ok { expert } else { NOTHING };
        drop(slab);
        let mut layer = self.layer.lock().unwrap();
        if ok {
            layer.complete(ticket, memory);
        } else {
            layer.fail(ticket, memory);
        }
        self.changed.notify_all();
    }

    /// One work on one expert. The first load fails if `fails` says so.
    fn work(&self, expert: u32, mut fails: bool) {
        let mut layer = self.layer.lock().unwrap();
        layer.begin_work(&[expert]);
        loop {
            match layer.demand(expert) {
                Demand::Hit(grant) => {
                    drop(layer);
                    let slab = grant.memory.try_read().expect("nobody writes a leased slot");
                    assert_eq!(*slab, expert, "the slot holds the expert");
                    drop(slab);
                    layer = self.layer.lock().unwrap();
                    layer.release(grant);
                    layer.end_work();
                    self.changed.notify_all();
                    return;
                }
                Demand::Load(load) => {
                    drop(layer);
                    self.load(expert, load, !std::mem::take(&mut fails));
                    layer = self.layer.lock().unwrap();
                }
                Demand::Loading(_) | Demand::Full => layer = self.changed.wait(layer).unwrap(),
            }
        }
    }

    fn hint(&self, expert: u32) {
        let load = self.layer.lock().unwrap().prefetch(expert);
        if let Ok(load) = load {
            self.load(expert, load, true);
        }
    }

    fn slots(&self) -> usize {
        let layer = self.layer.lock().unwrap();
        let counts = layer.counts();
        assert_eq!((counts.reserved, counts.leased), (0, 0));
        counts.free + counts.resident
    }
}

fn check(slots: usize, body: impl Fn(&Arc<Table>) + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let table = Table::new(slots);
        body(&table);
        assert_eq!(table.slots(), slots, "no slot is lost");
    });
}

#[test]
fn loom_two_works_share_one_slot() {
    check(1, |table| {
        let other = Arc::clone(table);
        let worker = thread::spawn(move || other.work(1, false));
        table.work(0, true);
        worker.join().unwrap();
    });
}

#[test]
fn loom_work_meets_a_prefetch_of_the_same_expert() {
    check(1, |table| {
        let other = Arc::clone(table);
        let pilot = thread::spawn(move || other.hint(0));
        table.work(0, false);
        pilot.join().unwrap();
    });
}

#[test]
fn loom_work_and_prefetch_want_the_last_slot() {
    check(1, |table| {
        let other = Arc::clone(table);
        let pilot = thread::spawn(move || {
            other.hint(1);
            other.hint(2);
        });
        table.work(0, false);
        pilot.join().unwrap();
    });
}

#[test]
fn loom_the_guard_shrinks_below_work() {
    check(2, |table| {
        let other = Arc::clone(table);
        let guard = thread::spawn(move || {
            let taken = other.layer.lock().unwrap().shrink(1);
            for memory in &taken {
                *memory.try_write().expect("memory that was taken has no reader") = NOTHING;
            }
            other.layer.lock().unwrap().attach(taken);
            other.changed.notify_all();
        });
        table.work(0, false);
        table.work(1, false);
        guard.join().unwrap();
    });
}
