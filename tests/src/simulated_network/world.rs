//! The hosts of a cluster and the thread that turns their clocks.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::Ordering,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use shimmer_kernels::Kernels;
use shimmer_model::Container;
use shimmer_worker::{
    Counters, ExpertCore, ServeConfig, TierOptions, WorkerConfig,
    serve::serve_port,
    tier_options::{NumaSetting, RamSetting},
};
use tokio_util::sync::CancellationToken;
use turmoil::{Builder, Sim};

use super::{
    Setup,
    faults::{Faults, Injected},
    host::{CoordinatorHost, Order, PORT, Shared, SimulatedPort, TICK, Tasks, lock},
    relay::{Meddled, Meddler, relay},
};
use crate::dice::Dice;

/// The coordinator's host.
pub(super) const COORDINATOR: &str = "coordinator";
/// Messages take a fifth of it on the average, where nothing is wrong.
pub(super) const LONGEST_LATENCY: Duration = Duration::from_millis(12);
/// Segments that may be under way on a connection.
const SEGMENTS: usize = 4096;
/// Memory for the experts of a worker, which are small.
const EXPERT_BYTES: u64 = 32 << 20;
/// Coordinators that a worker takes: one, and those before it that the network has not told about.
const COORDINATORS: usize = 16;

/// A worker, as the thread of the simulation sees it.
pub(super) struct WorkerHost {
    pub(super) name: String,
    /// The host that the coordinator takes for it.
    pub(super) front: String,
    pub(super) tasks: Tasks,
    /// Asks its process to stop.
    pub(super) stop: Mutex<CancellationToken>,
    pub(super) meddler: Arc<Mutex<Meddler>>,
    /// What each of its processes has counted.
    counters: Mutex<Vec<Arc<Counters>>>,
    container: PathBuf,
    shared: Arc<Shared>,
}

/// What has gone wrong so far.
#[derive(Default)]
struct Troubles {
    injected: Injected,
    /// Every fault has begun.
    are_over: bool,
    trace: Vec<String>,
}

/// A running simulation. Dropping it ends it.
pub(super) struct World {
    pub(super) host: Arc<CoordinatorHost>,
    pub(super) shared: Arc<Shared>,
    pub(super) workers: Vec<Arc<WorkerHost>>,
    troubles: Arc<Mutex<Troubles>>,
    thread: Option<JoinHandle<()>>,
}

impl World {
    pub(super) fn start(setup: &Setup, container: &std::path::Path) -> Self {
        let shared = Arc::new(Shared::default());
        let worker = |index: usize| {
            let name = format!("worker-{index}");
            let is_relayed = setup.relays & (1 << index) != 0;
            let front = if is_relayed { format!("relay-{index}") } else { name.clone() };
            let dice = Dice::new(setup.seed ^ ((index as u64 + 1) << 40));
            Arc::new(WorkerHost {
                name,
                front,
                tasks: Tasks::default(),
                stop: Mutex::default(),
                meddler: Arc::new(Mutex::new(Meddler::new(dice, setup.planted))),
                counters: Mutex::default(),
                container: container.to_owned(),
                shared: Arc::clone(&shared),
            })
        };
        let workers: Vec<_> = (0..setup.workers).map(worker).collect();
        let troubles = Arc::default();
        let (orders, ordered) = channel();
        let (told, done) = channel();
        let of_thread = (Arc::clone(&shared), workers.clone(), Arc::clone(&troubles));
        let seed = setup.seed;
        let run = move || {
            let (shared, workers, troubles) = of_thread;
            Turner::new(seed, shared, workers, troubles).run(&ordered, &told);
        };
        let thread = std::thread::Builder::new().name("simulation".to_owned()).spawn(run);
        let thread = Some(thread.expect("a thread can be started"));
        let host = Arc::new(CoordinatorHost::new(Arc::clone(&shared), orders, done));
        // Its clock runs from the first turn on.
        (0..2).for_each(|_| host.order(Order::Turn));
        Self { host, shared, workers, troubles, thread }
    }

