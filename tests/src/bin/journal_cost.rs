//! What the journal costs: the same generations with and without it, in turn and in reverse turn, inside one process.
//!
//! `journal_cost CONTAINER JOURNAL_DIR [PAIRS [STREAMS [TOKENS]]]` prints for each pair the decode time with the journal by
//! the one without, and their median; the second figure is the same for the wall time from request to end, which has the
//! two flushes of the drive in it.

#![allow(clippy::print_stdout, reason = "the figures are the result")]

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use shimmer_cli::{
    config::{ByteSize, InProcess},
    local::LocalCluster,
};
use shimmer_coordinator::{
    api::Inference,
    engine::EngineConfig,
    journal::{Journal, JournalOptions},
};
use shimmer_proto::v1::{
    GenerateRequest, SamplingParams, StopParams, TokenIds, generate_request::Input,
    generate_response::Event,
};
use shimmer_worker::TierOptions;
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;

/// Decode time of all streams together, and the wall time.
struct Cost {
    decode_ms: f64,
    wall_ms: f64,
}

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let container = PathBuf::from(args.next().context("CONTAINER is missing")?);
    let directory = PathBuf::from(args.next().context("JOURNAL_DIR is missing")?);
    let mut number = |default: u32| args.next().map_or(Ok(default), |text| text.parse());
    let (pairs, streams, tokens) = (number(12)?, number(4)?, number(256)?);
    let runtime = tokio::runtime::Runtime::new()?;
    let cluster = LocalCluster::start_with(&options(&container), limits(), |transport| transport)?;
    let without = cluster.inference().clone();
    let with = without.clone().with_journal(Journal::open(journal(&directory))?);
    let measure = |inference: &Inference| runtime.block_on(run(inference, streams, tokens));
    // The first run of each fills caches.
    measure(&with)?;
    measure(&without)?;
    let (mut decode, mut wall) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        let (journaled, plain) = if pair % 2 == 0 {
            let journaled = measure(&with)?;
            (journaled, measure(&without)?)
        } else {
            let plain = measure(&without)?;
            (measure(&with)?, plain)
        };
        decode.push(journaled.decode_ms / plain.decode_ms);
        wall.push(journaled.wall_ms / plain.wall_ms);
        println!(
            "decode {:.1} ms with, {:.1} without: {:.4}; wall {:.4}",
            journaled.decode_ms,
            plain.decode_ms,
            decode.last().copied().unwrap_or_default(),
            wall.last().copied().unwrap_or_default(),
        );
    }
    println!("median of {pairs} pairs: decode {:.4}, wall {:.4}", median(decode), median(wall));
    Ok(())
}

fn options(container: &Path) -> InProcess {
    InProcess {
        container: container.to_owned(),
        worker_weights: vec![1.0],
        threads: 1,
        isa: None,
        context: None,
        kv_budget: ByteSize(256 << 20),
        prefill_chunk: 64,
        tiers: TierOptions::default(),
    }
}

fn limits() -> EngineConfig {
    EngineConfig { max_batch_rows: 64, max_running: 16, ..EngineConfig::default() }
}

fn journal(directory: &Path) -> JournalOptions {
    JournalOptions {
        directory: directory.to_owned(),
        keep: Duration::from_secs(3600),
        limit_bytes: 1 << 30,
        timeout: Duration::from_secs(5),
    }
}

async fn run(inference: &Inference, streams: u32, tokens: u32) -> anyhow::Result<Cost> {
    let began = Instant::now();
    let mut running = JoinSet::new();
    for stream in 0..streams {
        let inference = inference.clone();
        running.spawn(async move { one(&inference, stream, tokens).await });
    }
    let mut decode_ms = 0.0;
    while let Some(one) = running.join_next().await {
        decode_ms += one??;
    }
    Ok(Cost { decode_ms, wall_ms: began.elapsed().as_secs_f64() * 1e3 })
}

/// Decode time of one generation.
async fn one(inference: &Inference, stream: u32, tokens: u32) -> anyhow::Result<f64> {
    let request = GenerateRequest {
        input: Some(Input::TokenIds(TokenIds { ids: (1..9).map(|id| id + stream).collect() })),
        sampling: Some(SamplingParams { seed: Some(stream.into()), ..SamplingParams::default() }),
        stop: Some(StopParams {
            max_tokens: Some(tokens),
            ignore_eos: Some(true),
            ..StopParams::default()
        }),
        ..GenerateRequest::default()
    };
    let mut events = inference.start(request).await?;
    while let Some(response) = events.next().await {
        if let Some(Event::Finished(finished)) = response?.event {
            return Ok(finished.timings.unwrap_or_default().decode_ms);
        }
    }
    bail!("a generation ended without its last event")
}

fn median(mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}
