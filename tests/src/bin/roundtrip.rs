//! What the wire costs: the same expert work through a call and through loopback, with times per layer.
//!
//! `cargo run --release -p shimmer-tests --bin roundtrip -- CONTAINER [WORKERS] [ROWS] [STEPS]`
//!
//! Each step goes through every layer with routed experts, as decoding does: the row's experts are shared out over the
//! workers, all are written to, then all replies are awaited. Workers are threads of this process with real sockets.
//! "raw" is plain sockets that exchange as many bytes in the same pattern; "checksums" is what sealing and checking both
//! messages of a worker takes. The result is one JSON object.

#![allow(clippy::print_stdout, reason = "a tool that prints its result")]

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use prost::Message as _;
use shimmer_coordinator::{
    dispatch::ExpertTransport as _,
    transport::{ClusterModel, RemoteConfig, RemoteWorkers},
};
use shimmer_kernels::{ActivationFormat, ActivationRows, Kernels};
use shimmer_model::Container;
use shimmer_proto::{
    checksum,
    expert::v1::{
        self, Assign, ExpertResult, ExpertWork, Fence, LayerExperts, expert_result::Payload,
    },
    membership::fixed::FixedStore,
};
use shimmer_tests::lab::echo::{self, Exchange};
use shimmer_worker::{
    ExpertCore, ServeConfig, TierOptions, WorkerConfig, bind, serve, store::NoProgress,
};
use tokio_util::sync::CancellationToken;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let path =
        PathBuf::from(args.next().context("usage: roundtrip CONTAINER [WORKERS] [ROWS] [STEPS]")?);
    let mut number = |default: u32| args.next().map_or(Ok(default), |text| text.parse::<u32>());
    let (workers, rows, steps) = (number(2)?, number(1)?, number(100)?);
    let container = Arc::new(Container::open(&path)?);
    let call = through_a_call(&container, rows, steps)?;
    let (wire, exchanged) = through_sockets(&container, workers, rows, steps)?;
    let servers = (0..workers).map(|_| echo::serve(Ipv4Addr::LOCALHOST.into()));
    let servers = servers.collect::<Result<Vec<_>, _>>()?;
    let mut raw = echo::rounds(&servers, &exchanged)?;
    raw.sort_unstable();
    let checksums = checksums(&container, rows, steps)?;
    let report = |times: &[Duration]| {
        let at = |share: usize| micros(times[(times.len() - 1) * share / 100]);
        BTreeMap::from([
            ("p10_us", at(10)),
            ("p50_us", at(50)),
            ("p90_us", at(90)),
            ("p99_us", at(99)),
        ])
    };
    let result = serde_json::json!({
        "container": path, "workers": workers, "rows": rows, "steps": steps,
        "layers": container.config().moe_layers().count(),
        "bytes": exchanged.first().map(|round| round.iter().map(|one| (one.sent, one.answered)).collect::<Vec<_>>()),
        "call": report(&call), "wire": report(&wire), "raw": report(&raw), "checksums": report(&checksums),
    });
    println!("{result}");
    Ok(())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn core(container: &Arc<Container>, id: &str) -> Result<Arc<ExpertCore>> {
    let config = WorkerConfig {
        id: id.to_owned(),
        host: String::new(),
        coordinators: 8,
        weight: 1.0,
        tiers: TierOptions::default(),
        threads: 1,
        pool: None,
        build: "roundtrip".to_owned(),
    };
    Ok(ExpertCore::new(Arc::clone(container), Kernels::from_env()?, config)?)
}

/// Work for the experts that a row would select: as many as the model takes, others in every layer and step.
fn work(container: &Container, fence: Fence, experts: &[u32], rows: u32) -> ExpertWork {
    let hidden = container.config().hidden_size;
    let value = |index: usize| {
        f32::from(u16::try_from((index * 7919 + fence.layer as usize) % 251).unwrap_or(0)) / 251.0
    };
    let x: Vec<f32> = (0..rows as usize * hidden).map(value).collect();
    let format = container.manifest().numeric_class.expert_activations();
    let mut activations = ActivationRows::new();
    let kernels = Kernels::from_env().expect("the kernels have started before");
    activations.set(&kernels, format, &x, rows as usize, hidden);
    let mut wire = Vec::new();
    activations.write_wire(&mut wire);
    let format = if format == ActivationFormat::F32 {
        v1::ActivationFormat::F32
    } else {
        v1::ActivationFormat::A8g64
    };
    ExpertWork {
        fence: Some(fence),
        format: format.into(),
        row_count: rows,
        rows: wire.into(),
        experts: experts.to_vec(),
        item_rows: vec![rows; experts.len()],
        row_indices: experts.iter().flat_map(|_| 0..rows).collect(),
        gates: vec![0.25; experts.len() * rows as usize],
        ..ExpertWork::default()
    }
}

