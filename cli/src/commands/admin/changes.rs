//! `shimmer drain`, `shimmer rebalance`, `shimmer readmit`: orders, and waiting for what they bring about.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use shimmer_proto::admin::v1::{
    Coordinator, DrainRequest, GetStatusRequest, GetStatusResponse, Move, ReadmitRequest,
    RebalanceRequest, RebalanceResponse,
};

use super::{AdminArgs, Client, table, timed};
use crate::{commands::size, config::Period, error::Error, output};

const DRAIN_EXAMPLES: &str = "\
Examples:
  shimmer drain worker-b --wait && ssh worker-b sudo systemctl stop shimmer-worker
  shimmer drain worker-b --undo

The worker serves until others have loaded its experts; no request fails and no byte changes. The order stands in the
membership store until it is undone, also while the worker is away: a worker that comes back drained takes no experts. With a
list of workers instead of a store it stands until the coordinator ends, and is known to this coordinator alone.

--wait returns when every coordinator that is registered in the membership store works by a placement that does not name the
worker. One that has been cut off from the store for longer than its lease is not waited for; it loses the worker when it stops.";

/// Flags of `shimmer drain`.
#[derive(Debug, Args)]
#[command(after_help = DRAIN_EXAMPLES)]
pub struct DrainArgs {
    /// Name of the worker, as `shimmer status` shows it
    #[arg(value_name = "WORKER")]
    worker: String,
    /// Takes it back into the placement
    #[arg(long)]
    undo: bool,
    /// Returns when every coordinator has moved everything: the worker holds no expert (with --undo, holds some)
    #[arg(long)]
    wait: bool,
    /// Longest wait
    #[arg(long, value_name = "TIME", default_value = "10m", requires = "wait")]
    wait_limit: Period,
    #[command(flatten)]
    admin: AdminArgs,
}

const REBALANCE_EXAMPLES: &str = "\
Examples:
  shimmer rebalance --dry-run                what would move, and what it would bring
  shimmer rebalance --max-moves 40           moves at most 40 experts
  shimmer rebalance --dry-run --json | jq '.moves | length'

Load is how often experts were used, divided by the weights of the workers. Imbalance is the most loaded worker over the mean:
1 is level. Only the coordinator that leads can do it; others name it. Running requests go on, and no byte changes.";

/// Flags of `shimmer rebalance`.
#[derive(Debug, Args)]
#[command(after_help = REBALANCE_EXAMPLES)]
pub struct RebalanceArgs {
    /// Shows the moves and makes none
    #[arg(long)]
    dry_run: bool,
    /// Most experts that may move; without it a tenth of all
    #[arg(long, value_name = "COUNT")]
    max_moves: Option<u32>,
    #[command(flatten)]
    admin: AdminArgs,
}

const READMIT_EXAMPLES: &str = "\
Examples:
  shimmer status                             says which worker is quarantined, and why
  shimmer readmit worker-b                   after its memory, its drive or its build was looked at

A worker is quarantined when it computed other bytes than another worker for the same input. Readmitted, it must pass its
self-tests before it gets experts again.";

/// Flags of `shimmer readmit`.
#[derive(Debug, Args)]
#[command(after_help = READMIT_EXAMPLES)]
pub struct ReadmitArgs {
    /// Name of the worker, as `shimmer status` shows it
    #[arg(value_name = "WORKER")]
    worker: String,
    #[command(flatten)]
    admin: AdminArgs,
}

/// How often a wait looks.
const LOOK: Duration = Duration::from_millis(250);

/// Drains a worker, or takes it back.
///
/// # Errors
/// There is no such worker, the order cannot be written, or the wait was in vain.
pub fn drain(args: &DrainArgs) -> Result<(), Error> {
    let request = DrainRequest { worker_id: args.worker.clone(), undo: args.undo };
    let moves = args.admin.ask(async |mut client| {
        let answer = client.drain(timed(request)).await?.into_inner();
        if args.wait {
            wait(&mut client, args).await?;
        }
        Ok(answer.moves)
    })?;
    let worker = &args.worker;
    if args.admin.json {
        return output::json(&json!({
            "worker": worker, "undone": args.undo, "moves": moves, "waited": args.wait,
        }));
    }
    output::line(&match (args.undo, args.wait) {
        (false, false) => format!(
            "{worker} drains: {moves} experts will move; `shimmer status` shows when it holds none"
        ),
        (false, true) => format!("{worker} is drained: {moves} experts moved; it can be stopped"),
        (true, false) => format!("{worker} is taken back into the placement"),
        (true, true) => format!("{worker} holds experts again"),
    })
}

