//! A coordinator and its workers inside the test's own process, driven through the engine's handle.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use shimmer_cli::local::{LocalTransport, ProcessPlan};
use shimmer_coordinator::{
    engine::{
        Engine, EngineConfig, EngineHandle, EngineParts, Event, EventStream, GenerationError,
    },
    tokenizer::Tokenizer,
};
use shimmer_kernels::{Isa, Kernels};
use shimmer_model::Container;
use shimmer_worker::{
    ExpertCore, TierOptions, TierSnapshot,
    budget::{STEP_ROWS, WorkShape},
};

use crate::workload::{Job, Outcome};

/// Conditions of a run; none of them may matter.
#[derive(Debug, Clone)]
pub struct InProcessOptions {
    pub container: PathBuf,
    /// Relative capacity of each worker.
    pub worker_weights: Vec<f64>,
    pub threads: usize,
    /// Instruction set; absent takes the best one.
    pub isa: Option<Isa>,
    pub prefill_chunk: usize,
    pub tiers: TierOptions,
}

impl InProcessOptions {
    /// One worker, two threads, whole prompts at once.
    pub fn new(container: &Path) -> Self {
        Self {
            container: container.to_owned(),
            worker_weights: vec![1.0],
            threads: 2,
            isa: None,
            prefill_chunk: 512,
            tiers: TierOptions::default(),
        }
    }
}

/// A running engine; dropping it ends it.
#[derive(Debug)]
pub struct InProcess {
    engine: EngineHandle,
    workers: Vec<Arc<ExpertCore>>,
    tokenizer: Arc<Tokenizer>,
    container: Arc<Container>,
    next_id: AtomicU64,
}

impl InProcess {
    /// Runs a container under ordinary conditions.
    ///
    /// # Panics
    /// It cannot be run.
    pub fn start(container: &Path) -> Self {
        Self::with_options(&InProcessOptions::new(container))
    }

    /// Runs a container under the given conditions.
    ///
    /// # Panics
    /// It cannot be run.
    pub fn with_options(options: &InProcessOptions) -> Self {
        let container = Arc::new(Container::open(&options.container).expect("the container opens"));
        let kernels =
            Kernels::new(options.isa).expect("the instruction set is one of this processor");
        let InProcessOptions { worker_weights, threads, tiers, .. } = options;
        let shape = WorkShape::of(container.config(), STEP_ROWS, *threads);
        let plan = ProcessPlan::new(&container, worker_weights, tiers, shape, Vec::new())
            .expect("the experts fit");
        let transport = LocalTransport::start(&container, kernels, plan, tiers, *threads)
            .expect("the workers start");
        let workers = transport.cores();
        let json = container
            .tokenizer_json()
            .expect("the tokenizer can be read")
            .expect("there is a tokenizer");
        let config =
            container.tokenizer_config().expect("the tokenizer's configuration can be read");
        let tokenizer = Arc::new(
            Tokenizer::from_bytes(&json, config.as_deref()).expect("the tokenizer is usable"),
        );
        let config = EngineConfig {
            threads: options.threads,
            prefill_chunk: options.prefill_chunk,
            max_batch_rows: options.prefill_chunk.max(64),
            kv_budget_bytes: 256 << 20,
            ..EngineConfig::default()
        };
        let engine = Engine::start(EngineParts {
            container: Arc::clone(&container),
            kernels,
            tokenizer: Arc::clone(&tokenizer),
            transport: Box::new(transport),
            config,
            thread_start: None,
        })
        .expect("the engine starts");
        Self { engine, workers, tokenizer, container, next_id: AtomicU64::new(0) }
    }

    /// What each worker counts of its expert tiers.
    pub fn tiers(&self) -> Vec<TierSnapshot> {
        self.workers.iter().map(|worker| worker.tier_snapshot()).collect()
    }

    /// Takes memory from the cache of each worker.
    pub fn shrink(&self, bytes: u64) {
        for worker in &self.workers {
            worker.shrink_cache(bytes);
        }
    }

    /// Logits of every position.
    ///
    /// # Panics
    /// The forward pass fails.
    pub fn score(&self, ids: &[u32]) -> Vec<Vec<f32>> {
        self.engine.score(ids).expect("the forward pass succeeds")
    }

    /// Runs one job to its end.
    ///
    /// # Panics
    /// It fails.
    pub fn run(&self, job: &Job) -> Outcome {
        collect(self.submit(job))
    }

    /// Runs jobs at the same time; outcomes are in their order.
    ///
    /// # Panics
    /// One fails.
    pub fn run_together(&self, jobs: &[Job]) -> Vec<Outcome> {
        let streams: Vec<EventStream> = jobs.iter().map(|job| self.submit(job)).collect();
        streams.into_iter().map(collect).collect()
    }

    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub fn container(&self) -> &Container {
        &self.container
    }

    fn submit(&self, job: &Job) -> EventStream {
        let id = format!("job-{}", self.next_id.fetch_add(1, Ordering::Relaxed));
        self.engine.submit(job.generation(id)).expect("the job is valid")
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

fn collect(events: EventStream) -> Outcome {
    outcome(events).unwrap_or_else(|error| panic!("the generation failed: {error}"))
}

/// What a generation gave, once it has ended.
pub(crate) fn outcome(mut events: EventStream) -> Result<Outcome, GenerationError> {
    let mut tokens = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Started { .. } => {}
            Event::Delta { token_ids, .. } => tokens.extend(token_ids),
            Event::Finished(finished) => {
                let logits_sha256 = finished.logits_sha256.expect("the digest was asked for");
                return Ok(Outcome { tokens, logits_sha256 });
            }
            Event::Failed(error) => return Err(error),
        }
    }
    panic!("the events ended without an end: the engine has panicked")
}
