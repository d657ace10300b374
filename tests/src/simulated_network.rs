//! The real gRPC stack in a simulated network: the coordinator's transport and engine and the workers' servers, over the
//! sockets of `turmoil`, with faults that follow from a seed.
//!
//! Where [`simulator`](crate::simulator) runs the cores around a model of everything else, here is everything else: HTTP/2,
//! tonic, the links and sessions, the ledger, the servers, and the arithmetic of a small model. The network, the clocks and
//! the processes are simulated on one thread; while the engine computes, time stands still. Each generation must give the
//! bytes of an undisturbed run in one process, whatever is cut, held back, reset, restarted or repeated meanwhile, and none
//! may be lost: see [`Bench::run`].
//!
//! Relays between the two sides double results, hold them back, and repeat those of earlier steps and ended sessions. That
//! the comparison would see one that is taken is shown by [`Planted`]: a relay then gives an old result the stamp of the one
//! that is awaited, so that the coordinator takes it.

mod coordinator;
mod faults;
mod host;
mod relay;
mod world;

use std::{path::PathBuf, sync::Arc};

use shimmer_coordinator::{
    dispatch::FaultCounts, engine::GenerationError, sampler::Sampling, transport::RemoteCounters,
};
use shimmer_model::{
    Container, NumericClass,
    tiny::{Preset, TinyOptions},
};

pub use faults::Injected;

use crate::{
    dice::Dice,
    in_process::InProcess,
    models::TinyModel,
    random,
    workload::{Job, Outcome},
};
use coordinator::Coordinator;
use host::Order;
use world::World;

/// Generations that are run at least, and at most while faults are to come.
const GENERATIONS: std::ops::Range<usize> = 6..24;
/// Attempts of a generation that finds no worker, where the coordinator has no copy of the experts.
const ATTEMPTS: usize = 20;

/// A bug that is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// A result of an earlier step is taken for the one that is awaited.
    StaleStepTaken,
    /// A result of a session that has ended is.
    OldSessionTaken,
}

impl Planted {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::StaleStepTaken, Self::OldSessionTaken];
}

/// A rule that was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The schedule.
    pub seed: u64,
    /// Which rule, and how.
    pub rule: String,
    /// Which faults came when.
    pub trace: Vec<String>,
}

/// What happened in schedules that broke no rule: shows that the faults do something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Schedules.
    pub schedules: u64,
    /// Milliseconds of simulated time.
    pub turns: u64,
    /// Generations that gave the right bytes.
    pub generations: u64,
    /// Generations that found no worker, and were asked for again.
    pub unavailable: u64,
    /// Coordinators that were started again.
    pub restarts: u64,
    /// What was done to network, processes and clocks.
    pub injected: Injected,
    /// Connections that were made.
    pub connects: u64,
    /// Sessions that were lost.
    pub losses: u64,
    /// Health probes.
    pub probes: u64,
    /// Works that were sent to another worker because the first was lost.
    pub resent: u64,
    /// Works that were sent to another worker because the first was late.
    pub hedged: u64,
    /// Works that were computed on the coordinator's own copy.
    pub own_copies: u64,
    /// Works that two workers computed.
    pub audits: u64,
    /// Results that relays passed on twice.
    pub doubled: u64,
    /// Results of earlier work that relays repeated.
    pub repeated: u64,
    /// Of these, those of ended sessions.
    pub of_old_sessions: u64,
    /// Results that relays held back.
    pub held: u64,
    /// Works that relays repeated.
    pub asked_again: u64,
    /// Results that were not awaited, and were dropped.
    pub dropped: u64,
    /// Works that workers refused as stale.
    pub stale_works: u64,
}

macro_rules! add {
    ($to:expr, $from:expr, $($name:ident),*) => { $($to.$name += $from.$name;)* };
}

impl Tally {
    /// Adds what other schedules did.
    pub fn add(&mut self, other: &Self) {
        add!(self, other, schedules, turns, generations, unavailable, restarts, connects, losses);
        add!(self, other, probes, resent, hedged, own_copies, audits, doubled, repeated);
        add!(self, other, of_old_sessions, held, asked_again, dropped, stale_works);
        let (to, from) = (&mut self.injected, &other.injected);
        add!(to, from, partitions, one_way, cut_open, holds, slow, crashes, stops, resets, jumps);
    }

    /// Takes what a coordinator has counted when it ends.
    fn count(&mut self, (links, faults): (RemoteCounters, FaultCounts)) {
        self.connects += links.connects;
        self.losses += links.losses;
        self.probes += links.probes;
        let dropped = links.dropped;
        self.dropped += dropped.duplicate + dropped.stale + dropped.unknown;
        self.resent += faults.resent;
        self.hedged += faults.hedged;
        self.own_copies += faults.own_copies;
        self.audits += faults.audits;
    }
}

/// Conditions of a schedule.
#[derive(Debug, Clone)]
struct Setup {
    seed: u64,
    workers: usize,
    replicas: usize,
    /// The coordinator can compute every expert itself.
    own_copy: bool,
    audit_per_10k: u32,
    /// Workers that are behind a relay, as bits.
    relays: usize,
    planted: Option<Planted>,
}

