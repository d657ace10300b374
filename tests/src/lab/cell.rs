//! One cell of the fault matrix: a fault, when it comes, to which of how many, and what clients saw of it.

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::json;
use shimmer_coordinator::sampler::Sampling;
use shimmer_model::{
    NumericClass,
    tiny::{Preset, TinyOptions},
};

use super::{
    deployment::{Deployment, Plan, WorkerPlan},
    fault::{Fault, Trap},
    stream::{Progress, Timed},
};
use crate::{
    in_process::{InProcess, InProcessOptions},
    models::TinyModel,
    random,
    wait::wait_until,
    workload::{Job, Outcome},
};

/// For the moment of a phase to come.
const PHASE_DEADLINE: Duration = Duration::from_secs(60);
/// For a cluster to be whole again when its fault is over.
const MEND_DEADLINE: Duration = Duration::from_secs(90);
/// Events with tokens that every generation has given when a fault comes in mid-decode.
const DECODED: usize = 8;

/// What requests do when the fault comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// All read their prompts.
    Prefill,
    /// All give tokens.
    Decode,
    /// There are none; they come right after it.
    Idle,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Idle];

    /// As it stands in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Idle => "idle",
        }
    }
}

/// Conditions of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// What happens.
    pub fault: Fault,
    /// When.
    pub phase: Phase,
    /// Workers in all; the first of them is the victim.
    pub workers: usize,
    /// Copies of each expert.
    pub replicas: usize,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, phase, workers, replicas } = self;
        let copies =
            if *replicas == 1 { "no copies".to_owned() } else { format!("{replicas} copies") };
        write!(f, "{}, {}, 1 of {workers}, {copies}", fault.name(), phase.name())
    }
}

/// What clients saw of a fault.
#[derive(Debug)]
pub struct Seen {
    /// Requests that ran when the fault came.
    pub requests: usize,
    /// How those ended that failed; before, during or after the fault.
    pub failures: BTreeSet<String>,
    /// Number of those.
    pub failed: usize,
    /// Finished requests that gave other bytes than the undisturbed run in one process; before, during or after the fault.
    pub differing: usize,
    /// The fault came in its phase, and the cluster met it.
    pub struck: bool,
    /// For each finished request, by how much the longest delay of an event grew.
    pub stalls: Vec<Duration>,
    /// How long the cluster took to be whole when the fault was over; none if it was not.
    pub mended: Option<Duration>,
}

impl Seen {
    /// Nothing was lost and no byte is another one.
    pub fn is_clean(&self) -> bool {
        self.failed == 0 && self.differing == 0 && self.struck && self.mended.is_some()
    }

    /// The added stall that a share of the requests does not exceed.
    pub fn stall(&self, percent: usize) -> Duration {
        percentile(&self.stalls, percent)
    }
}

/// The value that a share of all does not exceed; zero if there are none.
pub fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let last = sorted.len().saturating_sub(1);
    sorted.get((last * percent).div_ceil(100)).copied().unwrap_or_default()
}

/// A model, workloads for each phase, and what they give undisturbed.
#[derive(Debug)]
pub struct Bench {
    _model: TinyModel,
    container: PathBuf,
    prefill: Workload,
    decode: Workload,
    /// How long a stopped process stands still.
    pub stopped: Duration,
    /// Nodes of the etcd in which members find each other; 0 for a list.
    pub etcd: usize,
}

#[derive(Debug)]
struct Workload {
    jobs: Vec<Job>,
    expected: Vec<Outcome>,
}

impl Bench {
    /// Makes the model and runs the workloads in one process.
    ///
    /// # Panics
    /// They cannot be run.
    pub fn new() -> Self {
        let config = json!({
            "num_hidden_layers": 6, "n_routed_experts": 32, "max_position_embeddings": 2048
        });
        let config = config.as_object().cloned().unwrap_or_default();
        let options = TinyOptions { config, ..TinyOptions::default() };
        let model = TinyModel::with_options(Preset::Glm4Moe, &options);
        let container = model.container(NumericClass::default());
        let engine = InProcess::with_options(&InProcessOptions::new(&container));
        let workload = |jobs: Vec<Job>| {
            let expected = engine.run_together(&jobs);
            Workload { jobs, expected }
        };
        let prefill = workload(jobs(1000, 8));
        let decode = workload(jobs(3, 160));
        drop(engine);
        let stopped = Duration::from_secs(30);
        Self { _model: model, container, prefill, decode, stopped, etcd: 0 }
    }

    /// The container directory.
    pub fn container(&self) -> &Path {
        &self.container
    }

    /// A cluster as the matrix has it, before any trap.
    pub fn plan(&self, workers: usize, replicas: usize) -> Plan {
        // Steps of few rows, so that a prompt takes many.
        let mut args = vec!["--prefill-chunk", "16", "--step-rows", "64"];
        let copies = replicas.to_string();
        if replicas > 1 {
            args.extend(["--replicas", &copies]);
        }
        Plan {
            etcd: self.etcd,
            member_args: Vec::new(),
            container: self.container.clone(),
            workers: vec![WorkerPlan::default(); workers],
            args: args.into_iter().map(str::to_owned).collect(),
        }
    }