    /// Addresses that the coordinator knows workers by.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.workers.iter().map(|worker| format!("{}:{PORT}", worker.front)).collect()
    }

    pub(super) fn injected(&self) -> Injected {
        lock(&self.troubles).injected
    }

    /// Whether every fault has begun.
    pub(super) fn troubles_are_over(&self) -> bool {
        lock(&self.troubles).are_over
    }

    /// What went wrong when.
    pub(super) fn trace(&self) -> Vec<String> {
        lock(&self.troubles).trace.clone()
    }

    /// Works that workers refused as those of another epoch or generation.
    pub(super) fn stale_works(&self) -> u64 {
        let of_all = self.workers.iter().flat_map(|worker| lock(&worker.counters).clone());
        of_all.map(|counters| counters.snapshot().work_stale).sum()
    }

    pub(super) fn meddled(&self) -> Vec<Meddled> {
        self.workers.iter().map(|worker| lock(&worker.meddler).done).collect()
    }

    pub(super) fn turns(&self) -> u64 {
        self.shared.turns.load(Ordering::Relaxed)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.host.hang_up();
        // Whoever waits for it has seen that it failed.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// What the thread of the simulation has.
struct Turner {
    sim: Sim<'static>,
    faults: Faults,
    shared: Arc<Shared>,
    workers: Vec<Arc<WorkerHost>>,
    troubles: Arc<Mutex<Troubles>>,
}

impl Turner {
    fn new(
        seed: u64,
        shared: Arc<Shared>,
        workers: Vec<Arc<WorkerHost>>,
        troubles: Arc<Mutex<Troubles>>,
    ) -> Self {
        let mut sim = Builder::new()
            .rng_seed(seed)
            .tick_duration(TICK)
            .min_message_latency(Duration::ZERO)
            .max_message_latency(LONGEST_LATENCY)
            .tcp_capacity(SEGMENTS)
            .enable_random_order()
            .build();
        for worker in &workers {
            let of_host = Arc::clone(worker);
            sim.host(worker.name.as_str(), move || process(Arc::clone(&of_host)));
            if worker.front != worker.name {
                let of_host = Arc::clone(worker);
                sim.host(worker.front.as_str(), move || {
                    let WorkerHost { shared, name, meddler, .. } = &*of_host;
                    relay(Arc::clone(shared), name.clone(), Arc::clone(meddler))
                });
            }
        }
        let of_host = Arc::clone(&shared);
        sim.host(COORDINATOR, move || {
            let shared = Arc::clone(&of_host);
            async move {
                let tell = || *lock(&shared.now) = Some(tokio::time::Instant::now().into_std());
                shared.tasks.run(tell).await;
                Ok(())
            }
        });
        Self { sim, faults: Faults::new(Dice::new(!seed)), shared, workers, troubles }
    }

    /// Does what it is told until nobody can tell it any more.
    fn run(mut self, orders: &Receiver<Order>, done: &Sender<()>) {
        while let Ok(order) = orders.recv() {
            match order {
                Order::Turn => self.turn(),
                Order::Trouble => {
                    self.faults.plan(self.shared.turns.load(Ordering::Relaxed), self.workers.len());
                    self.meddle(true);
                }
                Order::Heal => {
                    self.faults.heal(&mut self.sim, &self.workers);
                    self.meddle(false);
                }
                Order::Restart => {
                    self.sim.crash(COORDINATOR);
                    self.sim.bounce(COORDINATOR);
                    (0..2).for_each(|_| self.turn());
                }
            }
            let mut troubles = lock(&self.troubles);
            troubles.injected = self.faults.injected;
            troubles.are_over = self.faults.have_begun();
            troubles.trace.append(&mut self.faults.trace);
            drop(troubles);
            if done.send(()).is_err() {
                return;
            }
        }
    }

    fn turn(&mut self) {
        let now = self.shared.turns.fetch_add(1, Ordering::Relaxed);
        self.faults.act(&mut self.sim, now, &self.shared, &self.workers);
        self.sim.step().expect("no process of a host fails");
        assert!(!self.shared.failed.load(Ordering::Relaxed), "a connection of a worker panicked");
    }

    fn meddle(&self, meddles: bool) {
        self.workers.iter().for_each(|worker| lock(&worker.meddler).meddle(meddles));
    }
}

/// The process of a worker.
async fn process(host: Arc<WorkerHost>) -> turmoil::Result {
    let config = WorkerConfig {
        id: host.name.clone(),
        host: host.name.clone(),
        coordinators: COORDINATORS,
        weight: 1.0,
        tiers: TierOptions {
            ram: RamSetting::Bytes(EXPERT_BYTES),
            pilot_workers: 0,
            numa: NumaSetting::Off,
            ..TierOptions::default()
        },
        threads: 1,
        pool: None,
        build: "simulated".to_owned(),
    };
    let container = Arc::new(Container::open(&host.container)?);
    let core = ExpertCore::new(container, Kernels::new(None)?, config)?;
    lock(&host.counters).push(Arc::clone(core.counters()));
    let port = SimulatedPort::bind(&host.shared).await?;
    let stop = lock(&host.stop).clone();
    tokio::select! {
        biased;
        () = serve_port(core, port, ServeConfig::default(), stop) => {}
        () = host.tasks.run(|| ()) => {}
    }
    Ok(())
}