impl Setup {
    fn draw(seed: u64, planted: Option<Planted>, dice: &mut Dice) -> Self {
        let workers = 2 + dice.below(2);
        let relays = dice.below(1 << workers);
        Self {
            seed,
            workers,
            replicas: 1 + dice.below(2),
            own_copy: dice.chance(50),
            audit_per_10k: if dice.chance(30) && planted.is_none() { 3000 } else { 0 },
            relays: if planted.is_some() { (1 << workers) - 1 } else { relays },
            planted,
        }
    }
}

/// A model, a workload, and what it gives undisturbed.
#[derive(Debug)]
pub struct Bench {
    _model: TinyModel,
    path: PathBuf,
    container: Arc<Container>,
    jobs: Vec<(Job, Outcome)>,
}

impl Bench {
    /// Makes the model and runs the workload in one process.
    ///
    /// # Panics
    /// It cannot be run.
    pub fn new() -> Self {
        let model = TinyModel::with_options(Preset::Glm4Moe, &TinyOptions::default());
        let path = model.container(NumericClass::default());
        let container = Arc::new(Container::open(&path).expect("the container opens"));
        let engine = InProcess::start(&path);
        let jobs = jobs().into_iter().map(|job| {
            let outcome = engine.run(&job);
            (job, outcome)
        });
        let jobs = jobs.collect();
        drop(engine);
        Self { _model: model, path, container, jobs }
    }

    /// Runs one schedule.
    ///
    /// # Errors
    /// A rule was broken: a generation gave other bytes than the undisturbed run, or failed although somebody could compute
    /// its experts, or the cluster was not whole again after the faults.
    pub fn run(&self, seed: u64, planted: Option<Planted>) -> Result<Tally, Violation> {
        let mut dice = Dice::new(seed);
        let setup = Setup::draw(seed, planted, &mut dice);
        let world = World::start(&setup, &self.path);
        let told = |rule| {
            let trace = [format!("{setup:?}")].into_iter().chain(world.trace()).collect();
            Violation { seed, rule, trace }
        };
        self.schedule(&world, &setup, &mut dice).map_err(told)
    }

    fn schedule(&self, world: &World, setup: &Setup, dice: &mut Dice) -> Result<Tally, String> {
        let mut tally = Tally { schedules: 1, ..Tally::default() };
        let mut coordinator = Coordinator::start(world, setup, &self.container)?;
        world.host.order(Order::Trouble);
        let mut done = 0;
        while done < GENERATIONS.start || (!world.troubles_are_over() && done < GENERATIONS.end) {
            let (job, expected) = &self.jobs[done % self.jobs.len()];
            for attempt in 1.. {
                match coordinator.generate(job) {
                    Ok(outcome) if outcome == *expected => break,
                    Ok(outcome) => {
                        return Err(format!(
                            "generation {done} gave other bytes: {outcome:?}, undisturbed {expected:?}"
                        ));
                    }
                    Err(GenerationError::Unavailable { .. })
                        if !setup.own_copy && attempt < ATTEMPTS =>
                    {
                        tally.unavailable += 1;
                    }
                    Err(error) => return Err(format!("generation {done} is lost: {error}")),
                }
                coordinator = self.restart(coordinator, world, setup, &mut tally, dice)?;
            }
            done += 1;
            tally.generations += 1;
            if dice.chance(15) {
                coordinator = self.restart(coordinator, world, setup, &mut tally, dice)?;
            }
        }
        world.host.order(Order::Heal);
        coordinator = self.restart(coordinator, world, setup, &mut tally, dice)?;
        let (job, expected) = &self.jobs[0];
        let healed = coordinator.generate(job);
        if healed.as_ref().ok() != Some(expected) {
            return Err(format!("after the faults a generation gave {healed:?}"));
        }
        tally.count(coordinator.end());
        tally.turns = world.turns();
        tally.injected = world.injected();
        tally.stale_works = world.stale_works();
        for meddled in world.meddled() {
            add!(tally, meddled, doubled, repeated, of_old_sessions, held, asked_again);
        }
        Ok(tally)
    }

    /// Another process, which knows of nothing and has another epoch.
    fn restart(
        &self,
        before: Coordinator,
        world: &World,
        setup: &Setup,
        tally: &mut Tally,
        dice: &mut Dice,
    ) -> Result<Coordinator, String> {
        tally.restarts += 1;
        tally.count(before.end());
        if dice.chance(50) {
            world.host.order(Order::Restart);
        }
        Coordinator::start(world, setup, &self.container)
    }
}

impl Default for Bench {
    fn default() -> Self {
        Self::new()
    }
}

/// Prompts of several steps, greedy and sampled.
fn jobs() -> Vec<Job> {
    let job = |seed: u64, length, max_tokens| Job {
        prompt: random::tokens(seed, length, 200),
        max_tokens,
        sampling: Sampling {
            temperature: if seed.is_multiple_of(2) { 0.0 } else { 0.9 },
            seed,
            ..Sampling::default()
        },
    };
    vec![job(1, 5, 16), job(2, 30, 10), job(3, 12, 14)]
}
