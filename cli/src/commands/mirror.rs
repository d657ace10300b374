//! `shimmer mirror`: copies of a container on further drives.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::json;
use shimmer_model::{
    Layers, Manifest, MirrorOptions, MirrorPlan, plan_mirror, stage_mirror, verify,
};

use crate::{error::Error, logging::LogArgs, output};

const ABOUT: &str = "\
Makes and checks copies of a container on further drives. A worker that is given them with --mirror reads each expert from
one of the copies, chosen by weight, and from another one when that fails: two drives give twice the bandwidth, and a bad
sector costs nothing but a line in the log. A mirror is a container directory of its own; it may have some layers only.";

const EXAMPLES: &str = "\
Examples:
  shimmer mirror plan   /mnt/a/glm /mnt/b/glm                what would be copied, and whether it fits
  shimmer mirror stage  /mnt/a/glm /mnt/b/glm                copy it; stopped, the same command continues
  shimmer mirror stage  /mnt/a/glm /mnt/c/glm --layers 3-40  only the experts of these layers
  shimmer mirror verify /mnt/a/glm /mnt/b/glm /mnt/c/glm     read every byte of the mirrors
  shimmer worker --container /mnt/a/glm --mirror /mnt/b/glm --mirror /mnt/c/glm=2";

/// Flags of `shimmer mirror`.
#[derive(Debug, Args)]
#[command(long_about = ABOUT, after_help = EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
#[command(disable_help_subcommand = true)]
pub struct MirrorArgs {
    #[command(subcommand)]
    command: MirrorCommand,
}

#[derive(Debug, Subcommand)]
enum MirrorCommand {
    /// Shows what staging would copy and whether there is room; writes nothing
    Plan(PlanArgs),
    /// Copies what the mirror lacks, checking every digest on the way
    Stage(StageArgs),
    /// Reads every byte of mirrors and compares it with the container's manifest
    Verify(VerifyArgs),
}

#[derive(Debug, Args)]
struct PlanArgs {
    #[command(flatten)]
    what: What,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct StageArgs {
    #[command(flatten)]
    what: What,
    /// Files that are copied at a time
    #[arg(long, value_name = "COUNT", default_value = "2")]
    threads: NonZeroUsize,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Args)]
struct VerifyArgs {
    /// Container directory that the mirrors are copies of
    #[arg(value_name = "CONTAINER")]
    container: PathBuf,
    /// Mirror directories
    #[arg(value_name = "MIRROR", required = true)]
    mirrors: Vec<PathBuf>,
    /// Threads that read and hash; one per CPU when not given
    #[arg(long, env = "SHIMMER_THREADS", value_name = "COUNT")]
    threads: Option<NonZeroUsize>,
    /// One line of JSON for each mirror instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArgs,
}

/// Source, target and choice of layers.
#[derive(Debug, Args)]
struct What {
    /// Container directory, or a mirror of it
    #[arg(value_name = "CONTAINER")]
    source: PathBuf,
    /// Directory of the mirror; made if it does not exist
    #[arg(value_name = "MIRROR")]
    target: PathBuf,
    /// Layers whose experts are copied, such as 3-40 or 3,5,10-12; all of them when not given. Layers that the mirror has
    /// already stay
    #[arg(long, value_name = "LAYERS")]
    layers: Option<Layers>,
}

impl What {
    fn options(&self) -> MirrorOptions {
        let Self { source, target, layers } = self;
        MirrorOptions { source: source.clone(), target: target.clone(), layers: layers.clone() }
    }
}

/// Runs the command.
///
/// # Errors
/// A directory cannot be used, there is no room, or a mirror differs from its container.
pub fn run(args: &MirrorArgs) -> Result<(), Error> {
    match &args.command {
        MirrorCommand::Plan(args) => plan(args),
        MirrorCommand::Stage(args) => stage(args),
        MirrorCommand::Verify(args) => verify_all(args),
    }
}

