//! `shimmer bench --calibrate`: what things cost on this machine, for `shimmer plan --calibration`.
//!
//! Trunk and experts are timed inside one process, step by step and message by message. What is between processes, and what
//! reading costs, is the difference to the same requests through worker processes on loopback: one, two, and one whose cache
//! is half of a layer. A request is warmed up by itself and then timed several times; differences are taken within a round,
//! because the speed of a machine drifts, and each value is the median of the rounds.

mod cluster;
mod derived;
mod median;

use std::path::Path;

use shimmer_coordinator::placement::PlacedLayer;
use shimmer_model::Container;
use shimmer_worker::{residency::Rules, tier_options::RamSetting};

use super::{BenchArgs, Prompt};
use crate::{
    backend::Backend,
    block_on,
    commands::{generate::generate, open_container},
    config::{GenerateSettings, InProcess, SamplingConfig, Settings as _, Target},
    error::Error,
    forecast::{Memory, Trace, alone, replay},
    output,
    routing::{Ear, Heard},
};
use cluster::Cluster;
use derived::{Machine, Misses, of_round};
use median::{Samples, median_of};

/// Prompts that are timed, each of one step: its rows are the points of the curves, beside the one row of a decode step.
const PROMPTS: [u32; 3] = [16, 64, 256];
/// A prompt of three full steps, timed inside one process alone: its last step and the decoding behind it differ from those
/// of the others by the attention to what is before.
const LONG: u32 = 768;
/// Steps of decoding that are timed.
const STEPS: u32 = 24;
/// Times that a request is timed in a round. A short prompt is one step of some ten milliseconds, of which a single one
/// says little.
const fn repeats(prompt: u32) -> usize {
    if prompt < 256 { 7 } else { 3 }
}

/// A request's times as its coordinator tells them, seconds.
#[derive(Debug, Clone, Copy)]
struct Times {
    prefill: f64,
    /// Each step.
    decode: f64,
}

/// Measures, and writes the file.
///
/// # Errors
/// A cluster does not run, or the experts do not fit into memory.
pub(super) fn run(settings: &GenerateSettings, args: &BenchArgs, out: &Path) -> Result<(), Error> {
    let base = GenerateSettings {
        ram: Some(RamSetting::All),
        prefill_chunk: Some(CHUNK),
        ..settings.clone()
    };
    let config = base.or(GenerateSettings::defaults()).validate()?;
    let Target::InProcess(process) = config.target else {
        unreachable!("a comparison is in-process")
    };
    let sampling = SamplingConfig { max_tokens: Some(STEPS + 1), ..config.sampling };
    let container = open_container(&process.container)?;
    let half = half_of_a_layer(&container)?;
    let layers = u32::try_from(container.config().moe_layers().count()).unwrap_or(1).max(1);
    let mut rounds = Vec::new();
    block_on(async {
        for round in 1..=args.rounds.get() {
            let mut samples = Samples::default();
            let traces = in_process(&process, &sampling, &mut samples).await?;
            let logs = std::env::temp_dir();
            for (name, workers, cap) in
                [("one", 1, None), ("two", 2, None), ("read", 1, Some(half))]
            {
                let cluster = Cluster::start(&process, workers, cap, &logs).await?;
                for prompt in PROMPTS {
                    for (times, _) in timed(cluster.backend(), prompt, &sampling, None).await? {
                        samples.add(&format!("{name} {prompt}"), times.prefill);
                        if prompt == PROMPTS[0] {
                            samples.add(&format!("{name} 1"), times.decode);
                        }
                    }
                }
                cluster.stop().await;
            }
            let machine = Machine {
                container: container.digest(),
                threads: process.threads,
                layers,
                misses: &misses(&container, half, &traces)?,
            };
            rounds.push(of_round(&samples, &machine));
            output::note(&format!("round {round}/{} is measured", args.rounds));
        }
        Ok(())
    })?;
    let costs = median_of(&rounds);
    std::fs::write(out, costs.to_toml()).map_err(|error| {
        Error::failed(format!("cannot write the calibration to {}", out.display()), error)
    })?;
    output::line(&format!(
        "{}: expert of one row {:.1} us, trunk of one row {:.3} ms, message {:.0} us, read {:.0} us",
        out.display(),
        costs.expert.at(1.0) * 1e6,
        costs.trunk.at(1.0) * 1e3,
        costs.message.at(1.0) * 1e6,
        costs.read.at(1.0) * 1e6,
    ))
}

/// Rows of a prompt step: the points of the curves do not depend on settings.
const CHUNK: std::num::NonZeroUsize = std::num::NonZeroUsize::new(256).expect("not zero");

