//! `shimmer plan --hosts`: a cluster that is not there yet.

mod shown;

use std::{num::NonZeroU32, path::PathBuf};

use clap::Args;
use shimmer_coordinator::{
    engine::{EngineConfig, EngineMemory},
    placement::PlacedLayer,
};
use shimmer_kernels::PAGE_POSITIONS;
use shimmer_model::Container;
use shimmer_worker::{
    Error as WorkerError, TierOptions,
    budget::{Available, Budget, BudgetTerm, RamBudget},
    residency::Rules,
};

use crate::{
    commands::size,
    config::PlanSettings,
    error::Error,
    forecast::{
        Costs, ForecastError, Hosts, Load, Memory, Placed, Prediction, Replayed, Shape, Trace,
        Worker, place, predict, replay,
    },
    local::refuse_worker,
    output,
};

/// Coordinators of a worker, whose messages it keeps memory for: as of `worker`.
const COORDINATORS: usize = 8;
/// Assumed routing is the same every time.
const SEED: u64 = 1;

/// Flags of a planned cluster.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// TOML file with hosts, workers and the network between them
    #[arg(long, value_name = "FILE", help_heading = "Cluster")]
    hosts: Option<PathBuf>,

    /// Times that `shimmer bench --calibrate FILE` measured for this container; without it they follow from bandwidths
    #[arg(long, value_name = "FILE", requires = "hosts", help_heading = "Cluster")]
    calibration: Option<PathBuf>,

    /// Recorded routing to replay; without it every expert is as likely as any other
    #[arg(long, value_name = "FILE", requires = "hosts", help_heading = "Cluster")]
    simulate: Option<PathBuf>,

    /// Tokens of the prompt, 512 unless given; of a recorded routing they are known
    #[arg(
        long,
        value_name = "TOKENS",
        requires = "hosts",
        conflicts_with = "simulate",
        help_heading = "Cluster"
    )]
    prompt: Option<NonZeroU32>,

    /// Tokens generated after the first one, 128 unless given
    #[arg(
        long,
        value_name = "TOKENS",
        requires = "hosts",
        conflicts_with = "simulate",
        help_heading = "Cluster"
    )]
    decode: Option<NonZeroU32>,

    /// Sequences that are decoded at the same time, 1 unless given
    #[arg(
        long,
        value_name = "COUNT",
        requires = "hosts",
        conflicts_with = "simulate",
        help_heading = "Cluster"
    )]
    batch: Option<NonZeroU32>,
}

impl ClusterArgs {
    pub(super) fn is_asked_for(&self) -> bool {
        self.hosts.is_some()
    }
}

/// Everything that a prediction is made from.
struct Planned {
    placed: Placed,
    load: Load,
    costs: Option<Costs>,
    batch: u32,
    prediction: Prediction,
}

/// Plans the cluster of a file.
///
/// # Errors
/// A file cannot be used, or the cluster does not fit.
pub(super) fn run(
    container: &Container,
    settings: &PlanSettings,
    args: &ClusterArgs,
    as_json: bool,
) -> Result<(), Error> {
    refuse_other(settings)?;
    let path = args.hosts.as_ref().expect("asked for");
    let hosts = Hosts::read(path).map_err(refused)?;
    let costs = args.calibration.as_deref().map(Costs::read).transpose().map_err(refused)?;
    if let Some(costs) = costs.as_ref().filter(|costs| costs.container != container.digest()) {
        return Err(Error::refused(format!(
            "the calibration is of container {}, this one is {}",
            costs.container,
            container.digest()
        ))
        .with_hint("run `shimmer bench --calibrate FILE` with this container"));
    }
    let planned = make(container, &hosts, costs, args)?;
    if as_json {
        return output::json(&shown::json(&hosts, &planned));
    }
    output::line(&shown::tiers(&hosts, &planned))?;
    output::line(&shown::times(&planned))
}

/// Refuses keys that mean this host.
fn refuse_other(settings: &PlanSettings) -> Result<(), Error> {
    let given = [
        ("--in-process", settings.in_process == Some(true)),
        ("--workers", settings.workers.is_some()),
        ("--worker-weights", settings.worker_weights.is_some()),
        ("--cap", settings.cap.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Error::refused(format!("{flag} contradicts --hosts"))
            .with_hint("write the workers with their weight, ram and cap into the file of hosts")),
        None => Ok(()),
    }
}

