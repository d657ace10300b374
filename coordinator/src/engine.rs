//! The engine: one step thread that owns the model's trunk, the KV cache and every running sequence.
//!
//! [`Engine::start`] spawns the thread and returns an [`EngineHandle`], which any number of threads or tasks may clone.
//! Commands travel to the thread by a queue and events travel back by one channel per generation; nothing is shared.

mod active;
mod config;
mod events;
mod handle;
mod job;
mod memory;
mod refusals;
mod requests;
mod stats;
mod step_loop;

use std::{fmt, sync::Arc};

use crossbeam_channel::{Receiver, Sender, bounded};
use shimmer_kernels::{Kernels, MATH_ID, PAGE_POSITIONS};
use shimmer_model::{Container, ModelConfig};

use crate::dispatch::ExpertTransport;
use crate::kv_cache::{KvCache, PageAllocator};
use crate::scheduler::{Scheduler, StepLimits};
use crate::tokenizer::Tokenizer;
use crate::trunk::{Trunk, TrunkOptions};
pub use config::{ConfigError, EngineConfig, ModelInfo};
pub use events::{
    Event, EventSender, EventStream, FinishReason, Finished, GenerationError, PositionLogprobs,
    Timings, TokenLogprob, Usage, WorkerTimings, event_channel,
};
use handle::Command;
pub use handle::{EngineHandle, MAX_LOGPROBS, MAX_STOP_STRINGS, ScoreError, SubmitError};
pub use memory::EngineMemory;
use memory::kv_layout;
pub use refusals::RefusedRequests;
pub use requests::{LATENCY_BOUNDS_MS, RequestStats, Spread, TOKEN_BOUNDS};
pub use stats::EngineStats;
use stats::Published;
use step_loop::{StepBuffers, StepLoop};

/// Most rows whose logits are computed at once: 64 rows of a vocabulary of 150,000 are 38 MB.
const MAX_LOGIT_ROWS: usize = 64;

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Limits that do not fit together.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The container's trunk cannot be loaded.
    #[error("loading the trunk")]
    Model(#[from] shimmer_model::Error),
    /// The budget holds not one page.
    #[error(
        "a KV budget of {budget_bytes} bytes holds no page: {PAGE_POSITIONS} positions of this model take {page_bytes} bytes"
    )]
    KvBudget {
        /// The budget.
        budget_bytes: u64,
        /// One page over all layers.
        page_bytes: usize,
    },
    /// No address space for the pages.
    #[error("reserving {pages} KV pages")]
    KvMemory {
        /// How many.
        pages: u32,
        /// Why.
        source: std::io::Error,
    },
    /// The pool's threads could not be started.
    #[error("starting the trunk's pool of threads")]
    Pool(#[from] rayon::ThreadPoolBuildError),
    /// The step thread could not be started.
    #[error("starting the step thread")]
    Thread(#[source] std::io::Error),
    /// The step thread ended before it said anything.
    #[error("the step thread panicked while it started")]
    Panicked,
}

/// What an engine is made of.
#[derive(Debug)]
pub struct EngineParts {
    /// The model.
    pub container: Arc<Container>,
    /// The arithmetic.
    pub kernels: Kernels,
    /// Token ids to text.
    pub tokenizer: Arc<Tokenizer>,
    /// The workers.
    pub transport: Box<dyn ExpertTransport>,
    /// Limits.
    pub config: EngineConfig,
    /// What each thread of the trunk's pool does first.
    pub thread_start: Option<ThreadStart>,
}

/// Called on each new thread of a pool, with the thread's number.
#[derive(Clone)]
pub struct ThreadStart(pub Arc<dyn Fn(usize) + Send + Sync>);

impl fmt::Debug for ThreadStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadStart")
    }
}

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Loads the trunk, then spawns the step thread. Returns when it is ready for submissions.
    pub fn start(parts: EngineParts) -> Result<EngineHandle, EngineError> {
        parts.config.validate()?;
        let model = parts.container.config();
        let layout = kv_layout(&parts.container);
        let layers = model.layers.len();
        let pages = memory::pages(&parts.container, &parts.config);
        if pages == 0 {
            let (budget_bytes, page_bytes) =
                (parts.config.kv_budget_bytes, layout.page_bytes() * layers);
            return Err(EngineError::KvBudget { budget_bytes, page_bytes });
        }
        let context = context_length(model, pages, &parts.config);
        let info = model_info(&parts.container, context);
        let (handle, commands) = EngineHandle::new(info, &parts.config);
        let published = handle.published();
        let (ready, started) = bounded(1);
        let thread = std::thread::Builder::new().name("shimmer-step".to_owned());
        let thread = thread
            .spawn(move || run(parts, pages, context, published, &commands, &ready))
            .map_err(EngineError::Thread)?;
        started.recv().map_err(|_| EngineError::Panicked)??;
        handle.attach(thread);
        Ok(handle)
    }
}