/// Looks until the placement in force is as ordered.
async fn wait(client: &mut Client, args: &DrainArgs) -> Result<(), Error> {
    let start = Instant::now();
    loop {
        let status = client.get_status(timed(GetStatusRequest {})).await?.into_inner();
        let Some(open) = open(&status, &args.worker, args.undo) else { return Ok(()) };
        if start.elapsed() > args.wait_limit.0 {
            let doing = format!("{open} after {}", args.wait_limit);
            let why = "the order stands, and goes on to be carried out";
            return Err(Error::failed(doing, why).with_hint(
                "`shimmer status` shows what is loading, who has no room, and by which placement each coordinator works",
            ));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// What is still to be done of an order; none once every coordinator that is registered has carried it out. One that has told
/// of no placement is waited for as well: it may have begun to work by one since, and be cut off from the store.
fn open(status: &GetStatusResponse, worker: &str, undo: bool) -> Option<String> {
    let held = held(status, worker);
    if status.next_generation.is_some() || (held > 0) != undo {
        return Some(format!("{worker} still holds {held} experts"));
    }
    let is_behind = |of: &&Coordinator| of.generation < status.generation;
    let behind: Vec<&str> =
        status.coordinators.iter().filter(is_behind).map(|of| of.id.as_str()).collect();
    let names = behind.join(", ");
    (!behind.is_empty()).then(|| format!("{worker} is placed as ordered, but not yet at {names}"))
}

/// Experts that a worker holds by the placement.
fn held(status: &GetStatusResponse, worker: &str) -> u64 {
    let found = status.workers.iter().find(|known| known.id == worker);
    found.map_or(0, |known| known.primary_experts + known.copy_experts)
}

/// Levels the load of the workers.
///
/// # Errors
/// This coordinator does not lead, or the moves cannot be written.
pub fn rebalance(args: &RebalanceArgs) -> Result<(), Error> {
    let request = RebalanceRequest { dry_run: args.dry_run, max_moves: args.max_moves };
    let answer = args
        .admin
        .ask(async |mut client| Ok(client.rebalance(timed(request)).await?.into_inner()))?;
    if args.admin.json { output::json(&json_of(&answer)) } else { output::line(&text(&answer)) }
}

fn text(answer: &RebalanceResponse) -> String {
    let RebalanceResponse { moves, imbalance_before: before, imbalance_after: after, .. } = answer;
    if moves.is_empty() {
        return format!("nothing to move: the most loaded worker has {before:.2} times the mean");
    }
    let mut rows = table(&["layer", "expert", "from", "to", "bytes", "heat"]);
    for m in moves {
        let from = if m.from.is_empty() { "(a copy)" } else { &m.from };
        rows.add_row([
            &m.layer.to_string(),
            &m.expert.to_string(),
            from,
            &m.to,
            &size(m.bytes),
            &format!("{:.1}", m.heat),
        ]);
    }
    let bytes = size(moves.iter().map(|m| m.bytes).sum());
    let done = match answer.generation {
        Some(generation) => format!("written as generation {generation}"),
        None => "nothing was changed".to_owned(),
    };
    let count = moves.len();
    format!("{rows}\n{count} moves, {bytes}; imbalance {before:.2} -> {after:.2}; {done}")
}

fn json_of(answer: &RebalanceResponse) -> Value {
    let moved = |m: &Move| {
        json!({
            "layer": m.layer, "expert": m.expert, "from": m.from, "to": m.to, "bytes": m.bytes, "heat": m.heat,
        })
    };
    json!({
        "moves": answer.moves.iter().map(moved).collect::<Vec<_>>(),
        "imbalance_before": answer.imbalance_before,
        "imbalance_after": answer.imbalance_after,
        "generation": answer.generation,
    })
}

/// Lets a quarantined worker serve again.
///
/// # Errors
/// It is not quarantined, or the order cannot be written.
pub fn readmit(args: &ReadmitArgs) -> Result<(), Error> {
    let request = ReadmitRequest { worker_id: args.worker.clone() };
    args.admin.ask(async |mut client| Ok(client.readmit(timed(request)).await?))?;
    if args.admin.json {
        return output::json(&json!({ "worker": args.worker }));
    }
    output::line(&format!("{} may serve again once it has passed its self-tests", args.worker))
}

#[cfg(test)]
mod tests {
    use shimmer_proto::admin::v1::Worker;

    use super::*;

    /// A cluster whose store names generation 5, in force at the coordinator that answers.
    fn status(held: u64, generations: &[u64]) -> GetStatusResponse {
        let worker = Worker { id: "w".to_owned(), primary_experts: held, ..Worker::default() };
        let coordinator = |(index, &generation): (usize, &u64)| Coordinator {
            id: format!("c{index}"),
            generation,
            ..Coordinator::default()
        };
        GetStatusResponse {
            generation: 5,
            workers: vec![worker],
            coordinators: generations.iter().enumerate().map(coordinator).collect(),
            ..GetStatusResponse::default()
        }
    }

    #[test]
    fn a_worker_is_drained_when_no_coordinator_counts_on_it() {
        let left = |status: &GetStatusResponse| open(status, "w", false);
        assert_eq!(left(&status(3, &[5])).as_deref(), Some("w still holds 3 experts"));
        assert_eq!(left(&status(0, &[5])), None);
        let behind = left(&status(0, &[5, 4, 3]));
        assert_eq!(behind.as_deref(), Some("w is placed as ordered, but not yet at c1, c2"));
        assert!(left(&status(0, &[5, 0])).is_some(), "what it works by is not known");
        assert_eq!(left(&status(0, &[5, 5, 5])), None);
        let loading = GetStatusResponse { next_generation: Some(6), ..status(0, &[5, 5]) };
        assert!(left(&loading).is_some());
        assert_eq!(open(&status(3, &[5, 5]), "w", true), None, "taken back");
        assert!(open(&status(0, &[5, 5]), "w", true).is_some());
    }
}