fn refused(error: ForecastError) -> Error {
    Error::refused(error.to_string()).with_hint("docs/PLANNING.md has every key with its unit")
}

fn unfit(text: String) -> Error {
    Error::refused(text).with_hint("add hosts or memory, or give workers a cap that fits")
}

fn make(
    container: &Container,
    hosts: &Hosts,
    costs: Option<Costs>,
    args: &ClusterArgs,
) -> Result<Planned, Error> {
    let layers = layers_of(container)?;
    let chunk = hosts.coordinator.prefill_chunk.unwrap_or(256);
    let options: Vec<TierOptions> = hosts
        .workers()
        .map(|(_, worker)| TierOptions {
            cap: worker.cap.map(NonZeroU32::get),
            ..TierOptions::default()
        })
        .collect();
    let budgets = budgets(container, hosts, &options)?;
    check_drives(container, hosts).map_err(unfit)?;
    check_trunk(container, hosts, chunk).map_err(unfit)?;
    let placed = place(hosts, &layers, &container.absent_layers(), &budgets, &options)
        .map_err(|error| unfit(error.to_string()))?;
    let counts: Vec<(u32, u32)> = layers.iter().map(|layer| (layer.layer, layer.experts)).collect();
    let batch = args.batch.map_or(1, NonZeroU32::get);
    let (trace, prompt) = match &args.simulate {
        Some(path) => {
            let trace = Trace::read(path).map_err(refused)?;
            trace.check(&counts).map_err(Error::refused)?;
            let prompt = trace.prompt();
            (trace, prompt)
        }
        None => {
            let prompt = args.prompt.map_or(512, NonZeroU32::get);
            let decode = args.decode.map_or(128, NonZeroU32::get);
            check_lengths(container, hosts, [prompt, decode, batch])?;
            let shape = Shape {
                layers: &counts,
                top_k: container.config().gating.map_or(0, |gating| gating.top_k),
                prompt,
                chunk,
                decode,
                batch,
                seed: SEED,
            };
            (Trace::uniform(&shape), prompt)
        }
    };
    let steps = steady(&trace, &placed, &counts);
    let load = load_of(container, &layers, prompt, hosts);
    let prediction =
        predict(&steps, hosts, &placed.workers, &load, costs.as_ref()).map_err(Error::refused)?;
    Ok(Planned { placed, load, costs, batch, prediction })
}

/// Refuses requests that no coordinator of this container would take.
fn check_lengths(
    container: &Container,
    hosts: &Hosts,
    [prompt, decode, batch]: [u32; 3],
) -> Result<(), Error> {
    let context = container.config().max_position;
    let beyond = |text: String, hint: &str| Err(Error::refused(text).with_hint(hint));
    if prompt as usize > context {
        let text = format!("--prompt {prompt}: the model's context has {context} tokens");
        return beyond(text, "give --prompt a length that fits, prompt and answer together");
    }
    let left = context - prompt as usize;
    if decode as usize > left {
        let text = format!(
            "--decode {decode}: behind a prompt of {prompt}, the model's context of {context} tokens has room for {left}"
        );
        return beyond(text, "give --prompt and --decode lengths that fit together");
    }
    let running = hosts.coordinator.max_sequences.unwrap_or(EngineConfig::default().max_running);
    if batch as usize > running {
        let text = format!("--batch {batch}: the coordinator decodes {running} at the same time");
        return beyond(
            text,
            "raise coordinator.max-sequences in the file of hosts, or lower --batch",
        );
    }
    Ok(())
}

/// The trace once to fill the caches, and once more for what counts.
fn steady(trace: &Trace, placed: &Placed, counts: &[(u32, u32)]) -> Vec<Replayed> {
    let memory =
        |(index, worker)| Memory::new(worker, &placed.placement, index, counts, Rules::default());
    let mut memories: Vec<Memory> = placed.workers.iter().enumerate().map(memory).collect();
    replay(trace, &placed.placement, &mut memories);
    replay(trace, &placed.placement, &mut memories)
}

