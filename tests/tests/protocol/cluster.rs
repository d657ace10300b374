//! A cluster that changes while it generates: workers join, leave, return and hang, and no byte differs.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use shimmer_coordinator::{
    dispatch::{ExpertTransport, Standing, TransportError, Wrapped, Wrapper},
    engine::{Engine, EngineConfig, EngineHandle, EngineParts, Event, EventStream},
    tokenizer::Tokenizer,
    transport::{ClusterStatus, RemoteConfig},
};
use shimmer_kernels::Kernels;
use shimmer_proto::{
    expert::v1::ExpertWork,
    membership::{
        MembershipStore as _, Write,
        memory::{MemoryCluster, MemoryStore},
        records::WorkerRecord,
    },
};
use shimmer_tests::{
    in_process::InProcess,
    wait::wait_until,
    workload::{Job, Outcome},
};
use tokio::sync::watch;

use super::{
    bench::{self, SOON, WorkerServer, connect_by, quick},
    meddler::{Fault, Meddler},
};

/// Tokens of the stream during which the cluster changes.
const TOKENS: u32 = 300;

/// The step thread stops before some steps until the placement of a generation is in force, so that what a test changes falls
/// into the stream on any machine.
#[derive(Debug, Default)]
struct Gates {
    /// By step: the generation that it waits for.
    generations: BTreeMap<u64, u64>,
    steps: AtomicU64,
    /// Generation of the last step.
    generation: AtomicU64,
}

/// What stops the step thread.
#[derive(Debug)]
struct Gatekeeper(Arc<Gates>);

impl Wrapper for Gatekeeper {
    fn between_steps(&mut self, inner: &mut dyn ExpertTransport) {
        let Self(gates) = self;
        inner.between_steps();
        let step = gates.steps.load(Ordering::SeqCst);
        if let Some(&wanted) = gates.generations.get(&step) {
            let what = format!("generation {wanted} before step {step}");
            wait_until(&what, SOON, || {
                inner.between_steps();
                inner.fence_base().1 >= wanted
            });
        }
        gates.generation.store(inner.fence_base().1, Ordering::SeqCst);
    }

    fn send(
        &mut self,
        inner: &mut dyn ExpertTransport,
        worker: usize,
        work: ExpertWork,
    ) -> Result<(), TransportError> {
        if let Some(fence) = &work.fence {
            self.0.steps.store(fence.step + 1, Ordering::SeqCst);
        }
        inner.send(worker, work)
    }
}

/// A coordinator over a store in memory, with workers that register themselves.
struct Live {
    engine: EngineHandle,
    status: watch::Receiver<ClusterStatus>,
    gates: Arc<Gates>,
    store: MemoryCluster,
    operator: MemoryStore,
}

/// A worker that has registered itself.
struct Registered {
    server: WorkerServer,
    // Its record lasts as long as it.
    _member: MemoryStore,
}

/// Writes a worker's record, as the worker does.
fn register(store: &MemoryCluster, id: &str, address: String) -> MemoryStore {
    let member = store.member();
    let record = WorkerRecord {
        address,
        host: id.to_owned(),
        weight: 1.0,
        ram_budget_bytes: 0,
        absent_layers: Vec::new(),
        container_digest: bench::container().digest().to_owned(),
        incarnation: 1,
        draining: false,
    };
    member.announce(&format!("workers/{id}"), serde_json::to_string(&record).unwrap());
    member
}

impl Registered {
    fn start(store: &MemoryCluster, id: &str) -> Self {
        let server = WorkerServer::start(id);
        Self { _member: register(store, id, server.address()), server }
    }

    fn works(&self) -> u64 {
        self.server.counters().snapshot().work_done
    }
}

fn tokenizer() -> Arc<Tokenizer> {
    let container = bench::container();
    let (json, config) =
        (container.tokenizer_json().unwrap().unwrap(), container.tokenizer_config().unwrap());
    Arc::new(Tokenizer::from_bytes(&json, config.as_deref()).unwrap())
}

fn eager() -> RemoteConfig {
    let mut config = quick();
    config.timings.settle = Duration::from_millis(50);
    config
}

