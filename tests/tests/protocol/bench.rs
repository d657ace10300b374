//! A tiny container, worker servers on loopback, and a coordinator's view of them.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use shimmer_coordinator::{
    dispatch::{ExpertTransport as _, TransportError},
    membership::leader::Timings,
    transport::{ClusterModel, OwnExperts, RemoteConfig, RemoteWorkers},
};
use shimmer_kernels::{ActivationRows, Kernels, WeightFormat};
use shimmer_model::{
    Container, ConvertOptions, NumericClass, convert,
    tiny::{self, Preset, TinyOptions},
};
use shimmer_proto::{
    channel,
    expert::v1::{
        ActivationFormat, Assign, ExpertResult, ExpertWork, Fence, LayerExperts,
        expert_result::Payload,
    },
    membership::{MembershipStore, fixed::FixedStore},
};
use shimmer_tests::wait::wait_until;
use shimmer_worker::{
    Counters, ExpertCore, ExpertSession, ServeConfig, TierOptions, WorkerConfig, bind, serve,
};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

/// Coordinators that a worker takes.
pub(super) const COORDINATORS: usize = 8;

/// For anything that a loaded machine does in a moment.
pub(super) const SOON: Duration = Duration::from_secs(30);

/// The container of all these suites: 8-bit experts, several layers, a shared expert.
pub(super) fn container() -> Arc<Container> {
    static MADE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = MADE.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        let path = make_container(dir.path(), Preset::Glm4Moe);
        (dir, path)
    });
    Arc::new(Container::open(path).unwrap())
}

/// A container below a directory.
pub(super) fn make_container(dir: &std::path::Path, preset: Preset) -> PathBuf {
    make_container_with(dir, preset, &TinyOptions::default())
}

/// As [`make_container`], of a model with other sizes.
pub(super) fn make_container_with(
    dir: &std::path::Path,
    preset: Preset,
    options: &TinyOptions,
) -> PathBuf {
    let (source, out) = (dir.join("checkpoint"), dir.join("container"));
    tiny::write_checkpoint(preset, options, &source).unwrap();
    let class = NumericClass { experts: WeightFormat::Q8G64, ..NumericClass::default() };
    convert(&ConvertOptions { source, out: out.clone(), class, name: None }, &()).unwrap();
    out
}

/// A worker's core over a container.
pub(super) fn core(container: Arc<Container>, id: &str, weight: f64) -> Arc<ExpertCore> {
    core_with(container, id, weight, TierOptions::default())
}

/// A worker's core that holds its experts in another way.
pub(super) fn tiered_core(id: &str, tiers: TierOptions) -> Arc<ExpertCore> {
    core_with(container(), id, 1.0, tiers)
}

fn core_with(
    container: Arc<Container>,
    id: &str,
    weight: f64,
    tiers: TierOptions,
) -> Arc<ExpertCore> {
    let config = WorkerConfig {
        id: id.to_owned(),
        host: String::new(),
        coordinators: COORDINATORS,
        weight,
        tiers,
        threads: 1,
        pool: None,
        build: "test".to_owned(),
    };
    ExpertCore::new(container, Kernels::new(None).unwrap(), config).unwrap()
}

/// A real worker server on loopback, in a thread of this process.
pub(super) struct WorkerServer {
    pub(super) core: Arc<ExpertCore>,
    pub(super) port: u16,
    shutdown: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl WorkerServer {
    pub(super) fn start(id: &str) -> Self {
        Self::with(core(container(), id, 1.0), 0, ServeConfig::default())
    }

    pub(super) fn with(core: Arc<ExpertCore>, port: u16, config: ServeConfig) -> Self {
        let listener = bind(&format!("127.0.0.1:{port}")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shutdown = CancellationToken::new();
        let (theirs, stop) = (Arc::clone(&core), shutdown.clone());
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(serve(theirs, listener, config, stop)).unwrap();
        });
        Self { core, port, shutdown, thread: Some(thread) }
    }

    pub(super) fn counters(&self) -> &Counters {
        self.core.counters()
    }

    /// Asks the server to stop, as SIGTERM does.
    pub(super) fn stop(&self) {
        self.shutdown.cancel();
    }

