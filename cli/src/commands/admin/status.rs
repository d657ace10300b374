//! `shimmer status`: members, states, faults.

use std::fmt::Write as _;

use clap::Args;
use serde_json::{Value, json};
use shimmer_proto::admin::v1::{FaultCounts, GetStatusRequest, GetStatusResponse, Worker};

use super::{AdminArgs, table, timed};
use crate::{commands::size, error::Error, output};

const EXAMPLES: &str = "\
Examples:
  shimmer status --admin coordinator-a:50053
  SHIMMER_ADMIN=coordinator-a:50053 shimmer status --json | jq .complete

States of a worker: connecting, loading, serving, suspect (owes an answer for unusually long), draining, lost,
left (said goodbye, or lost for an hour), refused, quarantined (computed something else than others; `shimmer readmit`). `first` are the experts that it is asked for first,
`copies` those for which it stands behind another worker; p99 is the slowest of its recent replies. Rows, times and faults are
of the coordinator that answers, since its start.";

/// Flags of `shimmer status`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    #[command(flatten)]
    admin: AdminArgs,
}

/// Shows the state of the cluster.
///
/// # Errors
/// The coordinator cannot be reached.
pub fn status(args: &StatusArgs) -> Result<(), Error> {
    let status = args.admin.ask(async |mut client| {
        Ok(client.get_status(timed(GetStatusRequest {})).await?.into_inner())
    })?;
    if args.admin.json { output::json(&json_of(&status)) } else { output::line(&text(&status)) }
}

fn text(status: &GetStatusResponse) -> String {
    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").expect("a String takes any text");
    let or = |text: &str, none: &str| if text.is_empty() { none } else { text }.to_owned();
    let generation = match (status.generation, status.next_generation) {
        (0, None) => "none yet".to_owned(),
        (now, None) => now.to_string(),
        (now, Some(next)) => format!("{now}, loading {next}"),
    };
    line(format!("cluster      {}", or(&status.cluster, "(a list of workers)")));
    line(format!("answered by  {}", status.coordinator_id));
    line(format!("leader       {}", or(&status.leader, "(nobody)")));
    line(format!("placement    {generation}"));
    let complete = if status.complete { "yes" } else { "no: requests are refused until it is" };
    line(format!("complete     {complete}"));
    if let Some(store) = &status.store {
        let state = if store.connected { "connected" } else { "AWAY" };
        let or_detail = if store.detail.is_empty() { &store.kind } else { &store.detail };
        line(format!("store        {state}, {or_detail}, revision {}", store.revision));
    }
    line(format!("\n{}", workers(&status.workers)));
    if status.coordinators.len() > 1 {
        let mut rows = table(&["coordinator", "endpoint", "admin", "placement", ""]);
        for it in &status.coordinators {
            let leads = if it.leads { "leads" } else { "" };
            let generation = it.generation.to_string();
            rows.add_row([&it.id, &it.endpoint, &it.admin_endpoint, &*generation, leads]);
        }
        line(format!("\n{rows}"));
    }
    if let Some(counts) = &status.faults {
        line(format!("\n{}", faults(counts)));
    }
    out.trim_end().to_owned()
}

fn workers(workers: &[Worker]) -> String {
    let mut rows = table(&[
        "worker", "endpoint", "host", "state", "first", "copies", "loaded", "rows", "p99 ms", "",
    ]);
    for worker in workers {
        let state = if worker.draining && worker.state == "serving" {
            "serving, drains".to_owned()
        } else {
            worker.state.clone()
        };
        rows.add_row([
            if worker.id.is_empty() { "?".to_owned() } else { worker.id.clone() },
            worker.endpoint.clone(),
            worker.host.clone(),
            state,
            worker.primary_experts.to_string(),
            worker.copy_experts.to_string(),
            format!("{} ({})", worker.loaded_experts, size(worker.loaded_bytes)),
            worker.expert_rows.to_string(),
            format!("{:.1}", worker.p99_ms),
            worker.detail.clone(),
        ]);
    }
    rows.to_string()
}