    /// Runs one cell on a cluster of its own.
    ///
    /// # Errors
    /// Why this machine cannot have it.
    ///
    /// # Panics
    /// The cluster does not start.
    pub fn run(&self, cell: Cell) -> Result<Seen, String> {
        let victim = 0;
        let mut plan = self.plan(cell.workers, cell.replicas);
        let trap = Trap::prepare(cell.fault, victim, &mut plan)?;
        let mut cluster = Deployment::start(&plan)?;
        // A slab is compared when it is read for the first time: nothing may run before its bit flips.
        let warm = cell.fault != Fault::FlippedSlab;
        Ok(self.watch(&mut cluster, cell.phase, warm, |cluster| {
            let aimed = trap.aim(cluster);
            move |cluster: &mut Deployment| {
                let lasting = aimed.strike(cluster);
                move |cluster: &mut Deployment| {
                    let met = lasting.was_met(cluster);
                    lasting.end(cluster, self.stopped);
                    let mended = mended(cluster, cell.fault, victim);
                    (met, mended)
                }
            }
        }))
    }

    /// Runs the workload of a phase before, during and after something. `aim` prepares it, what that returns lets it happen,
    /// and what that returns ends it, and says whether it was met and how long the cluster took to be whole again.
    pub(super) fn watch<Strike, End>(
        &self,
        cluster: &mut Deployment,
        phase: Phase,
        warm: bool,
        aim: impl FnOnce(&mut Deployment) -> Strike,
    ) -> Seen
    where
        Strike: FnOnce(&mut Deployment) -> End + Send,
        End: FnOnce(&mut Deployment) -> (bool, Option<Duration>) + Send,
    {
        let workload = match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode | Phase::Idle => &self.decode,
        };
        let quiet = |cluster: &mut Deployment| cluster.run(&workload.jobs, |_, _| ()).0;
        let before = warm.then(|| quiet(cluster));

        let strike = aim(cluster);
        let (during, (end, in_time)) = if phase == Phase::Idle {
            let end = strike(cluster);
            (quiet(cluster), (end, true))
        } else {
            cluster.run(&workload.jobs, |cluster, progress| {
                wait_for_phase(phase, progress);
                let end = strike(cluster);
                (end, is_in_phase(phase, progress))
            })
        };
        let (met, mended) = end(cluster);
        let after = quiet(cluster);

        let undisturbed = before.as_ref().unwrap_or(&after);
        let all = [before.as_deref().unwrap_or_default(), &during, &after];
        let failures =
            all.iter().copied().flatten().filter_map(|timed| timed.outcome.as_ref().err());
        Seen {
            requests: during.len(),
            failed: failures.clone().count(),
            failures: failures.map(|status| status.message().to_owned()).collect(),
            differing: all.iter().map(|run| differing(run, &workload.expected)).sum(),
            struck: met && in_time,
            stalls: stalls(&during, undisturbed),
            mended,
        }
    }
}

impl Default for Bench {
    fn default() -> Self {
        Self::new()
    }
}

/// Prompts of their own, half of them greedy and half sampled.
fn jobs(prompt: usize, max_tokens: u32) -> Vec<Job> {
    let job = |seed: u64| Job {
        prompt: random::tokens(seed, prompt, 256),
        max_tokens,
        sampling: Sampling {
            temperature: if seed.is_multiple_of(2) { 0.0 } else { 0.9 },
            seed,
            ..Sampling::default()
        },
    };
    (200..206).map(job).collect()
}

fn wait_for_phase(phase: Phase, progress: &Progress) {
    wait_until("the phase to begin", PHASE_DEADLINE, || {
        let begun = match phase {
            Phase::Prefill => progress.all_started(),
            Phase::Decode | Phase::Idle => progress.least() >= DECODED,
        };
        begun || progress.ended() > 0
    });
}

fn is_in_phase(phase: Phase, progress: &Progress) -> bool {
    progress.ended() == 0 && (phase != Phase::Prefill || progress.none_decodes())
}

fn differing(run: &[Timed], expected: &[Outcome]) -> usize {
    let differs = |(timed, expected): &(&Timed, &Outcome)| {
        timed.outcome.as_ref().is_ok_and(|outcome| outcome != *expected)
    };
    run.iter().zip(expected).filter(differs).count()
}

fn stalls(run: &[Timed], undisturbed: &[Timed]) -> Vec<Duration> {
    let finished = run.iter().zip(undisturbed).filter(|(timed, _)| timed.outcome.is_ok());
    finished
        .map(|(timed, quiet)| {
            let added =
                timed.gaps.iter().zip(&quiet.gaps).map(|(gap, usual)| gap.saturating_sub(*usual));
            added.max().unwrap_or_default()
        })
        .collect()
}

/// How long the victim took to be what it has to be: serving, or out of service if it computed differently.
fn mended(cluster: &Deployment, fault: Fault, victim: usize) -> Option<Duration> {
    let wanted = if fault == Fault::FlippedMemory { "quarantined" } else { "serving" };
    let begun = Instant::now();
    while begun.elapsed() < MEND_DEADLINE {
        if cluster.state_of(victim).is_some_and(|status| status.state == wanted) {
            return Some(begun.elapsed());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}