    /// Whether it has.
    pub(super) fn ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it has. The time that took.
    pub(super) fn wait_for_end(&mut self) -> Duration {
        let begun = Instant::now();
        wait_until("the server to end", SOON, || self.ended());
        self.thread.take().unwrap().join().unwrap();
        begun.elapsed()
    }

    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for WorkerServer {
    fn drop(&mut self) {
        self.shutdown.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Whether a server's health check says that it serves.
pub(super) fn is_healthy(server: &WorkerServer) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = channel::endpoint(&server.address().parse().unwrap()).unwrap();
        let mut client = HealthClient::new(endpoint.connect().await.unwrap());
        let service = "shimmer.expert.v1.ExpertService".to_owned();
        let answer = client.check(HealthCheckRequest { service }).await.unwrap().into_inner();
        answer.status() == ServingStatus::Serving
    })
}

/// Links with short waits, so that tests do not.
pub(super) fn quick() -> RemoteConfig {
    let ms = Duration::from_millis;
    let defaults = RemoteConfig::default();
    RemoteConfig {
        coordinator_id: "c1".to_owned(),
        backoff_min: ms(10),
        backoff_max: ms(50),
        refused_retry: ms(50),
        // Workers of these tests share their processors with everything else that is tested.
        probe_timeout: SOON,
        timings: Timings { placement_wait: SOON, debounce: ms(50), ..defaults.timings },
        ..defaults
    }
}

/// Starts links to a list of workers.
pub(super) fn connect(config: RemoteConfig, addresses: &[String]) -> RemoteWorkers {
    let addresses: Vec<_> = addresses.iter().map(|address| address.parse().unwrap()).collect();
    connect_by(config, Arc::new(FixedStore::of_workers(&addresses)), None)
}

/// Starts links to the workers of a store.
pub(super) fn connect_by(
    config: RemoteConfig,
    store: Arc<dyn MembershipStore>,
    own: Option<Box<dyn OwnExperts>>,
) -> RemoteWorkers {
    let model = ClusterModel::from_container(&container(), "test").unwrap();
    RemoteWorkers::start(config, model, store, own).unwrap()
}

/// Starts links and waits until all workers serve.
pub(super) fn connect_all(addresses: &[String]) -> RemoteWorkers {
    let mut remote = connect(quick(), addresses);
    wait_complete(&remote);
    remote.between_steps();
    remote
}

/// Waits until all workers serve.
pub(super) fn wait_complete(remote: &RemoteWorkers) {
    let status = remote.status();
    wait_until("all workers to serve", SOON, || {
        let status = status.borrow();
        status.complete && status.workers.iter().all(|worker| worker.state == "serving")
    });
}

/// Waits until a worker's state is one of these and its detail holds a text.
pub(super) fn wait_told(remote: &RemoteWorkers, worker: usize, state: &str, detail: &str) {
    let status = remote.status();
    wait_until(&format!("worker {worker} to be {state}: {detail}"), SOON, || {
        let status = status.borrow();
        let told = &status.workers[worker];
        told.state == state && told.detail.contains(detail)
    });
}

/// Layers with experts and their number.
pub(super) fn moe_layers() -> Vec<(u32, u32)> {
    container().config().moe_layers().collect()
}

/// An assignment of everything.
pub(super) fn assign_all(epoch: u64, generation: u64) -> Assign {
    let layers = moe_layers()
        .into_iter()
        .map(|(layer, n)| LayerExperts { layer, experts: (0..n).collect() });
    Assign { epoch, generation, layers: layers.collect() }
}

/// A session that owns every expert, in this process.
pub(super) fn local_session() -> ExpertSession {
    let mut session = core(container(), "local", 1.0).session();
    session.assign(&assign_all(1, 1), &shimmer_worker::store::NoProgress).unwrap();
    session
}

fn wire_rows_of(container: &Container, rows: usize, seed: u64) -> Vec<u8> {
    let hidden = container.config().hidden_size;
    let mut state = seed;
    let mut value = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let high = u16::try_from((z ^ (z >> 31)) >> 48).unwrap();
        f32::from(high) / 32768.0 - 1.0
    };
    let x: Vec<f32> = (0..rows * hidden).map(|_| value()).collect();
    let kernels = Kernels::new(None).unwrap();
    let mut activations = ActivationRows::new();
    let format = container.manifest().numeric_class.expert_activations();
    activations.set(&kernels, format, &x, rows, hidden);
    let mut wire = Vec::new();
    activations.write_wire(&mut wire);
    wire
}

