use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::*;
use crate::{
    budget::{BudgetTerm, Kind, RamBudget, Term},
    guard::Decision::{Keep, Shrink},
};

const MIB: u64 = 1 << 20;

#[derive(Debug)]
struct Told(&'static AtomicU64);

impl Probe for Told {
    fn read(&self) -> Reading {
        Reading { anonymous: None, headroom: Some(self.0.load(Relaxed)) }
    }
}

/// Two workers of one process see one shortage; the first one that is asked answers it.
#[test]
fn workers_of_a_process_share_one_guard() {
    static HEADROOM: AtomicU64 = AtomicU64::new(32 * MIB);
    let term = |name, bytes, kind| Term { name, bytes, kind };
    let budget = Budget {
        available: 1000 * MIB,
        limit: BudgetTerm::Host,
        terms: vec![
            term("trunk", 10 * MIB, Kind::Anonymous),
            term("kept free", 32 * MIB, Kind::Reserve),
        ],
        experts: RamBudget { bytes: 900 * MIB, term: BudgetTerm::Host },
    };
    let guard = MemoryGuard::new(&budget, Box::new(Told(&HEADROOM)));
    guard.promised(0, 200 * MIB);
    let cache = CacheBytes { planned: 100 * MIB, now: 100 * MIB, least: MIB, slot: MIB };
    assert_eq!(guard.check(cache), Keep);
    HEADROOM.store(2 * MIB, Relaxed);
    assert_eq!(guard.check(cache), Shrink(30 * MIB));
    HEADROOM.store(32 * MIB, Relaxed);
    guard.promised(100 * MIB, 70 * MIB);
    assert_eq!(guard.check(cache), Keep);
}

#[test]
fn the_kernel_says_what_this_process_holds() {
    let reading = SystemProbe.read();
    assert!(reading.anonymous.is_some_and(|bytes| bytes > 0), "{reading:?}");
    assert!(reading.headroom.is_some_and(|bytes| bytes > 0), "{reading:?}");
}
