//! `shimmer plan`: where the memory of a process with experts goes, before anything is loaded; or what a whole cluster would
//! do.

mod cluster;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use shimmer_worker::{budget::Kind, placement::TierPlan};

use super::size;
use crate::{
    config::{InProcess, PlanConfig, PlanSettings},
    error::Error,
    local::{self, ProcessPlan},
    logging::LogArgs,
    output,
};

const ABOUT: &str = "\
Shows what a worker, or `shimmer generate --in-process`, would do with the memory of this machine: every term, the experts
that stay in memory and the cache slots that the others share, the limit that binds, and the anonymous memory of the process
at its peak. It is the plan that those commands follow: the same function with the same numbers. Nothing is loaded. What does
not fit is refused with exit code 2.

Shares of several workers depend on their ids; here those are worker-0, worker-1, and so on.

With --hosts it plans a cluster instead: a file names hosts and workers, and the command shows which experts lie where, what
binds, and how long the first token and each further one take, with every input. docs/PLANNING.md has the file's keys and the
formulas. --calibration brings times that `shimmer bench --calibrate` measured, --simulate experts that
`shimmer generate --in-process --record-routing` recorded. Exit code 2 when it does not fit.

Examples:
  shimmer plan --container glm --hosts hosts.toml --prompt 2000 --decode 300
  shimmer plan --container glm --hosts hosts.toml --calibration here.toml --simulate routing.jsonl --json
  shimmer plan --container glm                             this machine as the only worker
  shimmer plan --container glm --workers 3 --ram 48GiB     as one of three equal workers
  shimmer plan --container glm --in-process --cap 8        with the trunk, 8 slots per layer";

/// Flags of `shimmer plan`.
#[derive(Debug, Args)]
#[command(long_about = ABOUT)]
pub struct PlanArgs {
    #[command(flatten)]
    pub settings: PlanSettings,
    #[command(flatten)]
    pub file: crate::args::ConfigArgs,
    #[command(flatten)]
    pub cluster: cluster::ClusterArgs,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs the command.
///
/// # Errors
/// Something does not fit, or the container cannot be used.
pub fn run(config: &PlanConfig, args: &PlanArgs) -> Result<(), Error> {
    args.log.start();
    let as_json = args.json;
    let options = &config.cluster;
    let container = super::open_container(&options.container)?;
    if args.cluster.is_asked_for() {
        return cluster::run(&container, &args.settings, &args.cluster, as_json);
    }
    let processes = if config.in_process {
        vec![local::plan(&container, options, &local::one_at_a_time(options))?]
    } else {
        let weights = &options.worker_weights;
        let of = |worker| {
            let coordinators = config.max_coordinators;
            let InProcess { tiers, threads, .. } = options;
            ProcessPlan::of_worker(&container, weights, worker, tiers, *threads, coordinators)
        };
        (0..weights.len()).map(of).collect::<Result<_, _>>().map_err(local::refuse)?
    };
    if as_json {
        let processes: Vec<Value> = processes.iter().map(process_json).collect();
        return output::json(&json!({ "processes": processes }));
    }
    for process in &processes {
        output::line(&memory(process))?;
        output::line(&tiers(process))?;
        output::line(&format!(
            "anonymous memory of the process at its peak: {}\n",
            size(process.peak_bytes())
        ))?;
    }
    Ok(())
}

/// Every term of the budget.
fn memory(process: &ProcessPlan) -> String {
    let budget = &process.budget;
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["memory", "size", ""]);
    table.add_row(["available".to_owned(), size(budget.available), budget.limit.to_string()]);
    for term in &budget.terms {
        let (sign, note) = match term.kind {
            Kind::Anonymous => ("-", ""),
            Kind::Held => ("", "not part of what is available"),
            Kind::Reserve => ("-", "not taken by the process"),
        };
        table.add_row([
            term.name.to_owned(),
            format!("{sign}{}", size(term.bytes)),
            note.to_owned(),
        ]);
    }
    let experts = budget.experts;
    table.add_row(["for experts".to_owned(), size(experts.bytes), experts.term.to_string()]);
    align(&mut table, 1..2);
    table.to_string()
}