/// Work for some experts of a layer: expert `e` takes every row whose number has the remainder `e` by 3, and the first.
pub(super) fn work(fence: Fence, experts: &[u32], rows: u32, seed: u64) -> ExpertWork {
    work_of(&container(), fence, experts, rows, seed)
}

/// As [`work`], of another container whose experts take the same rows.
pub(super) fn work_of(
    container: &Container,
    fence: Fence,
    experts: &[u32],
    rows: u32,
    seed: u64,
) -> ExpertWork {
    let mut work = ExpertWork {
        fence: Some(fence),
        format: ActivationFormat::A8g64.into(),
        row_count: rows,
        rows: wire_rows_of(container, rows as usize, seed).into(),
        experts: experts.to_vec(),
        deadline_ms: 10_000,
        ..ExpertWork::default()
    };
    for &expert in experts {
        let taken: Vec<u32> = (0..rows).filter(|row| *row == 0 || row % 3 == expert % 3).collect();
        work.item_rows.push(u32::try_from(taken.len()).unwrap());
        work.gates.extend(
            taken.iter().map(|row| 0.125 + f32::from(u16::try_from(row % 7).unwrap()) / 16.0),
        );
        work.row_indices.extend(taken);
    }
    shimmer_proto::checksum::seal_work(&mut work);
    work
}

/// Adds a result to the exact sums of its rows.
pub(super) fn combine(work: &ExpertWork, result: &ExpertResult, sums: &mut [i64]) {
    let hidden = container().config().hidden_size;
    assert_eq!(result.row_count, work.row_count);
    match result.payload.as_ref().unwrap() {
        Payload::Accumulators(bytes) => {
            assert_eq!(bytes.len(), sums.len() * 8);
            for (sum, term) in sums.iter_mut().zip(bytes.chunks_exact(8)) {
                *sum += i64::from_le_bytes(term.try_into().unwrap());
            }
        }
        Payload::Outputs(bytes) => {
            assert_eq!(bytes.len(), work.row_indices.len() * hidden * 4);
            let values: Vec<f32> =
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            for ((output, &row), &gate) in
                values.chunks_exact(hidden).zip(&work.row_indices).zip(&work.gates)
            {
                let row = &mut sums[row as usize * hidden..][..hidden];
                shimmer_kernels::combine::accumulate(row, gate, output).unwrap();
            }
        }
    }
}

/// The exact sums of every layer for a batch, from one session in this process.
pub(super) fn expected_sums(rows: u32) -> Vec<Vec<i64>> {
    let mut session = local_session();
    let hidden = container().config().hidden_size;
    let layer_sums = |(layer, experts): (u32, u32)| {
        let fence = Fence { epoch: 1, generation: 1, step: 1, layer, ..Fence::default() };
        let all: Vec<u32> = (0..experts).collect();
        let work = work(fence, &all, rows, u64::from(layer));
        let mut sums = vec![0; rows as usize * hidden];
        combine(&work, &session.work(&work).unwrap(), &mut sums);
        sums
    };
    moe_layers().into_iter().map(layer_sums).collect()
}

/// One step over all layers through a transport, as the step loop does it.
pub(super) fn run_step(
    remote: &mut RemoteWorkers,
    step: u64,
    rows: u32,
) -> Result<Vec<Vec<i64>>, TransportError> {
    let hidden = container().config().hidden_size;
    let mut all = Vec::new();
    remote.between_steps();
    for (layer, experts) in moe_layers() {
        let (epoch, generation) = remote.fence_base();
        let fence = Fence { epoch, generation, step, layer, ..Fence::default() };
        let mut sent = Vec::new();
        for worker in 0..remote.workers().len() {
            let owned: Vec<u32> =
                (0..experts).filter(|&e| remote.owner(layer, e) == Some(worker)).collect();
            if !owned.is_empty() {
                let work = work(fence, &owned, rows, u64::from(layer));
                remote.send(worker, work.clone())?;
                sent.push((worker, work));
            }
        }
        let placed: usize = sent.iter().map(|(_, work)| work.experts.len()).sum();
        if placed != experts as usize {
            return Err(TransportError::Closed);
        }
        let mut sums = vec![0; rows as usize * hidden];
        for _ in 0..sent.len() {
            let reply = remote.receive(Instant::now() + SOON)?;
            let (_, work) = sent.iter().find(|(worker, _)| *worker == reply.worker).unwrap();
            combine(work, &reply.outcome.unwrap(), &mut sums);
        }
        all.push(sums);
    }
    Ok(all)
}
