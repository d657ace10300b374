//! What a worker is: a container, kernels, threads, and the store that holds its experts. Shared by all connections.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

use shimmer_kernels::{ActivationFormat, ExpertLayout, ExpertScratch, Kernels, MATH_ID};
use shimmer_model::Container;
use shimmer_proto::{
    PROTOCOL_VERSION,
    expert::v1::{self, Identity, Limits, WorkerHello},
    limits,
    trace::Tracer,
};
use tokio::sync::watch;

use crate::{
    budget::{Budget, MessageShape, RamBudget, SMALL_ROWS, STEP_ROWS},
    counters::Counters,
    error::Error,
    guard::{MemoryGuard, SystemProbe},
    io::{check_mirrors, open_reader},
    joining::Joining,
    memory::{self, ThreadPlacement},
    payload::Buffers,
    session::ExpertSession,
    store::{ExpertStore, OpenReader, TierSetup, TieredStore},
    tier_counters::{TierCounters, TierSnapshot},
    tier_options::TierOptions,
};

/// Settings of a worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Name in the cluster; part of the placement, so it must survive restarts.
    pub id: String,
    /// What fails as one with this worker, usually the machine: copies of an expert go to different ones. Empty if that is
    /// not known.
    pub host: String,
    /// Relative capacity. Experts are shared out in proportion.
    pub weight: f64,
    /// Where experts live.
    pub tiers: TierOptions,
    /// Coordinators that may have a stream at the same time: memory is kept for the messages of so many.
    pub coordinators: usize,
    /// Compute threads of a pool of its own. Ignored when `pool` is given.
    pub threads: usize,
    /// A pool to compute on, for a worker inside another process.
    pub pool: Option<Arc<rayon::ThreadPool>>,
    /// Version and commit of the binary.
    pub build: String,
}

/// A worker without its sockets.
#[derive(Debug)]
pub struct ExpertCore {
    container: Arc<Container>,
    kernels: Kernels,
    config: WorkerConfig,
    budget: RamBudget,
    pool: Arc<rayon::ThreadPool>,
    store: Box<dyn ExpertStore>,
    /// By layer; none for layers without routed experts.
    layers: Vec<Option<LayerShape>>,
    hidden: usize,
    /// Most rows of one work: what the budget prices.
    max_rows: u32,
    format: ActivationFormat,
    counters: Arc<Counters>,
    draining: AtomicBool,
    tracer: OnceLock<Tracer>,
    drive: String,
    /// Sessions whose first assignment is being loaded.
    first_loads: AtomicUsize,
    joining: Mutex<Joining>,
    /// Buffers of small works, then those of larger ones.
    scratch: [Mutex<Vec<ExpertScratch>>; 2],
    pub(crate) sums: Arc<Buffers<i64>>,
    pub(crate) outputs: Arc<Buffers<f32>>,
}

/// Counts a session whose first assignment is being loaded, for as long as it lives.
#[derive(Debug)]
pub(crate) struct FirstLoad(Arc<ExpertCore>);

impl FirstLoad {
    pub(crate) fn of(core: &Arc<ExpertCore>) -> Self {
        core.first_loads.fetch_add(1, Relaxed);
        Self(Arc::clone(core))
    }
}

impl Drop for FirstLoad {
    fn drop(&mut self) {
        self.0.first_loads.fetch_sub(1, Relaxed);
    }
}

/// The experts of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerShape {
    pub(crate) layout: ExpertLayout,
    pub(crate) experts: u32,
}

impl ExpertCore {
    /// Checks settings and memory, starts the compute threads. Experts are loaded when a coordinator assigns them.
    pub fn new(
        container: Arc<Container>,
        kernels: Kernels,
        config: WorkerConfig,
    ) -> Result<Arc<Self>, Error> {
        let budget =
            Budget::of_worker(&container, &config.tiers, config.threads, config.coordinators)?;
        budget.log();
        let guard = Arc::new(MemoryGuard::new(&budget, Box::new(SystemProbe)));
        // More rows come in parts of that size, so that buffers never outgrow what was priced.
        let max_rows = u32::try_from(STEP_ROWS).expect("a step is small");
        Self::build(container, kernels, config, budget.experts, guard, max_rows)
    }

    /// As [`Self::new`], with a part of the memory that this process has divided among its workers, and the guard that they
    /// share.
    pub fn with_budget(
        container: Arc<Container>,
        kernels: Kernels,
        config: WorkerConfig,
        budget: RamBudget,
        guard: Arc<MemoryGuard>,
    ) -> Result<Arc<Self>, Error> {
        Self::build(container, kernels, config, budget, guard, limits::MAX_PART_ROWS)
    }

