//! The coordinator's process: its links on a simulated host, and its engine.

use std::{sync::Arc, time::Duration};

use shimmer_cli::local::OwnCopy;
use shimmer_coordinator::{
    dispatch::{FaultCounts, FaultPolicy},
    engine::{Engine, EngineConfig, EngineHandle, EngineParts, GenerationError},
    membership::leader::Timings,
    tokenizer::Tokenizer,
    transport::{
        ClusterModel, OwnExperts, RemoteConfig, RemoteCounters, RemoteObserver, RemoteWorkers,
        SimulatedHost as _, Stage,
    },
};
use shimmer_kernels::Kernels;
use shimmer_model::Container;
use shimmer_proto::{address::PeerAddress, membership::fixed::FixedStore, tls::Dialer};

use super::{Setup, host::FromHost, world::World};
use crate::{
    in_process::outcome,
    workload::{Job, Outcome},
};

/// Simulated time in which every expert can be computed after a start, whatever goes wrong meanwhile.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Memory for the coordinator's own copy.
const OWN_BYTES: u64 = 32 << 20;

pub(super) struct Coordinator {
    engine: EngineHandle,
    links: RemoteObserver,
}

impl Coordinator {
    /// Starts it and waits until every expert can be computed.
    pub(super) fn start(
        world: &World,
        setup: &Setup,
        container: &Arc<Container>,
    ) -> Result<Self, String> {
        let kernels = Kernels::new(None).expect("every processor has kernels");
        let own = setup.own_copy.then(|| -> Box<dyn OwnExperts> {
            let own = OwnCopy::start(container, kernels, OWN_BYTES, Vec::new(), 1);
            Box::new(own.expect("a small model fits"))
        });
        let addresses: Vec<PeerAddress> =
            world.addresses().iter().map(|a| a.parse().expect("a name and a port")).collect();
        let store = Arc::new(FixedStore::of_workers(&addresses));
        let model = ClusterModel::from_container(container, "simulated").expect("a whole model");
        let workers = RemoteWorkers::start(config(world, setup), model, store, own)
            .expect("a simulated host starts everything");
        let (links, status) = (workers.observer(), workers.status());
        let is_whole = || status.borrow().complete;
        world.host.pass(world.host.now() + START_LIMIT, &is_whole);
        if !is_whole() {
            let status = status.borrow().clone();
            return Err(format!("the cluster is not whole within {START_LIMIT:?}: {status:?}"));
        }
        let json = container.tokenizer_json().ok().flatten().expect("a tiny model has one");
        let settings = container.tokenizer_config().expect("its settings can be read");
        let tokenizer = Tokenizer::from_bytes(&json, settings.as_deref()).expect("it is usable");
        let engine = Engine::start(EngineParts {
            container: Arc::clone(container),
            kernels,
            tokenizer: Arc::new(tokenizer),
            transport: Box::new(workers),
            config: engine_config(setup),
            thread_start: None,
        });
        Ok(Self { engine: engine.expect("the engine starts"), links })
    }

    /// Runs one generation to its end.
    pub(super) fn generate(&self, job: &Job) -> Result<Outcome, GenerationError> {
        let generation = job.generation("simulated".to_owned());
        outcome(self.engine.submit(generation).expect("the job is valid"))
    }

    /// Ends it; what it has counted.
    pub(super) fn end(self) -> (RemoteCounters, FaultCounts) {
        (self.links.counters(), self.engine.stats().faults)
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

/// Shorter waits than by default, so that faults of a second or two meet every deadline.
fn config(world: &World, setup: &Setup) -> RemoteConfig {
    let ms = Duration::from_millis;
    let defaults = RemoteConfig::default();
    RemoteConfig {
        dialer: Dialer::over(Arc::new(FromHost(Arc::clone(&world.shared)))),
        connect_timeout: ms(1000),
        hello_timeout: ms(1500),
        load_stall_timeout: ms(2000),
        layer_floor: ms(400),
        layer_ceiling: ms(2000),
        probe_after: ms(100),
        probe_timeout: ms(150),
        probe_interval: ms(150),
        suspect_patience: ms(3000),
        replicas: setup.replicas,
        timings: Timings {
            placement_wait: ms(2000),
            settle: ms(100),
            debounce: ms(100),
            replace_after: ms(3000),
        },
        switch_patience: ms(1000),
        backoff_min: ms(10),
        backoff_max: ms(200),
        refused_retry: ms(300),
        stage: Stage::Simulated(world.host.clone()),
        ..defaults
    }
}

fn engine_config(setup: &Setup) -> EngineConfig {
    EngineConfig {
        threads: 1,
        prefill_chunk: 8,
        max_batch_rows: 16,
        max_running: 4,
        kv_budget_bytes: 16 << 20,
        layer_deadline: Duration::from_secs(30),
        faults: FaultPolicy {
            hedge_floor: Duration::from_millis(20),
            cold_floor: Duration::from_millis(60),
            unknown: Duration::from_millis(60),
            hedge_share: 1.0,
            audit_per_10k: setup.audit_per_10k,
            ..FaultPolicy::default()
        },
        ..EngineConfig::default()
    }
}