/// What each tier of each worker holds.
fn tiers(process: &ProcessPlan) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["worker", "tier", "experts", "size", "slots per layer", "limit"]);
    for worker in &process.workers {
        let plan = &worker.tiers;
        let unpinned = plan.experts - plan.pinned;
        let limit = plan.binding.map_or_else(|| "none".to_owned(), |term| term.to_string());
        let row = |tier: &str, experts: u64, bytes: u64, slots: String, limit: String| {
            [worker.id.clone(), tier.to_owned(), experts.to_string(), size(bytes), slots, limit]
        };
        let pinned = slots(plan.layers.iter().map(|layer| layer.pinned.len() as u64));
        table.add_row(row("RAM, pinned", plan.pinned, plan.pinned_bytes, pinned, limit.clone()));
        let cached: u64 = plan.layers.iter().map(|layer| u64::from(layer.cache_slots)).sum();
        let cache = slots(plan.layers.iter().map(|layer| u64::from(layer.cache_slots)));
        table.add_row(row("RAM, cache", cached, plan.cache_bytes, cache, limit));
        let rest = plan.owned_bytes - plan.pinned_bytes;
        table.add_row(row("drive", unpinned, rest, "-".to_owned(), String::new()));
    }
    align(&mut table, 2..5);
    let resident = process.workers.iter().map(|worker| {
        format!("{}: {} of its experts are in memory at start", worker.id, at_start(&worker.tiers))
    });
    format!("{table}\n{}", resident.collect::<Vec<_>>().join("\n"))
}

fn align(table: &mut Table, columns: std::ops::Range<usize>) {
    for column in table.column_iter_mut().skip(columns.start).take(columns.len()) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// The smallest and the largest number over all layers.
fn slots(of_layers: impl Iterator<Item = u64> + Clone) -> String {
    let (least, most) = (of_layers.clone().min().unwrap_or(0), of_layers.max().unwrap_or(0));
    if least == most { least.to_string() } else { format!("{least} to {most}") }
}

/// Share of the experts that need not be read when the first request comes.
fn at_start(plan: &TierPlan) -> String {
    let tenths = (plan.pinned * 1000).checked_div(plan.experts).unwrap_or(1000);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

fn process_json(process: &ProcessPlan) -> Value {
    let budget = &process.budget;
    let terms: Vec<Value> = budget
        .terms
        .iter()
        .map(|term| {
            let kind = match term.kind {
                Kind::Anonymous => "anonymous",
                Kind::Held => "held",
                Kind::Reserve => "reserve",
            };
            json!({ "name": term.name, "bytes": term.bytes, "kind": kind })
        })
        .collect();
    let workers: Vec<Value> = process
        .workers
        .iter()
        .map(|worker| {
            let plan = &worker.tiers;
            let layers: Vec<Value> = plan
                .layers
                .iter()
                .map(|layer| {
                    json!({
                        "layer": layer.layer,
                        "slot_bytes": layer.stride,
                        "pinned": layer.pinned.len(),
                        "cache_slots": layer.cache_slots,
                    })
                })
                .collect();
            json!({
                "id": worker.id,
                "weight": worker.weight,
                "budget_bytes": worker.budget.bytes,
                "experts": plan.experts,
                "expert_bytes": plan.owned_bytes,
                "pinned": plan.pinned,
                "pinned_bytes": plan.pinned_bytes,
                "cache_bytes": plan.cache_bytes,
                "limit": plan.binding.map(|term| term.to_string()),
                "layers": layers,
            })
        })
        .collect();
    json!({
        "available_bytes": budget.available,
        "limit": budget.limit.to_string(),
        "terms": terms,
        "expert_budget_bytes": budget.experts.bytes,
        "peak_anonymous_bytes": process.peak_bytes(),
        "workers": workers,
    })
}
