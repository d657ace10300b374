//! `shimmer bench --calibrate`: what things cost on this machine, for `shimmer plan --calibration`.
//!
//! Trunk and experts are timed inside one process, step by step and message by message. What is between processes, and what
//! reading costs, is the difference to the same requests through worker processes on loopback: one, two, and one whose cache
//! is half of a layer. Everything is warmed up by the same request, and each value is the median of the rounds.

mod cluster;
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
    forecast::{Costs, Curve, Memory, Trace, alone, replay},
    output,
    routing::{Ear, Heard},
};
use cluster::Cluster;
use median::Samples;

/// Prompts that are timed: the rows of their first steps are the points of the curves.
const PROMPTS: [u32; 4] = [16, 64, 256, 400];
/// Those of them that are also sent to processes.
const SENT: [u32; 2] = [16, 256];
/// Steps of decoding that are timed.
const STEPS: u32 = 24;

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
    let mut samples = Samples::default();
    block_on(async {
        for round in 1..=args.rounds.get() {
            let traces = in_process(&process, &sampling, &mut samples).await?;
            let logs = std::env::temp_dir();
            for (name, workers, cap) in
                [("one", 1, None), ("two", 2, None), ("read", 1, Some(half))]
            {
                let cluster = Cluster::start(&process, workers, cap, &logs).await?;
                for prompt in SENT {
                    let times = twice(cluster.backend(), prompt, &sampling, None).await?.0;
                    samples.add(&format!("{name} decode {prompt}"), times.decode);
                    samples.add(&format!("{name} prefill {prompt}"), times.prefill);
                }
                cluster.stop().await;
            }
            let (decoded, prefilled) = misses(&container, half, &traces)?;
            samples.add("misses decode", decoded);
            samples.add("misses prefill", prefilled);
            output::note(&format!("round {round}/{} is measured", args.rounds));
        }
        Ok(())
    })?;
    let costs = costs(&container, &process, &samples);
    std::fs::write(out, costs.to_toml()).map_err(|error| {
        Error::failed(format!("cannot write the calibration to {}", out.display()), error)
    })?;
    output::line(&format!(
        "{}: expert of one row {:.1} us, trunk of one row {:.3} ms, message {:.0} us, read {:.0} us",
        out.display(),
        costs.expert.at(1.0) * 1e6,
        costs.trunk.at(1.0) * 1e3,
        costs.message_s * 1e6,
        costs.read_s * 1e6,
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
    for prompt in PROMPTS {
        let (times, heard) = twice(&backend, prompt, sampling, Some(&ear)).await?;
        samples.add(&format!("alone decode {prompt}"), times.decode);
        samples.add(&format!("alone prefill {prompt}"), times.prefill);
        listen(prompt, &heard, samples);
        if SENT.contains(&prompt) {
            traces.push(Trace::of(&heard.sent));
        }
    }
    let ended = tokio::task::spawn_blocking(move || drop(backend)).await;
    ended.map_err(|error| Error::failed("the cluster did not end", error))?;
    Ok(traces)
}

/// The same request twice; what the second one took, and what was heard of it.
async fn twice(
    backend: &Backend,
    prompt: u32,
    sampling: &SamplingConfig,
    ear: Option<&Ear>,
) -> Result<(Times, Heard), Error> {
    let vocab_size = backend.model().await?.vocab_size;
    let request = || Prompt::Tokens(prompt).request(sampling, vocab_size);
    generate(backend, request(), false).await?;
    ear.map(Ear::take);
    let report = generate(backend, request(), false).await?;
    let heard = ear.map(Ear::take).unwrap_or_default();
    let timings = report.timings();
    let times = Times {
        prefill: timings.prefill_ms / 1e3,
        decode: timings.decode_ms / 1e3 / f64::from(STEPS),
    };
    Ok((times, heard))
}

/// Takes apart what was heard of one request: the trunk's time and the experts' of each step.
fn listen(prompt: u32, heard: &Heard, samples: &mut Samples) {
    for step in &heard.steps {
        let sent = || heard.sent.iter().filter(|sent| sent.step == step.step);
        let experts: f64 = sent().map(|sent| sent.took.as_secs_f64()).sum();
        let visits: u32 = sent().map(|sent| u32::try_from(sent.experts.len()).unwrap_or(0)).sum();
        let rows: u32 = sent().flat_map(|sent| &sent.experts).map(|(_, rows)| *rows).sum();
        let Some(step_rows) = sent().map(|sent| sent.rows).max().filter(|_| visits > 0) else {
            continue;
        };
        let name = format!("{prompt} of {step_rows}");
        let trunk = (step.took.as_secs_f64() - experts).max(0.0);
        samples.add(&format!("trunk {name}"), trunk);
        samples.add(&format!("expert {name}"), experts / f64::from(visits));
        samples.add(&format!("rows {name}"), f64::from(rows) / f64::from(visits));
    }
}

/// Experts that the cache of half a layer misses: in a decode step after the short prompt, and in the long prompt.
fn misses(container: &Container, cap: u32, traces: &[Trace]) -> Result<(f64, f64), Error> {
    let layers: Vec<PlacedLayer> = container
        .config()
        .moe_layers()
        .map(|(layer, experts)| PlacedLayer { layer, experts, slab_bytes: 1 })
        .collect();
    let placed = alone(&layers, cap).map_err(|error| Error::refused(error.to_string()))?;
    let counts: Vec<(u32, u32)> = layers.iter().map(|layer| (layer.layer, layer.experts)).collect();
    let placement = &placed.placement;
    let mut memories = [Memory::new(&placed.workers[0], placement, 0, &counts, Rules::default())];
    let mut of = |trace: &Trace, is_prompt: bool| {
        replay(trace, placement, &mut memories);
        let steps = replay(trace, placement, &mut memories);
        let wanted = steps.iter().filter(|step| (step.rows > 1) == is_prompt);
        wanted
            .flat_map(|step| &step.layers)
            .flat_map(|layer| &layer.shares)
            .map(|share| share.misses)
            .sum::<u32>()
    };
    let decoded = of(&traces[0], false);
    let prefilled = of(&traces[1], true);
    Ok((f64::from(decoded) / f64::from(STEPS), f64::from(prefilled)))
}

/// What follows from the medians. Differences of noisy figures can be below nothing; costs cannot.
fn costs(container: &Container, process: &InProcess, samples: &Samples) -> Costs {
    let layers =
        f64::from(u32::try_from(container.config().moe_layers().count()).unwrap_or(1).max(1));
    let m = |name: &str| samples.median(name);
    let short = f64::from(PROMPTS[0]) + f64::from(STEPS) / 2.0;
    let long = f64::from(PROMPTS[3]) + f64::from(STEPS) / 2.0;
    let attention_decode_s = ((m("trunk 400 of 1") - m("trunk 16 of 1")) / (long - short)).max(0.0);
    let trunk = Curve {
        rows: vec![1.0, 16.0, 64.0, 256.0],
        seconds: vec![
            (m("trunk 16 of 1") - attention_decode_s * short).max(0.0),
            m("trunk 16 of 16"),
            m("trunk 64 of 64"),
            m("trunk 256 of 256"),
        ],
    };
    // The second step of the longest prompt: 144 rows that see 256 positions before them.
    let beyond = m("trunk 400 of 144") - trunk.at(144.0);
    let points = ["16 of 1", "16 of 16", "64 of 64", "256 of 256"];
    let expert = Curve::through(
        points.iter().map(|name| (m(&format!("rows {name}")), m(&format!("expert {name}")))),
    );
    let message_s = ((m("one decode 16") - m("alone decode 16")) / layers).max(0.0);
    let of_rows = (m("one prefill 256") - m("alone prefill 256")) / layers - message_s;
    let per = |seconds: f64, count: f64| if count > 0.0 { (seconds / count).max(0.0) } else { 0.0 };
    Costs {
        container: container.digest().to_owned(),
        threads: process.threads,
        message_s,
        message_more_s: ((m("two decode 16") - m("one decode 16")) / layers).max(0.0),
        message_row_s: (of_rows / 256.0).max(0.0),
        read_s: per(m("read decode 16") - m("one decode 16"), m("misses decode")),
        read_many_s: per(m("read prefill 256") - m("one prefill 256"), m("misses prefill")),
        attention_decode_s,
        attention_prefill_s: (beyond / (144.0 * 256.0)).max(0.0),
        trunk,
        expert,
    }
}
