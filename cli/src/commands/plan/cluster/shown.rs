//! A planned cluster for people and for programs.

use comfy_table::{Table, presets};
use serde_json::{Map, Value, json};

use super::Planned;
use crate::{
    commands::size,
    forecast::{Hosts, Load, Parts, PlacedWorker},
};

/// What lies where.
pub(super) fn tiers(hosts: &Hosts, planned: &Planned) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["host", "worker", "VRAM", "RAM, pinned", "RAM, cache", "drive", "limit"]);
    for worker in &planned.placed.workers {
        let plan = &worker.tiers;
        let limit = plan.binding.map_or_else(|| "none".to_owned(), |term| term.to_string());
        let cell = |experts: u64, bytes: u64| format!("{experts} ({})", size(bytes));
        table.add_row([
            hosts.host[worker.host].name.clone(),
            worker.id.clone(),
            cell(worker.vram.len() as u64, worker.vram_bytes),
            cell(plan.pinned, plan.pinned_bytes),
            size(plan.cache_bytes),
            cell(plan.experts - plan.pinned, plan.owned_bytes - plan.pinned_bytes),
            limit,
        ]);
    }
    let has_vram = planned.placed.workers.iter().any(|worker| !worker.vram.is_empty());
    let note = if has_vram { VRAM } else { "" };
    format!("{table}{note}")
}

const VRAM: &str = "\nWorkers of this version hold experts in RAM and on drives: VRAM is planned for, and not used yet.";

/// What it takes.
pub(super) fn times(planned: &Planned) -> String {
    let Planned { load, prediction, batch, .. } = planned;
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    let mut header = vec!["milliseconds"];
    header.extend(prediction.prefill.named().map(|(name, _)| name));
    header.extend(["together", "binds"]);
    table.set_header(header);
    let mut add = |name: &str, parts: &Parts| {
        let ms = |seconds: f64| format!("{:.3}", seconds * 1e3);
        let mut row = vec![name.to_owned()];
        row.extend(parts.named().map(|(_, seconds)| ms(seconds)));
        row.extend([ms(parts.total()), parts.binding().to_owned()]);
        table.add_row(row);
    };
    add("first token", &prediction.prefill);
    if let Some(decode) = &prediction.decode {
        add("decode step", decode);
    }
    let rate = prediction.tokens_per_s.map_or_else(String::new, |rate| {
        let steps = prediction.decode_steps;
        format!(", then {rate:.1} tokens/s (batch {batch}, {steps} steps)")
    });
    format!(
        "{table}\nfirst token after {:.3} s for a prompt of {} tokens{rate}\n{} experts read for the prompt, {:.2} in a decode step\n{}",
        prediction.prefill.total(),
        load.prompt,
        prediction.prefill_misses,
        prediction.decode_misses,
        inputs(planned),
    )
}

fn inputs(planned: &Planned) -> String {
    let Load { trunk_bytes, position_bytes, row_bytes, chunk, .. } = planned.load;
    let slab = planned.load.slabs.first().map_or(0, |(_, bytes)| *bytes);
    let source = planned.costs.as_ref().map_or_else(
        || "times follow from the bandwidths of the file; --calibration brings measured ones".to_owned(),
        |costs| {
            format!(
                "measured: expert of one row {:.1} us, trunk of one row {:.3} ms, message {:.0} us and {:.0} us for each further worker, read {:.0} us, in a step of 256 rows {:.0} us",
                costs.expert.at(1.0) * 1e6,
                costs.trunk.at(1.0) * 1e3,
                costs.message.at(1.0) * 1e6,
                costs.message_more.at(1.0) * 1e6,
                costs.read.at(1.0) * 1e6,
                costs.read.at(256.0) * 1e6,
            )
        },
    );
    format!(
        "inputs: trunk {}, expert {}, position {}, row {}, prompt steps of {chunk} rows; {source}",
        size(trunk_bytes),
        size(slab),
        size(position_bytes),
        size(row_bytes)
    )
}

/// One object with everything.
pub(super) fn json(hosts: &Hosts, planned: &Planned) -> Value {
    let Planned { placed, load, costs, batch, prediction } = planned;
    let worker = |worker: &PlacedWorker| {
        let plan = &worker.tiers;
        json!({
            "host": hosts.host[worker.host].name,
            "id": worker.id,
            "budget_bytes": worker.budget.bytes,
            "vram_experts": worker.vram.len(),
            "vram_bytes": worker.vram_bytes,
            "pinned": plan.pinned,
            "pinned_bytes": plan.pinned_bytes,
            "cache_bytes": plan.cache_bytes,
            "drive_experts": plan.experts - plan.pinned,
            "drive_bytes": plan.owned_bytes - plan.pinned_bytes,
            "limit": plan.binding.map(|term| term.to_string()),
        })
    };
    let calibration =
        costs.as_ref().map(|costs| serde_json::to_value(costs).expect("numbers are JSON"));
    json!({
        "workers": placed.workers.iter().map(worker).collect::<Vec<_>>(),
        "first_token": parts(&prediction.prefill),
        "decode_step": prediction.decode.as_ref().map(parts),
        "time_to_first_token_s": prediction.prefill.total(),
        "decode_tokens_per_s": prediction.tokens_per_s,
        "prefill_misses": prediction.prefill_misses,
        "decode_misses_per_step": prediction.decode_misses,
        "inputs": {
            "prompt": load.prompt,
            "prefill_chunk": load.chunk,
            "decode_steps": prediction.decode_steps,
            "batch": batch,
            "trunk_bytes": load.trunk_bytes,
            "position_bytes": load.position_bytes,
            "row_bytes": load.row_bytes,
            "slabs": load.slabs,
            "round_trip_ms": hosts.network.round_trip_ms,
            "bandwidth_gb_per_s": hosts.network.bandwidth_gb_per_s,
            "calibration": calibration,
        },
    })
}

fn parts(parts: &Parts) -> Value {
    let named = parts.named();
    let of = named.iter().map(|(name, s)| (format!("{}_s", name.replace(' ', "_")), json!(s)));
    let mut value: Map<String, Value> = of.collect();
    value.insert("total_s".to_owned(), json!(parts.total()));
    value.insert("binds".to_owned(), json!(parts.binding()));
    Value::Object(value)
}
