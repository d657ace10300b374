//! `shimmer inspect`: what a container holds.

use std::path::PathBuf;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use shimmer_model::{Container, Inspection, LayerSummary};

use crate::{error::Error, output};

/// Flags of `shimmer inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Container directory
    #[arg(value_name = "CONTAINER", env = "SHIMMER_CONTAINER")]
    pub container: PathBuf,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// The directory holds no container that can be used.
pub fn run(args: &InspectArgs) -> Result<(), Error> {
    let container = super::open_container(&args.container)?;
    let inspection = Inspection::of(&container);
    if args.json {
        let value = serde_json::to_value(&inspection).map_err(|error| {
            Error::failed("cannot write the container's description as JSON", error)
        })?;
        return output::json(&value);
    }
    output::line(&overview(&container, &inspection))?;
    output::line(&layers(&inspection.layers))?;
    for note in &inspection.notes {
        output::line(&format!("note: {note}"))?;
    }
    Ok(())
}

fn overview(container: &Container, inspection: &Inspection) -> String {
    let config = &inspection.config;
    let attention = &config.attention;
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let rows = [
        ("model", inspection.name.clone()),
        ("family", config.family.to_string()),
        ("digest", inspection.digest.clone()),
        ("arithmetic", inspection.math_id.clone()),
        ("formats", inspection.numeric_class.clone()),
        (
            "parameters",
            format!(
                "{}, {} of them per token",
                count(inspection.parameters),
                count(inspection.active_parameters)
            ),
        ),
        ("trunk", super::size(inspection.trunk_bytes)),
        ("experts", format!("{} in {}", inspection.experts, super::size(inspection.expert_bytes))),
        ("hidden", config.hidden_size.to_string()),
        (
            "attention",
            format!(
                "{} heads, {} KV heads of {}",
                attention.heads, attention.kv_heads, attention.head_dim
            ),
        ),
        (
            "context",
            format!(
                "{} tokens, {} of KV cache each",
                config.max_position,
                super::size(inspection.kv_bytes_per_position)
            ),
        ),
        ("vocabulary", config.vocab_size.to_string()),
        ("directory", container.dir().display().to_string()),
    ];
    for (name, value) in rows {
        table.add_row([name.to_owned(), value]);
    }
    table.to_string()
}

/// Runs of equal layers share a row.
fn layers(layers: &[LayerSummary]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["layers", "experts", "width", "shared", "expert size", "present"]);
    for column in table.column_iter_mut().take(5) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let same =
        |a: &LayerSummary, b: &LayerSummary| LayerSummary { layer: b.layer, ..a.clone() } == *b;
    for run in layers.chunk_by(same) {
        let (first, last) = (&run[0], &run[run.len() - 1]);
        let name = if run.len() == 1 {
            first.layer.to_string()
        } else {
            format!("{}..={}", first.layer, last.layer)
        };
        let moe = first.experts > 0;
        table.add_row([
            name,
            if moe { first.experts.to_string() } else { "dense".to_owned() },
            first.intermediate.to_string(),
            first.shared_intermediate.map_or_else(|| "-".to_owned(), |width| width.to_string()),
            if moe { super::size(first.slab_bytes) } else { "-".to_owned() },
            if first.present { "yes" } else { "no" }.to_owned(),
        ]);
    }
    table.to_string()
}

/// `212.4 M`, as people count parameters.
fn count(number: u64) -> String {
    let scaled = |unit: u64| format!("{}.{}", number / unit, number % unit * 10 / unit);
    match number {
        0..1_000_000 => number.to_string(),
        1_000_000..1_000_000_000 => format!("{} M", scaled(1_000_000)),
        _ => format!("{} B", scaled(1_000_000_000)),
    }
}