/// A cache that makes both hits and misses.
fn half_of_a_layer(container: &Container) -> Result<u32, Error> {
    let most = container.config().moe_layers().map(|(_, experts)| experts).max().unwrap_or(0);
    if most < 2 {
        return Err(Error::refused(
            "the container has no layer with two experts: there is nothing to place",
        )
        .with_hint("plans are for mixture-of-experts models"));
    }
    Ok(most / 2)
}

/// Times every prompt inside one process; the routing of those that are sent to processes.
async fn in_process(
    process: &InProcess,
    sampling: &SamplingConfig,
    samples: &mut Samples,
) -> Result<Vec<Trace>, Error> {
    let ear = Ear::default();
    let target = Target::InProcess(process.clone());
    let backend = Backend::open_with(target, Some(ear.clone())).await?;
    let mut traces = Vec::new();
    for prompt in PROMPTS.into_iter().chain([LONG]) {
        let found = timed(&backend, prompt, sampling, Some(&ear)).await?;
        for (_, heard) in &found {
            listen(prompt, heard, samples);
        }
        traces.extend(found.last().map(|(_, heard)| Trace::of(&heard.sent)));
    }
    let ended = tokio::task::spawn_blocking(move || drop(backend)).await;
    ended.map_err(|error| Error::failed("the cluster did not end", error))?;
    Ok(traces)
}

/// The same request once to warm up, and then as often as it is timed; what each took, and what was heard of it.
async fn timed(
    backend: &Backend,
    prompt: u32,
    sampling: &SamplingConfig,
    ear: Option<&Ear>,
) -> Result<Vec<(Times, Heard)>, Error> {
    let vocab_size = backend.model().await?.vocab_size;
    let request = || Prompt::Tokens(prompt).request(sampling, vocab_size);
    generate(backend, request(), false).await?;
    ear.map(Ear::take);
    let mut found = Vec::new();
    for _ in 0..repeats(prompt) {
        let report = generate(backend, request(), false).await?;
        let timings = report.timings();
        let times = Times {
            prefill: timings.prefill_ms / 1e3,
            decode: timings.decode_ms / 1e3 / f64::from(STEPS),
        };
        found.push((times, ear.map(Ear::take).unwrap_or_default()));
    }
    Ok(found)
}

/// Takes apart what was heard of one request: the time of each step, the trunk's and the experts' of it. Steps of the
/// prompt are named by their rows and the positions before them, the others by the prompt.
fn listen(prompt: u32, heard: &Heard, samples: &mut Samples) {
    let mut position = 0;
    for step in &heard.steps {
        let sent = || heard.sent.iter().filter(|sent| sent.step == step.step);
        let experts: f64 = sent().map(|sent| sent.took.as_secs_f64()).sum();
        let visits: u32 = sent().map(|sent| u32::try_from(sent.experts.len()).unwrap_or(0)).sum();
        let rows: u32 = sent().flat_map(|sent| &sent.experts).map(|(_, rows)| *rows).sum();
        let Some(step_rows) = sent().map(|sent| sent.rows).max().filter(|_| visits > 0) else {
            continue;
        };
        let name = if position < prompt {
            format!("{step_rows} at {position}")
        } else {
            format!("1 after {prompt}")
        };
        position += step_rows;
        let took = step.took.as_secs_f64();
        samples.add(&format!("step {name}"), took);
        samples.add(&format!("trunk {name}"), (took - experts).max(0.0));
        samples.add(&format!("expert {name}"), experts / f64::from(visits));
        samples.add(&format!("rows {name}"), f64::from(rows) / f64::from(visits));
    }
}

/// Experts that the cache of half a layer misses: in a decode step after the shortest prompt, and in every prompt.
fn misses(container: &Container, cap: u32, traces: &[Trace]) -> Result<Misses, Error> {
    let layers: Vec<PlacedLayer> = container
        .config()
        .moe_layers()
        .map(|(layer, experts)| PlacedLayer { layer, experts, slab_bytes: 1 })
        .collect();
    let placed = alone(&layers, cap).map_err(|error| Error::refused(error.to_string()))?;
    let counts: Vec<(u32, u32)> = layers.iter().map(|layer| (layer.layer, layer.experts)).collect();
    let placement = &placed.placement;
    let mut memories = [Memory::new(&placed.workers[0], placement, 0, &counts, Rules::default())];
    let mut found = Vec::new();
    for (trace, rows) in traces.iter().zip(PROMPTS) {
        replay(trace, placement, &mut memories);
        let steps = replay(trace, placement, &mut memories);
        let of = |is_prompt: bool| -> f64 {
            let wanted = steps.iter().filter(|step| (step.rows > 1) == is_prompt);
            let shares = wanted.flat_map(|step| &step.layers).flat_map(|layer| &layer.shares);
            f64::from(shares.map(|share| share.misses).sum::<u32>())
        };
        if rows == PROMPTS[0] {
            found.push(of(false) / f64::from(STEPS));
        }
        found.push(of(true));
    }
    Ok(found)
}