impl Live {
    fn start(store: MemoryCluster, config: RemoteConfig, gates: &[(u64, u64)]) -> Self {
        let gates =
            Arc::new(Gates { generations: gates.iter().copied().collect(), ..Gates::default() });
        let remote = connect_by(config, Arc::new(store.member()), None);
        let status = remote.status();
        let engine = Engine::start(EngineParts {
            container: bench::container(),
            kernels: Kernels::new(None).unwrap(),
            tokenizer: tokenizer(),
            transport: Box::new(Wrapped::new(Box::new(remote), Gatekeeper(Arc::clone(&gates)))),
            config: EngineConfig { threads: 1, kv_budget_bytes: 64 << 20, ..Default::default() },
            thread_start: None,
        })
        .unwrap();
        let operator = store.member();
        let live = Self { engine, status, gates, store, operator };
        live.wait("the first placement", |live| live.status.borrow().complete);
        live
    }

    fn wait(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        wait_until(what, SOON, || condition(self));
    }

    fn step(&self) -> u64 {
        self.gates.steps.load(Ordering::SeqCst)
    }

    fn state(&self, worker: &str) -> String {
        let status = self.status.borrow();
        let found = status.workers.iter().find(|status| status.worker_id == worker);
        found.map(|status| status.state.clone()).unwrap_or_default()
    }

    fn submit(&self) -> EventStream {
        self.engine.submit(job().generation(format!("stream-{}", self.step()))).unwrap()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

fn job() -> Job {
    let sampling =
        shimmer_coordinator::sampler::Sampling { temperature: 0.8, seed: 5, ..Default::default() };
    Job { prompt: vec![72, 101, 108, 108, 111], max_tokens: TOKENS, sampling }
}

/// What an undisturbed process gives.
fn undisturbed() -> Outcome {
    InProcess::start(bench::container().dir()).run(&job())
}

fn finish(mut events: EventStream) -> Outcome {
    let mut tokens = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Started { .. } => {}
            Event::Delta { token_ids, .. } => tokens.extend(token_ids),
            Event::Finished(finished) => {
                return Outcome { tokens, logits_sha256: finished.logits_sha256.unwrap() };
            }
            Event::Failed(error) => panic!("the generation failed: {error}"),
        }
    }
    panic!("the events ended without the last one");
}

#[test]
fn a_worker_joins_a_stream_takes_load_and_is_drained_again() {
    let expected = undisturbed();
    let store = MemoryCluster::new(Duration::from_secs(10));
    let first = Registered::start(&store, "first");
    // The second generation is in force before step 150 of 300, the third before step 250.
    let live = Live::start(store, eager(), &[(150, 2), (250, 3)]);
    let events = live.submit();
    live.wait("the stream to run", |live| live.step() > 20);
    let second = Registered::start(&live.store, "second");
    live.wait("the second worker to take load", |_| second.works() > 0);
    assert!(live.step() < 250, "during the stream");
    let drain = Write::Put { key: "drains/second".to_owned(), value: String::new() };
    live.operator.write_now(&[], vec![drain]).unwrap();
    let outcome = finish(events);
    assert_eq!(outcome, expected, "no byte differs");
    assert_eq!(live.gates.generation.load(Ordering::SeqCst), 3);
    live.wait("the second worker to be let go", |live| live.state("second") == "draining");
    let told = |live: &Live| live.status.borrow().workers[1].detail.clone();
    live.wait("the reason to be told", |live| told(live).contains("holds no experts"));
    let works = second.works();
    assert!(works > 0);
    assert_eq!(finish(live.submit()), expected);
    assert_eq!(second.works(), works, "nothing is sent to it any more");
    assert!(first.works() > works);

    // Taken back.
    let undo = Write::Delete { key: "drains/second".to_owned() };
    live.operator.write_now(&[], vec![undo]).unwrap();
    live.wait("the second worker to be back", |live| live.state("second") == "serving");
    live.wait("the fourth generation", |live| live.gates.generation.load(Ordering::SeqCst) == 4);
    assert_eq!(finish(live.submit()), expected);
    assert!(second.works() > works);
}

#[test]
fn a_worker_that_returns_within_its_time_changes_no_placement() {
    let expected = undisturbed();
    let store = MemoryCluster::new(Duration::from_secs(10));
    let a = Registered::start(&store, "a");
    // It ends without a farewell.
    let killed = Meddler::start("b", Fault::WantsHints);
    let member = register(&store, "b", killed.address());
    let live = Live::start(store, eager(), &[]);
    live.wait("both to hold experts", |live| {
        let status = live.status.borrow();
        let holds = |id: &str| status.workers.iter().any(|w| w.worker_id == id && w.experts > 0);
        holds("a") && holds("b")
    });
    assert_eq!(finish(live.submit()), expected);
    let generation = live.gates.generation.load(Ordering::SeqCst);
    // The connection breaks, the lease lasts a while, then it comes back elsewhere.
    drop(killed);
    live.wait("the loss to be seen", |live| live.state("b") == "lost");
    assert!(live.status.borrow().complete, "the other one can stand in for it");
    member.expire_lease();
    drop(member);
    let back = Registered::start(&live.store, "b");
    live.wait("it to be back", |live| live.state("b") == "serving");
    assert_eq!(finish(live.submit()), expected);
    assert_eq!(live.gates.generation.load(Ordering::SeqCst), generation, "nothing has moved");
    assert!(back.works() > 0 && a.works() > 0);
}