/// Nothing is said of what never happened.
fn faults(counts: &FaultCounts) -> String {
    let all = [
        (counts.losses, "links lost"),
        (counts.resent_parts, "messages sent again"),
        (counts.hedged_parts, "hedges"),
        (counts.hedges_won, "hedges won"),
        (counts.adopted_experts, "experts adopted"),
        (counts.own_copies, "messages computed here"),
        (counts.audits, "audits"),
        (counts.audit_mismatches, "AUDITS DIFFERED"),
        (counts.quarantines, "quarantines"),
        (counts.dropped_replies, "replies dropped"),
    ];
    let seen: Vec<String> = all
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    if seen.is_empty() {
        "faults       none".to_owned()
    } else {
        format!("faults       {}", seen.join(", "))
    }
}

/// The field names of the service.
fn json_of(status: &GetStatusResponse) -> Value {
    let store = status.store.clone().unwrap_or_default();
    let faults = status.faults.unwrap_or_default();
    let worker = |worker: &Worker| {
        json!({
            "id": worker.id,
            "endpoint": worker.endpoint,
            "host": worker.host,
            "state": worker.state,
            "detail": worker.detail,
            "draining": worker.draining,
            "primary_experts": worker.primary_experts,
            "copy_experts": worker.copy_experts,
            "loaded_experts": worker.loaded_experts,
            "loaded_bytes": worker.loaded_bytes,
            "ram_budget_bytes": worker.ram_budget_bytes,
            "weight": worker.weight,
            "expert_rows": worker.expert_rows,
            "compute_ms": worker.compute_ms,
            "wait_ms": worker.wait_ms,
            "p99_ms": worker.p99_ms,
        })
    };
    let coordinators = status.coordinators.iter().map(|it| {
        json!({
            "id": it.id,
            "endpoint": it.endpoint,
            "admin_endpoint": it.admin_endpoint,
            "leads": it.leads,
            "generation": it.generation,
        })
    });
    json!({
        "cluster": status.cluster,
        "coordinator_id": status.coordinator_id,
        "leader": status.leader,
        "store": {
            "kind": store.kind,
            "connected": store.connected,
            "detail": store.detail,
            "revision": store.revision,
        },
        "generation": status.generation,
        "next_generation": status.next_generation,
        "complete": status.complete,
        "workers": status.workers.iter().map(worker).collect::<Vec<_>>(),
        "coordinators": coordinators.collect::<Vec<_>>(),
        "faults": {
            "losses": faults.losses,
            "resent_parts": faults.resent_parts,
            "hedged_parts": faults.hedged_parts,
            "hedges_won": faults.hedges_won,
            "adopted_experts": faults.adopted_experts,
            "own_copies": faults.own_copies,
            "audits": faults.audits,
            "audit_mismatches": faults.audit_mismatches,
            "quarantines": faults.quarantines,
            "dropped_replies": faults.dropped_replies,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_that_is_well_is_told_in_a_few_lines() {
        let worker = Worker {
            id: "a".to_owned(),
            state: "serving".to_owned(),
            primary_experts: 7,
            ..Worker::default()
        };
        let status = GetStatusResponse {
            coordinator_id: "c".to_owned(),
            leader: "c".to_owned(),
            generation: 3,
            complete: true,
            workers: vec![worker],
            faults: Some(FaultCounts::default()),
            ..GetStatusResponse::default()
        };
        let shown = text(&status);
        for part in ["leader       c", "placement    3", "complete     yes", "faults       none"] {
            assert!(shown.contains(part), "{shown}");
        }
        let away = GetStatusResponse { complete: false, next_generation: Some(4), ..status };
        let shown = text(&away);
        assert!(shown.contains("3, loading 4") && shown.contains("complete     no"), "{shown}");
        assert_eq!(json_of(&away)["workers"][0]["primary_experts"], 7);
    }
}
