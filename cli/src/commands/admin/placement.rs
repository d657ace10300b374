//! `shimmer placement`: who holds which experts.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};
use shimmer_proto::admin::v1::{GetPlacementRequest, GetPlacementResponse, PlacedLayer};

use super::{AdminArgs, table, timed};
use crate::{error::Error, output};

const EXAMPLES: &str = "\
Examples:
  shimmer placement                 experts of each worker in each layer, and their share of the heat
  shimmer placement --layer 7       every expert of one layer: who is asked first, who stands behind, how hot it is
  shimmer placement --json          everything, for scripts

Heat is how many rows used an expert lately, over all coordinators; it decays with time.";

/// Flags of `shimmer placement`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PlacementArgs {
    /// Every expert of this layer
    #[arg(long, value_name = "NUMBER")]
    layer: Option<u32>,
    #[command(flatten)]
    admin: AdminArgs,
}

/// Shows the placement that was decided last.
///
/// # Errors
/// The coordinator cannot be reached, or has no such layer.
pub fn placement(args: &PlacementArgs) -> Result<(), Error> {
    let request = GetPlacementRequest { layer: args.layer };
    let placement = args
        .admin
        .ask(async |mut client| Ok(client.get_placement(timed(request)).await?.into_inner()))?;
    if args.admin.json {
        return output::json(&json_of(&placement));
    }
    if placement.generation == 0 {
        return output::line("nothing is placed yet");
    }
    output::line(&format!("generation {}: {}", placement.generation, placement.reason))?;
    match (args.layer, placement.layers.first()) {
        (Some(_), Some(layer)) => output::line(&experts(layer, &placement.workers)),
        _ => output::line(&shares(&placement)),
    }
}

fn name(workers: &[String], index: u32) -> &str {
    usize::try_from(index).ok().and_then(|index| workers.get(index)).map_or("?", String::as_str)
}

/// One row for each expert.
fn experts(layer: &PlacedLayer, workers: &[String]) -> String {
    let mut rows = table(&["expert", "first", "then", "heat"]);
    for (expert, placed) in layer.experts.iter().enumerate() {
        let mut names = placed.copies.iter().map(|&worker| name(workers, worker));
        let first = names.next().unwrap_or("(nobody)");
        let then: Vec<&str> = names.collect();
        let heat = format!("{:.1}", placed.heat);
        rows.add_row([&expert.to_string(), first, &then.join(", "), &heat]);
    }
    rows.to_string()
}

/// What one worker has of one layer.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    first: usize,
    copies: usize,
    heat: f64,
}

fn of_layer(layer: &PlacedLayer) -> BTreeMap<u32, Share> {
    let mut shares = BTreeMap::<u32, Share>::new();
    for expert in &layer.experts {
        for (place, &worker) in expert.copies.iter().enumerate() {
            let share = shares.entry(worker).or_default();
            if place == 0 {
                share.first += 1;
                share.heat += expert.heat;
            } else {
                share.copies += 1;
            }
        }
    }
    shares
}

/// One row for each layer, a column for each worker: `first+copies` and its share of the layer's heat.
fn shares(placement: &GetPlacementResponse) -> String {
    let header: Vec<&str> =
        ["layer"].into_iter().chain(placement.workers.iter().map(String::as_str)).collect();
    let mut rows = table(&header);
    for layer in &placement.layers {
        let shares = of_layer(layer);
        let heat: f64 = shares.values().map(|share| share.heat).sum();
        let cell = |worker: u32| {
            let share = shares.get(&worker).copied().unwrap_or_default();
            let copies =
                if share.copies > 0 { format!("+{}", share.copies) } else { String::new() };
            let part = if heat > 0.0 {
                format!("  {:.0} %", share.heat / heat * 100.0)
            } else {
                String::new()
            };
            format!("{}{copies}{part}", share.first)
        };
        let cells = (0..).zip(&placement.workers).map(|(worker, _)| cell(worker));
        rows.add_row([layer.layer.to_string()].into_iter().chain(cells));
    }
    rows.to_string()
}

fn json_of(placement: &GetPlacementResponse) -> Value {
    let layer = |layer: &PlacedLayer| {
        let experts: Vec<Value> = layer
            .experts
            .iter()
            .map(|expert| {
                let names: Vec<&str> =
                    expert.copies.iter().map(|&worker| name(&placement.workers, worker)).collect();
                json!({ "copies": names, "heat": expert.heat })
            })
            .collect();
        json!({ "layer": layer.layer, "experts": experts })
    };
    json!({
        "generation": placement.generation,
        "reason": placement.reason,
        "workers": placement.workers,
        "layers": placement.layers.iter().map(layer).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use shimmer_proto::admin::v1::PlacedExpert;

    use super::*;

    #[test]
    fn shares_and_experts_name_workers() {
        let expert = |copies: &[u32], heat| PlacedExpert { copies: copies.to_vec(), heat };
        let layer =
            PlacedLayer { layer: 4, experts: vec![expert(&[0, 1], 3.0), expert(&[1], 1.0)] };
        let placement = GetPlacementResponse {
            generation: 2,
            reason: "test".to_owned(),
            workers: vec!["a".to_owned(), "b".to_owned()],
            layers: vec![layer.clone()],
        };
        let text = shares(&placement);
        assert!(text.contains("1  75 %") && text.contains("1+1  25 %"), "{text}");
        let text = experts(&layer, &placement.workers);
        assert!(text.contains("a") && text.contains("3.0"), "{text}");
        assert_eq!(json_of(&placement)["layers"][0]["experts"][0]["copies"][1], "b");
    }
}
