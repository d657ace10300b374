//! `shimmer bench`: compares settings by the same work, in turn and in reverse turn.
//!
//! Every run starts an in-process cluster of its own, so that no arm meets what another one left in memory. What could
//! still differ between runs is held still or stated: the usage history is read and never written, the page cache is
//! dropped or filled before each run and then measured, and the order of the arms is reversed in every other round.

mod arm;
mod cache;
mod calibrate;
mod report;

use std::{num::NonZeroU32, path::PathBuf};

use clap::Args;
use sha2::{Digest as _, Sha256};
use shimmer_proto::v1::{
    GenerateRequest, OutputParams, StopParams, TokenIds, generate_request::Input,
};

use super::generate::{generate, synthetic};
use crate::{
    backend::Backend,
    block_on,
    config::{GenerateSettings, InProcess, SamplingConfig, Seed},
    error::Error,
    logging::LogArgs,
    output,
    profile::Profile,
};
use arm::Arm;
pub use arm::ArmText;
use cache::{CacheState, Files};
use report::{Results, Run};

const ABOUT: &str = "\
Compares settings of `shimmer generate --in-process` on the same container and prompts. Each arm has a name and the keys that
it changes; the other flags hold for all of them. The arms take turns (A B, B A, A B, ...), each run in a cluster of its own.
A usage file is read and never written. Every arm must give the same bytes: else the command fails, with the digests.

Examples:
  shimmer bench --container glm --cap 8 --arm off:pipeline=off --arm on:pipeline=on
  shimmer bench --container glm --arm all:ram=all --arm small:ram=16GiB,policy=lfru --rounds 6 --cache warm --json
  shimmer bench --container glm --calibrate here.toml      times for `shimmer plan --hosts`; every expert must fit into RAM
  shimmer bench --container glm --cap 8 --arm none:pilot-workers=0 --arm one:pilot-workers=1 --prompt 'Once upon a time'";

/// Flags of `shimmer bench`.
#[derive(Debug, Args)]
#[command(long_about = ABOUT)]
pub struct BenchArgs {
    /// Settings to compare, NAME:KEY=VALUE,KEY=VALUE,...; a name alone changes nothing. Given at least twice
    #[arg(
        long = "arm",
        value_name = "NAME:KEY=VALUE,...",
        required_unless_present = "calibrate",
        help_heading = "Comparison"
    )]
    pub arms: Vec<ArmText>,

    /// Measures what things cost on this machine instead, and writes it for `shimmer plan --calibration`
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["arms", "cache", "prompt", "prompts", "prompt_tokens", "json"],
        help_heading = "Comparison"
    )]
    pub calibrate: Option<PathBuf>,

    /// Times that every arm runs
    #[arg(long, value_name = "COUNT", default_value = "4", help_heading = "Comparison")]
    pub rounds: NonZeroU32,

    /// The container's files in the page cache before each run: cold drops them, warm reads them
    #[arg(long, value_name = "STATE", default_value = "cold", help_heading = "Comparison")]
    pub cache: CacheState,

    /// Text to continue; may be repeated
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    pub prompt: Vec<String>,

    /// File with one text to continue on each line
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub prompts: Option<PathBuf>,

    /// A made-up prompt of so many tokens, the same every time; may be repeated. Without any prompt one of 32
    #[arg(long, value_name = "COUNT", help_heading = "Prompt")]
    pub prompt_tokens: Vec<NonZeroU32>,

    #[command(flatten)]
    pub settings: GenerateSettings,
    #[command(flatten)]
    pub file: crate::args::ConfigArgs,

    /// One JSON object with every run instead of a table
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Tokens of an answer where nothing else is asked for: enough for a steady state, few enough for many rounds.
const MAX_TOKENS: NonZeroU32 = NonZeroU32::new(64).expect("not zero");

