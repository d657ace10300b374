//! `shimmer verify`: every byte of a container against its manifest.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;
use serde_json::json;
use shimmer_model::verify;

use crate::{error::Error, logging::LogArgs, output};

/// Flags of `shimmer verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Container directory
    #[arg(value_name = "CONTAINER", env = "SHIMMER_CONTAINER")]
    pub container: PathBuf,
    /// Threads that read and hash; one per CPU when not given
    #[arg(long, env = "SHIMMER_THREADS", value_name = "COUNT")]
    pub threads: Option<NonZeroUsize>,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs the command.
///
/// # Errors
/// The manifest cannot be used, or anything differs from it.
pub fn run(args: &VerifyArgs) -> Result<(), Error> {
    args.log.start();
    let container = args.container.clone();
    let report = super::convert::in_pool("verifying", args.threads, move |progress| {
        verify(&container, progress)
    })?;
    if args.json {
        output::json(&json!({
            "container": args.container.display().to_string(),
            "digest": report.digest,
            "parts": report.parts,
            "bytes": report.bytes,
            "absent_layers": report.absent_layers,
            "faults": report.faults,
        }))?;
    } else if report.faults.is_empty() {
        output::line(&format!(
            "{}: {} parts, {} are as the manifest says\ndigest {}",
            args.container.display(),
            report.parts,
            super::size(report.bytes),
            report.digest
        ))?;
        if !report.absent_layers.is_empty() {
            let layers: Vec<String> = report.absent_layers.iter().map(u32::to_string).collect();
            output::line(&format!(
                "not in this directory: experts of layers {}",
                layers.join(", ")
            ))?;
        }
    }
    let Some(first) = report.faults.first() else { return Ok(()) };
    if !args.json {
        for fault in &report.faults {
            output::line(fault)?;
        }
    }
    let summary = format!("{} has {} faults", args.container.display(), report.faults.len());
    Err(Error::failed(summary, first.clone()).with_hint("copy or convert the named files again"))
}