    fn build(
        container: Arc<Container>,
        kernels: Kernels,
        config: WorkerConfig,
        budget: RamBudget,
        guard: Arc<MemoryGuard>,
        max_rows: u32,
    ) -> Result<Arc<Self>, Error> {
        let setting = |name, value: &dyn ToString, reason| Error::Setting {
            name,
            value: value.to_string(),
            reason,
        };
        if config.id.is_empty()
            || config.id.len() > 64
            || !config.id.chars().all(|c| c.is_ascii_graphic())
        {
            return Err(setting(
                "id",
                &config.id,
                "expected 1 to 64 printable ASCII characters without spaces",
            ));
        }
        if config.host.len() > 255 || !config.host.chars().all(|c| c.is_ascii_graphic()) {
            return Err(setting(
                "host",
                &config.host,
                "expected up to 255 printable ASCII characters without spaces",
            ));
        }
        if !(config.weight > 0.0 && config.weight.is_finite()) {
            return Err(setting("weight", &config.weight, "expected a number above 0"));
        }
        if config.coordinators == 0 {
            return Err(setting("max-coordinators", &0, "expected at least 1"));
        }
        if config.threads == 0 {
            return Err(setting("threads", &0, "expected at least 1"));
        }
        let model = container.config();
        let mut layers = vec![None; model.layers.len()];
        for (layer, experts) in model.moe_layers() {
            let layout = container.expert_layout(layer)?;
            layers[layer as usize] = Some(LayerShape { layout, experts });
        }
        if layers.iter().all(Option::is_none) {
            return Err(Error::NoExperts { dir: container.dir().display().to_string() });
        }
        check_mirrors(&container, &config.tiers.mirrors)?;
        let (memory, threads) = memory::place(&config.tiers, config.threads)?;
        let pool = match &config.pool {
            Some(pool) => Arc::clone(pool),
            None => Arc::new(start_pool(&threads, config.threads)?),
        };
        let tiers = Arc::new(TierCounters::default());
        let open = {
            let (container, options) = (Arc::clone(&container), config.tiers.clone());
            let counters = Arc::clone(&tiers);
            OpenReader(Box::new(move || open_reader(&container, &options, &counters)))
        };
        let store = Box::new(TieredStore::new(TierSetup {
            container: Arc::clone(&container),
            options: config.tiers.clone(),
            budget,
            counters: tiers,
            allocator: memory,
            open,
            guard: Some(guard),
        })?);
        let copies = std::iter::once(container.dir());
        let copies = copies.chain(config.tiers.mirrors.iter().map(|mirror| mirror.dir.as_path()));
        let drive = copies.map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(",");
        let (rows, hidden) = (max_rows as usize, model.hidden_size);
        let experts_per_row = model.gating.map_or(0, |gating| gating.top_k);
        Ok(Arc::new(Self {
            max_rows,
            hidden,
            format: container.manifest().numeric_class.expert_activations(),
            container,
            kernels,
            config,
            budget,
            pool,
            store,
            layers,
            counters: Arc::default(),
            draining: AtomicBool::new(false),
            tracer: OnceLock::new(),
            drive,
            first_loads: AtomicUsize::new(0),
            joining: Mutex::default(),
            scratch: Default::default(),
            sums: Buffers::new(rows * hidden),
            outputs: Buffers::new(rows * experts_per_row * hidden),
        }))
    }

    /// What a coordinator may ask of this worker; one for each coordinator.
    pub fn session(self: &Arc<Self>) -> ExpertSession {
        ExpertSession::new(Arc::clone(self))
    }

    /// Name in the cluster.
    pub fn id(&self) -> &str {
        &self.config.id
    }

    /// What this worker must have in common with a coordinator.
    pub fn identity(&self) -> Identity {
        Identity {
            protocol_version: PROTOCOL_VERSION,
            build: self.config.build.clone(),
            math_id: MATH_ID.to_owned(),
            container_digest: self.container.digest().to_owned(),
            numeric_class: self.container.manifest().numeric_class.to_string(),
        }
    }

    /// The first message to every coordinator.
    pub fn hello(&self) -> WorkerHello {
        WorkerHello {
            host: self.config.host.clone(),
            draining: self.draining.load(Relaxed),
            identity: Some(self.identity()),
            limits: Some(Limits {
                max_rows: self.max_rows,
                max_message_bytes: self.messages().request as u64,
            }),
            worker_id: self.config.id.clone(),
            weight: self.config.weight,
            ram_budget_bytes: self.budget.bytes,
            isa: self.kernels.isa().to_string(),
            threads: u32::try_from(self.pool.current_num_threads()).unwrap_or(u32::MAX),
            absent_layers: self.container.absent_layers(),
        }
    }

