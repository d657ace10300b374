//! A cluster in virtual time: the real decision cores of coordinators and workers around a model network, a model store and
//! synthetic arithmetic, with faults that follow from a seed.
//!
//! One seed is one schedule: which workers there are, what is sent when, what is delayed, doubled, overtaken or cut off, who
//! dies, stops, slows down or is restarted, whose clock jumps, which writes of the store are lost. After the faults the
//! cluster must heal. What must hold all the time:
//!
//! * the sums of every row are those of the reference: no stale, doubled or missing result;
//! * every layer ends: complete if copies could be reached all along, else as unavailable;
//! * generations grow, by one in the store and monotonically at every coordinator, each was written by who led then, and has
//!   one set of owners;
//! * no worker computes work of another run of its coordinator, and no coordinator serves by a generation before the
//!   workers that are there have loaded it;
//! * where everything is computed by two workers, a worker that computes other bytes gets none of them into a sum that was
//!   compared, and nobody else is taken out of service for it;
//! * after the faults requests complete again, and the placement is on those who are there.
//!
//! Whether the simulator would see it if one of the cores were wrong is shown by [`Mutation`]: the harness then lies to a
//! core, or for it, as if a check were missing.

mod arithmetic;
mod coordinator;
mod events;
mod faults;
mod network;
mod operator;
mod oracle;
mod tally;
mod transport;
mod worker;
mod world;

use std::{
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

pub use tally::Tally;
use world::World;

/// Container of the model cluster.
const DIGEST: &str = "41aa";
/// Layers of the model.
const LAYERS: u32 = 2;
/// Experts of each layer.
const EXPERTS: u32 = 4;

/// A bug that is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// A coordinator takes any result for the answer to what is out.
    FenceNotChecked,
    /// A coordinator adds the second answer to the same work as well.
    DuplicateAdded,
    /// A worker admits work of another run of its coordinator.
    StaleEpochAccepted,
    /// A placement is written without the condition that its author still leads.
    LeaderNotChecked,
    /// A coordinator takes workers for ready as soon as they are assigned something.
    ReadyNotAwaited,
    /// Nothing is computed twice, though it should be.
    AuditsLeftOut,
    /// When two workers disagree, the wrong one is taken out of service.
    OtherAccused,
    /// The bytes of two workers are taken for the same, whatever they are.
    ComparisonBlind,
    /// The answer to an earlier attempt is taken for that to the newest one, which may hold fewer rows.
    OldAttemptAccepted,
    /// What one worker takes in one message is believed of all.
    LimitOfAnother,
    /// Nobody tells which placement it follows, so that a store that went back is not noticed.
    FollowsNotTold,
    /// A worker is said to be drained when one coordinator does not count on it.
    DrainAskedOfOne,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::FenceNotChecked,
        Self::DuplicateAdded,
        Self::StaleEpochAccepted,
        Self::LeaderNotChecked,
        Self::ReadyNotAwaited,
        Self::AuditsLeftOut,
        Self::OtherAccused,
        Self::ComparisonBlind,
        Self::OldAttemptAccepted,
        Self::LimitOfAnother,
        Self::FollowsNotTold,
        Self::DrainAskedOfOne,
    ];
}

/// A schedule that broke a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The schedule.
    pub seed: u64,
    /// Which rule, and how.
    pub rule: String,
    /// What happened before; empty unless it was asked for.
    pub trace: Vec<String>,
}

/// Runs one schedule.
///
/// # Errors
/// A rule was broken.
pub fn run(seed: u64, mutation: Option<Mutation>, trace: bool) -> Result<Tally, Violation> {
    let mut world = World::new(seed, mutation, trace);
    match world.run() {
        Ok(tally) => Ok(tally),
        Err(rule) => Err(Violation { seed, rule, trace: world.into_trace() }),
    }
}

/// Runs many schedules on so many threads and stops at the first violation.
///
/// # Errors
/// The violation with the lowest seed of those that were found.
///
/// # Panics
/// A schedule panicked.
pub fn run_all(
    seeds: Range<u64>,
    mutation: Option<Mutation>,
    threads: usize,
) -> Result<Tally, Violation> {
    let next = AtomicU64::new(seeds.start);
    let result: Mutex<(Tally, Option<Violation>)> = Mutex::default();
    let work = || {
        let mut tally = Tally::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                break;
            }
            match run(seed, mutation, false) {
                Ok(one) => tally.add(&one),
                Err(violation) => {
                    next.store(seeds.end, Ordering::Relaxed);
                    let mut result = result.lock().unwrap_or_else(PoisonError::into_inner);
                    if result.1.as_ref().is_none_or(|found| violation.seed < found.seed) {
                        result.1 = Some(violation);
                    }
                    break;
                }
            }
        }
        result.lock().unwrap_or_else(PoisonError::into_inner).0.add(&tally);
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    let (tally, violation) = result.into_inner().unwrap_or_else(PoisonError::into_inner);
    violation.map_or(Ok(tally), Err)
}