fn plan(args: &PlanArgs) -> Result<(), Error> {
    let target = args.what.target.display();
    let plan = plan_mirror(&args.what.options())
        .map_err(|error| Error::failed(format!("cannot plan the mirror {target}"), error))?;
    let fits = plan.missing_bytes() <= plan.free_bytes;
    if args.json {
        let files: Vec<_> = plan
            .files
            .iter()
            .map(|file| json!({ "file": file.file, "bytes": file.bytes, "present": file.present }))
            .collect();
        return output::json(&json!({
            "mirror": target.to_string(),
            "digest": plan.digest,
            "files": files,
            "missing_bytes": plan.missing_bytes(),
            "free_bytes": plan.free_bytes,
            "fits": fits,
            "absent_layers": plan.absent_layers,
        }));
    }
    output::line(&table(&plan))?;
    output::line(&format!(
        "\n{target}: {} to copy, {} free{}",
        super::size(plan.missing_bytes()),
        super::size(plan.free_bytes),
        if fits { "" } else { ": does not fit; --layers copies a part" }
    ))?;
    say_absent(&plan.absent_layers)
}

fn table(plan: &MirrorPlan) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    for file in &plan.files {
        let what = if file.present { "is there" } else { "copy" };
        table.add_row([file.file.clone(), super::size(file.bytes), what.to_owned()]);
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn stage(args: &StageArgs) -> Result<(), Error> {
    args.log.start();
    let options = args.what.options();
    let report = super::convert::in_pool("mirroring", Some(args.threads), move |progress| {
        stage_mirror(&options, progress)
    })?;
    let target = args.what.target.display();
    if args.json {
        return output::json(&json!({
            "mirror": target.to_string(),
            "digest": report.digest,
            "files_copied": report.copied.0,
            "bytes_copied": report.copied.1,
            "files_kept": report.kept.0,
            "bytes_kept": report.kept.1,
            "absent_layers": report.absent_layers,
        }));
    }
    let kept = match report.kept {
        (0, _) => String::new(),
        (files, bytes) => format!(" ({files}, {}, were there already)", super::size(bytes)),
    };
    output::line(&format!(
        "{target}: {} files, {} copied{kept}\ndigest {}",
        report.copied.0,
        super::size(report.copied.1),
        report.digest
    ))?;
    say_absent(&report.absent_layers)
}

fn say_absent(layers: &[u32]) -> Result<(), Error> {
    if layers.is_empty() {
        return Ok(());
    }
    output::line(&format!("not in the mirror: experts of layers {}", Layers::of(layers)))
}

fn verify_all(args: &VerifyArgs) -> Result<(), Error> {
    args.log.start();
    let digest = Manifest::read(&args.container)
        .map_err(|error| {
            Error::failed(format!("cannot use the container {}", args.container.display()), error)
        })?
        .digest;
    let mut first = None;
    for mirror in &args.mirrors {
        let faults = verify_one(mirror, &digest, args)?;
        first = first.or_else(|| faults.first().map(|fault| (mirror, faults.len(), fault.clone())));
    }
    let Some((mirror, count, fault)) = first else { return Ok(()) };
    let summary = format!("{} has {count} faults", mirror.display());
    let hint = "remove the named files and run `shimmer mirror stage` again";
    Err(Error::failed(summary, fault).with_hint(hint))
}

/// Reads a mirror, shows what was found, and returns its faults.
fn verify_one(mirror: &Path, digest: &str, args: &VerifyArgs) -> Result<Vec<String>, Error> {
    let dir = mirror.to_path_buf();
    let report =
        super::convert::in_pool("verifying", args.threads, move |progress| verify(&dir, progress))?;
    let mut faults = report.faults;
    if report.digest != digest {
        let found = &report.digest;
        faults.insert(
            0,
            format!("{}: another container: its digest is {found}, not {digest}", mirror.display()),
        );
    }
    if args.json {
        output::json(&json!({
            "mirror": mirror.display().to_string(),
            "digest": report.digest,
            "parts": report.parts,
            "bytes": report.bytes,
            "absent_layers": report.absent_layers,
            "faults": faults,
        }))?;
        return Ok(faults);
    }
    for fault in &faults {
        output::line(fault)?;
    }
    if faults.is_empty() {
        output::line(&format!(
            "{}: {} parts, {} are as the container's manifest says",
            mirror.display(),
            report.parts,
            super::size(report.bytes)
        ))?;
        say_absent(&report.absent_layers)?;
    }
    Ok(faults)
}