/// Runs the command. `settings` are those of all arms.
///
/// # Errors
/// An arm is refused, a run failed, or the arms give different bytes.
pub fn run(settings: &GenerateSettings, args: &BenchArgs) -> Result<(), Error> {
    args.log.start();
    let base = GenerateSettings {
        in_process: Some(true),
        // The arms are compared by their bytes, so the answers must not be drawn anew each time.
        seed: settings.seed.or(Some(Seed(0))),
        temperature: settings.temperature.or(Some(0.0)),
        max_tokens: settings.max_tokens.or(Some(MAX_TOKENS)),
        ignore_eos: settings.ignore_eos.or(Some(true)),
        profile: Some(false),
        ..settings.clone()
    };
    if let Some(out) = &args.calibrate {
        return calibrate::run(&base, args, out);
    }
    let arms = arm::parse(&base, &args.arms)?;
    let prompts = prompts(args)?;
    let sampling = base.validate()?.sampling;
    let mut results = Results::new(&arms, args.cache);
    block_on(async {
        for round in 0..args.rounds.get() {
            let mut order: Vec<usize> = (0..arms.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let arm = &arms[index];
                let run = one_run(arm, args.cache, &prompts, &sampling).await?;
                output::note(&format!(
                    "round {}/{}, {}: {}",
                    round + 1,
                    args.rounds,
                    arm.name,
                    run.summary()
                ));
                results.add(index, run);
            }
        }
        Ok(())
    })?;
    if args.json {
        output::json(&results.json())?;
    } else {
        output::line(&results.table())?;
    }
    results.check()
}

/// Brings the page cache into its state, starts a cluster, answers every prompt, and ends the cluster.
async fn one_run(
    arm: &Arm,
    state: CacheState,
    prompts: &[Prompt],
    sampling: &SamplingConfig,
) -> Result<Run, Error> {
    let InProcess { container, tiers, .. } = &arm.cluster;
    let files = Files::of(std::iter::once(container).chain(tiers.mirrors.iter().map(|m| &m.dir)))?;
    let cached = files.bring(state)?;
    let backend = Backend::open(crate::config::Target::InProcess(arm.cluster.clone())).await?;
    let vocab_size = backend.model().await?.vocab_size;
    let before = backend.moment().expect("an in-process cluster counts");
    let mut digest = Sha256::new();
    let (mut prompt_tokens, mut prefill_ms) = (0, 0.0);
    for prompt in prompts {
        let report = generate(&backend, prompt.request(sampling, vocab_size), false).await?;
        digest.update(report.logits_sha256());
        let (usage, timings) = (report.usage(), report.timings());
        prompt_tokens += usage.prompt_tokens;
        prefill_ms += timings.prefill_ms;
    }
    let after = backend.moment().expect("an in-process cluster counts");
    // The engine's thread and the pools end before the next run begins.
    let ended = tokio::task::spawn_blocking(move || drop(backend)).await;
    ended.map_err(|error| Error::failed("the cluster did not end", error))?;
    Ok(Run {
        profile: Profile::between(&before, &after),
        prefill_tokens_per_s: (prefill_ms > 0.0)
            .then(|| f64::from(prompt_tokens) * 1000.0 / prefill_ms),
        sha256: hex::encode(digest.finalize()),
        cached,
    })
}

/// What is generated from.
#[derive(Debug, Clone)]
enum Prompt {
    Text(String),
    /// A made-up one of so many tokens.
    Tokens(u32),
}

impl Prompt {
    fn request(&self, config: &SamplingConfig, vocab_size: u32) -> GenerateRequest {
        let input = match self {
            Self::Text(text) => Input::Text(text.clone()),
            Self::Tokens(count) => Input::TokenIds(TokenIds { ids: synthetic(*count, vocab_size) }),
        };
        GenerateRequest {
            request_id: None,
            input: Some(input),
            sampling: Some(config.params.clone()),
            stop: Some(StopParams {
                max_tokens: config.max_tokens,
                ignore_eos: config.ignore_eos,
                ..StopParams::default()
            }),
            output: Some(OutputParams { logits_digest: Some(true), ..OutputParams::default() }),
        }
    }
}

fn prompts(args: &BenchArgs) -> Result<Vec<Prompt>, Error> {
    let mut prompts: Vec<Prompt> = args.prompt.iter().cloned().map(Prompt::Text).collect();
    if let Some(path) = &args.prompts {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::failed(format!("cannot read the prompts in {}", path.display()), error)
        })?;
        prompts.extend(text.lines().map(|line| Prompt::Text(line.to_owned())));
    }
    prompts.extend(args.prompt_tokens.iter().map(|count| Prompt::Tokens(count.get())));
    if prompts.is_empty() {
        prompts.push(Prompt::Tokens(32));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests;