fn selected(container: &Container, layer: u32, experts: u32, step: u32) -> Vec<u32> {
    let wanted = container.config().gating.as_ref().map_or(2, |rule| rule.top_k);
    let wanted = u32::try_from(wanted).unwrap_or(2).min(experts);
    let mut chosen: Vec<u32> =
        (0..wanted).map(|rank| (rank * 5 + layer * 3 + step) % experts).collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

fn through_a_call(container: &Arc<Container>, rows: u32, steps: u32) -> Result<Vec<Duration>> {
    let mut session = core(container, "local")?.session();
    let layers: Vec<(u32, u32)> = container.config().moe_layers().collect();
    let all = layers
        .iter()
        .map(|&(layer, n)| LayerExperts { layer, experts: (0..n).collect() })
        .collect();
    let assigned = session.assign(&Assign { epoch: 1, generation: 1, layers: all }, &NoProgress);
    assigned.map_err(|error| anyhow::anyhow!(error.detail))?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    let mut times = Vec::new();
    for step in 0..steps {
        for &(layer, experts) in &layers {
            let fence =
                Fence { epoch: 1, generation: 1, step: u64::from(step), layer, ..Fence::default() };
            let mut work = work(container, fence, &selected(container, layer, experts, step), rows);
            checksum::seal_work(&mut work);
            let (result, time) = pool.install(|| {
                let begun = Instant::now();
                let result = session.work(&work);
                (result, begun.elapsed())
            });
            result.map_err(|error| anyhow::anyhow!(error.detail))?;
            times.push(time);
        }
    }
    times.sort_unstable();
    Ok(times)
}

fn through_sockets(
    container: &Arc<Container>,
    workers: u32,
    rows: u32,
    steps: u32,
) -> Result<(Vec<Duration>, Vec<Vec<Exchange>>)> {
    let stop = CancellationToken::new();
    let mut addresses = Vec::new();
    let mut servers = Vec::new();
    for index in 0..workers {
        let listener = bind("127.0.0.1:0")?;
        addresses.push(listener.local_addr()?.to_string().parse()?);
        let (core, stop) = (core(container, &format!("w{index}"))?, stop.clone());
        servers.push(std::thread::spawn(move || -> Result<()> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            Ok(runtime.block_on(serve(core, listener, ServeConfig::default(), stop))?)
        }));
    }
    let model = ClusterModel::from_container(container, "roundtrip")?;
    let store = Arc::new(FixedStore::of_workers(&addresses));
    let mut remote = RemoteWorkers::start(RemoteConfig::default(), model, store, None)?;
    let status = remote.status();
    shimmer_tests::wait::wait_until("all workers to serve", Duration::from_secs(120), || {
        let status = status.borrow();
        status.complete && status.workers.iter().all(|worker| worker.state == "serving")
    });
    remote.between_steps();
    let times = steps_through(&mut remote, container, rows, steps);
    drop(remote);
    stop.cancel();
    for server in servers {
        ensure!(server.join().is_ok_and(|served| served.is_ok()), "a server failed");
    }
    times
}

fn steps_through(
    remote: &mut RemoteWorkers,
    container: &Container,
    rows: u32,
    steps: u32,
) -> Result<(Vec<Duration>, Vec<Vec<Exchange>>)> {
    let (epoch, generation) = remote.fence_base();
    let (mut times, mut exchanged) = (Vec::new(), Vec::new());
    for step in 0..steps {
        for (layer, experts) in container.config().moe_layers() {
            let mut shares: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
            for expert in selected(container, layer, experts, step) {
                shares
                    .entry(remote.owner(layer, expert).context("an owner")?)
                    .or_default()
                    .push(expert);
            }
            let fence =
                Fence { epoch, generation, step: u64::from(step), layer, ..Fence::default() };
            let messages: Vec<(usize, ExpertWork)> = shares
                .iter()
                .map(|(&worker, experts)| (worker, work(container, fence, experts, rows)))
                .collect();
            let length = |(worker, message): &(usize, ExpertWork)| (*worker, message.encoded_len());
            let mut round: Vec<Exchange> = messages
                .iter()
                .map(length)
                .map(|(server, sent)| Exchange { server, sent, answered: 0 })
                .collect();
            let begun = Instant::now();
            for (worker, message) in messages {
                remote.send(worker, message)?;
            }
            let mut replies = Vec::new();
            for _ in 0..round.len() {
                replies.push(remote.receive(begun + Duration::from_secs(30))?);
            }
            times.push(begun.elapsed());
            for reply in replies {
                let result = reply.outcome.map_err(|error| anyhow::anyhow!(error.detail))?;
                let of_worker = round.iter_mut().find(|one| one.server == reply.worker);
                of_worker.context("an answer of somebody else")?.answered = result.encoded_len();
            }
            exchanged.push(round);
        }
    }
    times.sort_unstable();
    Ok((times, exchanged))
}

/// What one worker's message and its result take to be sealed, and to be checked at the other end.
fn checksums(container: &Arc<Container>, rows: u32, steps: u32) -> Result<Vec<Duration>> {
    let layers: Vec<(u32, u32)> = container.config().moe_layers().collect();
    let hidden = container.config().hidden_size;
    let mut times = Vec::new();
    for step in 0..steps {
        for &(layer, experts) in &layers {
            let fence =
                Fence { epoch: 1, generation: 1, step: u64::from(step), layer, ..Fence::default() };
            let mut work = work(container, fence, &selected(container, layer, experts, step), rows);
            let mut result = ExpertResult {
                fence: Some(fence),
                row_count: rows,
                payload: Some(Payload::Accumulators(vec![7; rows as usize * hidden * 8].into())),
                ..ExpertResult::default()
            };
            let begun = Instant::now();
            checksum::seal_work(&mut work);
            checksum::verify_work(&work)?;
            checksum::seal_result(&mut result);
            checksum::verify_result(&result)?;
            times.push(begun.elapsed());
        }
    }
    times.sort_unstable();
    Ok(times)
}