    /// Why it is not in service yet: a coordinator waits for the first experts that it assigned, or the worker has joined
    /// and no placement has given it any. While later assignments are loaded the earlier ones serve. A worker that nobody
    /// knows of waits for coordinators and is in service: they have to find it.
    pub fn unready(&self, now: Instant) -> Option<&'static str> {
        if self.first_loads.load(Relaxed) > 0 {
            return Some("loading the experts that a coordinator has assigned");
        }
        let owed = self.joining().is_owed(now);
        owed.then_some("joining: no placement has given this worker experts yet")
    }

    /// Coordinators can find this worker from now on.
    pub fn announced(&self, now: Instant) {
        self.joining().announced(now);
    }

    pub(crate) fn joining(&self) -> MutexGuard<'_, Joining> {
        self.joining.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says in every hello from now on that this worker is about to leave.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Relaxed);
        self.counters.draining.store(1, Relaxed);
    }

    /// Most rows of one work.
    pub(crate) fn max_rows(&self) -> u32 {
        self.max_rows
    }

    /// Coordinators that may have a stream at the same time.
    pub(crate) fn coordinators(&self) -> usize {
        self.config.coordinators
    }

    /// How large messages may be.
    pub(crate) fn messages(&self) -> MessageShape {
        MessageShape::of(self.container.config(), self.max_rows)
    }

    /// Bytes of the outputs and sums of a work.
    pub(crate) fn output_bytes(&self, rows: usize, pairs: usize) -> usize {
        let outputs = pairs.saturating_mul(self.hidden * size_of::<f32>());
        outputs.saturating_add(rows.saturating_mul(self.hidden * size_of::<i64>()))
    }

    /// The same for the largest work.
    pub(crate) fn largest_output_bytes(&self) -> usize {
        let experts_per_row = self.container.config().gating.map_or(0, |gating| gating.top_k);
        let rows = self.max_rows as usize;
        self.output_bytes(rows, rows * experts_per_row)
    }

    /// Traces works of sampled steps from now on; only the first call counts.
    pub fn trace(&self, tracer: Tracer) {
        // A worker has one tracer for life.
        let _had_one = self.tracer.set(tracer).is_err();
    }

    /// Where experts that are not in memory are read: directories of the container's copies.
    pub(crate) fn drive(&self) -> &str {
        &self.drive
    }

    pub(crate) fn tracer(&self) -> Tracer {
        self.tracer.get().cloned().unwrap_or_default()
    }

    /// Shared counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Bytes of slabs held now.
    pub fn resident_bytes(&self) -> u64 {
        self.store.resident_bytes()
    }

    /// Whether hints are worth sending.
    pub fn wants_hints(&self) -> bool {
        *self.store.wants_hints().borrow()
    }

    /// As [`Self::wants_hints`], for who wants to know when that changes.
    pub(crate) fn watch_hints(&self) -> watch::Receiver<bool> {
        self.store.wants_hints()
    }

    /// Takes idle slots of the cache, the coldest experts first, until as many bytes are back with the system or every
    /// layer is at its least. The bytes.
    pub fn shrink_cache(&self, bytes: u64) -> u64 {
        self.store.shrink(bytes)
    }

    /// Writes down how often experts were used, if that is to be remembered. Also done now and then, and when this is
    /// dropped.
    pub fn save_usage(&self) {
        self.store.save_usage();
    }

    /// What the tiers have counted, and how full they are.
    pub fn tier_snapshot(&self) -> TierSnapshot {
        self.store.snapshot()
    }

    /// The compute threads.
    pub fn pool(&self) -> &Arc<rayon::ThreadPool> {
        &self.pool
    }

    /// Runs on the calling thread if that belongs to a pool, else on the worker's own pool, so that no work ever starts a
    /// pool for the whole machine.
    pub(crate) fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        if rayon::current_thread_index().is_some() { work() } else { self.pool.install(work) }
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(crate) fn store(&self) -> &dyn ExpertStore {
        &*self.store
    }

    pub(crate) fn layer(&self, layer: u32) -> Option<LayerShape> {
        *self.layers.get(layer as usize)?
    }

    pub(crate) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    pub(crate) fn hidden(&self) -> usize {
        self.hidden
    }

    pub(crate) fn format(&self) -> ActivationFormat {
        self.format
    }

    /// The wire's name of the one activation format that this container's experts take.
    pub(crate) fn wire_format(&self) -> v1::ActivationFormat {
        match self.format {
            ActivationFormat::F32 => v1::ActivationFormat::F32,
            ActivationFormat::A8G64 | ActivationFormat::A16G64 => v1::ActivationFormat::A8g64,
        }
    }

    /// Runs with buffers of the expert function, for so many rows, that nobody else uses. They are not bound to a thread,
    /// because a thread that waits inside a fork-join takes other work meanwhile. Large ones stay with the threads that compute
    /// large works: were they given to whoever comes, each connection would hold one in the end.
    pub(crate) fn with_scratch<R>(
        &self,
        rows: usize,
        run: impl FnOnce(&mut ExpertScratch) -> R,
    ) -> R {
        let pool = &self.scratch[usize::from(rows > SMALL_ROWS)];
        let take = || pool.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = take().pop().unwrap_or_default();
        let result = run(&mut scratch);
        take().push(scratch);
        result
    }
}

fn start_pool(placement: &ThreadPlacement, threads: usize) -> Result<rayon::ThreadPool, Error> {
    placement.start_pool(threads, "expert").map_err(|source| Error::Pool { threads, source })
}