fn layers_of(container: &Container) -> Result<Vec<PlacedLayer>, Error> {
    let layer = |(layer, experts)| {
        let layout = container.expert_layout(layer).map_err(|error| {
            Error::failed(format!("cannot use the container {}", container.dir().display()), error)
        })?;
        Ok(PlacedLayer { layer, experts, slab_bytes: layout.slab_bytes() as u64 })
    };
    container.config().moe_layers().map(layer).collect()
}

/// Memory for experts of each worker, by its own budget.
fn budgets(
    container: &Container,
    hosts: &Hosts,
    options: &[TierOptions],
) -> Result<Vec<RamBudget>, Error> {
    let here = std::thread::available_parallelism().map_or(1, usize::from);
    let of = |((host, worker), options): ((usize, &Worker), &TierOptions)| {
        let available = Available { host: Some(worker.ram.0), group: None };
        let threads = hosts.host[host].threads.unwrap_or(here);
        Budget::of_worker_with(available, container, options, threads, COORDINATORS)
            .map(|budget| RamBudget { term: BudgetTerm::Planned, ..budget.experts })
            .map_err(|mut error| {
                // What is available to it is what the file says, and nothing of this host.
                if let WorkerError::NoRoom { term, .. } = &mut error {
                    *term = BudgetTerm::Planned;
                }
                let text = format!("worker {}: {error}", worker.id);
                match refuse_worker(error) {
                    Error::Refused { .. } => unfit(text),
                    other => other,
                }
            })
    };
    hosts.workers().zip(options).map(of).collect()
}

/// Every worker reads its own copy of the container.
fn check_drives(container: &Container, hosts: &Hosts) -> Result<(), String> {
    let bytes: u64 = container.manifest().files.iter().map(|file| file.bytes).sum();
    for (_, worker) in hosts.workers() {
        if let Some(nvme) = worker.nvme.filter(|nvme| nvme.0 < bytes) {
            return Err(format!(
                "worker {}: its nvme of {} does not hold the container of {}",
                worker.id,
                size(nvme.0),
                size(bytes)
            ));
        }
    }
    Ok(())
}

/// The coordinator's memory.
fn check_trunk(container: &Container, hosts: &Hosts, chunk: u32) -> Result<(), String> {
    let Some(ram) = hosts.coordinator.ram else { return Ok(()) };
    let defaults = EngineConfig::default();
    let config = EngineConfig {
        prefill_chunk: chunk as usize,
        kv_budget_bytes: hosts.coordinator.kv_budget.map_or(defaults.kv_budget_bytes, |kv| kv.0),
        max_running: hosts.coordinator.max_sequences.unwrap_or(defaults.max_running),
        ..defaults
    };
    let EngineMemory { trunk, kv, buffers, tokenizer } = EngineMemory::of(container, &config);
    let needed = [trunk, kv, buffers, tokenizer].into_iter().fold(0, u64::saturating_add);
    if needed > ram.0 {
        return Err(format!(
            "the coordinator needs {} (trunk {}, KV cache {}, rows {}, tokenizer {}), coordinator.ram is {}",
            size(needed),
            size(trunk),
            size(kv),
            size(buffers),
            size(tokenizer),
            size(ram.0)
        ));
    }
    Ok(())
}

fn load_of(container: &Container, layers: &[PlacedLayer], prompt: u32, hosts: &Hosts) -> Load {
    // One sequence of one page: what a position takes does not depend on how many there are.
    let page = u32::try_from(PAGE_POSITIONS).expect("a page is small");
    let config = EngineConfig {
        max_running: 1,
        context_length: Some(page),
        kv_budget_bytes: u64::MAX,
        ..EngineConfig::default()
    };
    let memory = EngineMemory::of(container, &config);
    let hidden = container.config().hidden_size as u64;
    Load {
        trunk_bytes: memory.trunk,
        position_bytes: memory.kv / u64::from(page),
        // Eight-bit values there, exact sums of 64 bits back.
        row_bytes: hidden * 9,
        slabs: layers.iter().map(|layer| (layer.layer, layer.slab_bytes)).collect(),
        prompt,
        chunk: hosts.coordinator.prefill_chunk.unwrap_or(256),
    }
}