/// The step thread. Everything runs inside the trunk's pool, so that no step pays for entering it; the weights live on the
/// stack, so that the trunk may borrow them.
fn run(
    parts: EngineParts,
    pages: u32,
    context: u32,
    published: Published,
    commands: &Receiver<Command>,
    ready: &Sender<Result<(), EngineError>>,
) {
    let mut pool = rayon::ThreadPoolBuilder::new()
        .num_threads(parts.config.threads)
        .thread_name(|index| format!("shimmer-trunk-{index}"));
    if let Some(ThreadStart(start)) = parts.thread_start.clone() {
        pool = pool.start_handler(move |index| start(index));
    }
    let pool = match pool.build() {
        Ok(pool) => pool,
        Err(error) => return report(ready, Err(error.into())),
    };
    pool.install(|| {
        let weights = match parts.container.trunk() {
            Ok(weights) => weights,
            Err(error) => return report(ready, Err(error.into())),
        };
        match step_loop(parts, &weights, pages, context, published) {
            Ok(step_loop) => {
                report(ready, Ok(()));
                step_loop.run(commands);
            }
            Err(error) => report(ready, Err(error)),
        }
    });
}

fn report(ready: &Sender<Result<(), EngineError>>, result: Result<(), EngineError>) {
    // The starter waits for this one message and for nothing else.
    let _gone = ready.send(result).is_err();
}

fn step_loop<'w>(
    parts: EngineParts,
    weights: &'w shimmer_model::Trunk,
    pages: u32,
    context: u32,
    published: Published,
) -> Result<StepLoop<'w>, EngineError> {
    let EngineParts { container, kernels, tokenizer, transport, config, .. } = parts;
    let model = container.config();
    let max_logit_rows = config.max_running.min(MAX_LOGIT_ROWS);
    let options = TrunkOptions {
        max_rows: config.max_batch_rows,
        max_logit_rows,
        positions: context as usize,
        faults: config.faults,
        layer_deadline: config.layer_deadline,
    };
    let trunk = Trunk::new(&container, weights, kernels, options)?;
    let cache = KvCache::new(pages, kv_layout(&container), model.layers.len())
        .map_err(|source| EngineError::KvMemory { pages, source })?;
    let EngineConfig { max_batch_rows, prefill_chunk, max_running, .. } = config;
    let limits = StepLimits { max_batch_rows, prefill_chunk, max_running };
    Ok(StepLoop {
        trunk,
        cache,
        scheduler: Scheduler::new(limits, PageAllocator::new(pages)),
        transport,
        tokenizer,
        end_tokens: model.eos_token_ids.as_slice().into(),
        moe_layers: model.moe_layers().collect(),
        vocab_size: model.vocab_size,
        max_logit_rows,
        jobs: std::collections::BTreeMap::new(),
        next_id: 0,
        step: 1,
        traced: 0,
        buffers: StepBuffers::default(),
        stats: EngineStats::default(),
        published,
    })
}

/// The model's own limit, lowered by the configuration and by what the pages hold.
fn context_length(model: &ModelConfig, pages: u32, config: &EngineConfig) -> u32 {
    let held = pages as usize * PAGE_POSITIONS;
    let context = u32::try_from(model.max_position.min(held)).unwrap_or(u32::MAX);
    context.min(config.context_length.unwrap_or(u32::MAX))
}

fn model_info(container: &Container, context_length: u32) -> ModelInfo {
    let model = container.config();
    let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    ModelInfo {
        architecture: model.family.to_string(),
        container_digest: container.digest().to_owned(),
        math_id: MATH_ID.to_owned(),
        numeric_class: container.manifest().numeric_class.to_string(),
        context_length,
        vocab_size: count(model.vocab_size),
        layers: count(model.layers.len()),
        moe_layers: count(model.moe_layers().count()),
        experts: model.moe_layers().map(|(_, experts)| u64::from(experts)).sum(),
        end_token_ids: model.eos_token_ids.clone(),
    }
}

#[cfg(test)]
mod tests;
