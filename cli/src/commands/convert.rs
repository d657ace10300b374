//! `shimmer convert`: a checkpoint in, a container out.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;
use serde_json::json;
use shimmer_kernels::{KvFormat, WeightFormat};
use shimmer_model::{ConvertOptions, ConvertReport, NumericClass, convert};

use crate::{
    block_on, config::threads_or_all, error::Error, logging::LogArgs, output, progress::Progress,
    shutdown,
};

const EXAMPLES: &str = "\
Examples:
  shimmer convert ~/models/OLMoE-1B-7B-0125-Instruct --out olmoe
  shimmer convert ~/models/GLM-4.5-Air --out glm --experts q8g64       twice the memory, closer to the original
  shimmer convert tiny --out tiny-f32 --experts f32 --trunk f32 --head f32

Formats: q8g64 and q4g64 are 8 and 4 bits with a scale per 64 weights of a row; bf16, f16 and f32 are kept as they are.
The formats are part of the container's identity: coordinators and workers must have the same container.
A conversion that was stopped continues where it was when the same command runs again.";

/// Flags of `shimmer convert`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ConvertArgs {
    /// Checkpoint directory: config.json, tokenizer.json and safetensors files
    #[arg(value_name = "CHECKPOINT")]
    pub source: PathBuf,
    /// Container directory; made if it does not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Format of the routed experts' weights; they are the bulk of the model
    #[arg(long, value_name = "FORMAT", default_value_t = NumericClass::default().experts)]
    pub experts: WeightFormat,
    /// Format of attention, dense and shared weights; 4 bits here ruin models that 4 bits in the experts do not
    #[arg(long, value_name = "FORMAT", default_value_t = NumericClass::default().trunk)]
    pub trunk: WeightFormat,
    /// Format of the output head
    #[arg(long, value_name = "FORMAT", default_value_t = NumericClass::default().head)]
    pub head: WeightFormat,
    /// Format of the KV cache: f32, f16 or bf16
    #[arg(long, value_name = "FORMAT", default_value_t = NumericClass::default().kv)]
    pub kv: KvFormat,
    /// Name of the model; the checkpoint directory's when not given
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// CPU threads; one per CPU when not given
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
/// The checkpoint is refused, or a file cannot be read or written.
pub fn run(args: &ConvertArgs) -> Result<(), Error> {
    args.log.start();
    let options = ConvertOptions {
        source: args.source.clone(),
        out: args.out.clone(),
        class: NumericClass {
            experts: args.experts,
            trunk: args.trunk,
            head: args.head,
            kv: args.kv,
        },
        name: args.name.clone(),
    };
    let report = make(options, args.threads)?;
    if args.json {
        return output::json(&json!({
            "container": args.out.display().to_string(),
            "digest": report.digest,
            "bytes": report.bytes,
            "files_written": report.files_written,
            "files_kept": report.files_kept,
            "notes": report.notes,
        }));
    }
    let kept = match report.files_kept {
        0 => String::new(),
        kept => format!(" ({kept} were there already)"),
    };
    output::line(&format!(
        "{}: {} files, {}{kept}\ndigest {}",
        args.out.display(),
        report.files_written + report.files_kept,
        super::size(report.bytes),
        report.digest
    ))
}

/// Converts with progress on standard error; SIGINT stops between pieces.
pub(super) fn make(
    options: ConvertOptions,
    threads: Option<NonZeroUsize>,
) -> Result<ConvertReport, Error> {
    in_pool("converting", threads, move |progress| convert(&options, progress))
}

/// Runs work of the model crate on threads of its own, with progress and a way to stop it.
pub(crate) fn in_pool<T: Send + 'static>(
    task: &'static str,
    threads: Option<NonZeroUsize>,
    work: impl FnOnce(&Progress) -> Result<T, shimmer_model::Error> + Send + 'static,
) -> Result<T, Error> {
    let threads = threads_or_all(threads)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|error| Error::failed("cannot start the worker threads", error))?;
    block_on(async move {
        let progress = Progress::new(task, shutdown::on_signal()?);
        let done = tokio::task::spawn_blocking(move || {
            let result = pool.install(|| work(&progress));
            progress.finish();
            result
        });
        match done.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(Error::failed(format!("{task} failed"), error)),
            Err(error) => Err(Error::failed(format!("{task} stopped half-way"), error)),
        }
    })
}