#[test]
fn the_store_may_be_away_while_requests_run() {
    let expected = undisturbed();
    let store = MemoryCluster::new(Duration::from_secs(10));
    let _workers = [Registered::start(&store, "a"), Registered::start(&store, "b")];
    let live = Live::start(store, eager(), &[]);
    live.store.stop();
    live.store.advance(Duration::from_secs(3600));
    assert_eq!(finish(live.submit()), expected);
    live.store.start();
    assert_eq!(finish(live.submit()), expected);
}

#[test]
fn two_coordinators_follow_one_placement_and_either_can_lead() {
    let expected = undisturbed();
    let store = MemoryCluster::new(Duration::from_secs(10));
    let a = Registered::start(&store, "a");
    let named = |id: &str| RemoteConfig { coordinator_id: id.to_owned(), ..eager() };
    let one = Live::start(store.clone(), named("one"), &[]);
    let two = Live::start(store.clone(), named("two"), &[]);
    let leader = || store.snapshot().entries.get("leader").map(|entry| entry.value.clone());
    assert_eq!(leader().as_deref(), Some("one"));
    assert_eq!((finish(one.submit()), finish(two.submit())), (expected.clone(), expected.clone()));
    let b = Registered::start(&store, "b");
    for live in [&one, &two] {
        live.wait("the second generation", |l| l.gates.generation.load(Ordering::SeqCst) == 2);
    }
    assert_eq!((finish(one.submit()), finish(two.submit())), (expected.clone(), expected.clone()));
    assert!(a.works() > 0 && b.works() > 0);

    // Who decides goes; the other one does from then on.
    drop(one);
    two.wait("the other one to lead", |_| leader().as_deref() == Some("two"));
    let c = Registered::start(&store, "c");
    two.wait("the third generation", |l| l.gates.generation.load(Ordering::SeqCst) == 3);
    assert_eq!(finish(two.submit()), expected);
    assert!(c.works() > 0);
}

#[test]
fn a_worker_that_computes_differently_is_kept_out_until_it_is_readmitted() {
    let expected = undisturbed();
    let store = MemoryCluster::new(Duration::from_secs(10));
    let workers = [Registered::start(&store, "a"), Registered::start(&store, "b")];
    let mut remote = connect_by(eager(), Arc::new(store.member()), None);
    bench::wait_complete(&remote);
    remote.between_steps();
    assert_eq!(bench::run_step(&mut remote, 1, 3).unwrap(), bench::expected_sums(3));
    let before = remote.fence_base().1;
    remote.quarantine(1, "expert 3 of layer 1 differs");
    assert_eq!(remote.standing(1), Standing::Away, "at once");
    let written = || store.snapshot().entries.get("quarantines/b").map(|e| e.value.clone());
    wait_until("the record to be written", SOON, || written().is_some());
    assert!(written().unwrap().contains("expert 3 of layer 1 differs"));
    bench::wait_told(&remote, 1, "quarantined", "expert 3 of layer 1 differs");
    wait_until("a placement without it", SOON, || {
        remote.between_steps();
        remote.fence_base().1 > before
    });
    assert_eq!(bench::run_step(&mut remote, 2, 3).unwrap(), bench::expected_sums(3));

    // A coordinator that comes later keeps it out as well.
    let late = RemoteConfig { coordinator_id: "late".to_owned(), ..eager() };
    let late = Live::start(store.clone(), late, &[]);
    assert_eq!(finish(late.submit()), expected);
    assert_eq!(late.state("b"), "quarantined");
    let readmit = Write::Delete { key: "quarantines/b".to_owned() };
    store.member().write_now(&[], vec![readmit]).unwrap();
    late.wait("it to be back", |live| live.state("b") == "serving");
    let newest = before + 2;
    late.wait("a placement with it", |l| l.gates.generation.load(Ordering::SeqCst) >= newest);
    let before = workers[1].works();
    assert_eq!(finish(late.submit()), expected);
    assert!(workers[1].works() > before);
}
