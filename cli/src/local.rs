//! A coordinator and its workers inside one process: the same engine, the same expert function, no sockets.

mod own;
mod plan;
mod transport;

use std::sync::Arc;

use shimmer_coordinator::{
    api::{ClusterStatus, Inference, InferenceParts},
    chat_template::ChatTemplate,
    dispatch::ExpertTransport,
    engine::{Engine, EngineConfig, EngineError, EngineMemory, EngineParts, ThreadStart},
    tokenizer::Tokenizer,
};
use shimmer_kernels::{Isa, Kernels};
use shimmer_model::Container;
use shimmer_proto::trace::Tracer;
use shimmer_worker::{
    ExpertCore,
    budget::WorkShape,
    memory::{ThreadPlacement, Topology},
};
use tokio::sync::watch;

use crate::{
    commands::{BUILD, open_container},
    config::InProcess,
    error::Error,
    profile::Moment,
};
pub use own::OwnCopy;
pub use plan::{PlannedWorker, ProcessPlan, engine_terms};
pub use transport::{LocalError, LocalTransport};

/// A running in-process cluster. Dropping it ends the engine and then the workers, which save what they have to.
#[derive(Debug)]
pub struct LocalCluster {
    inference: Inference,
    cores: Vec<Arc<ExpertCore>>,
    // The inference service watches this end.
    _status: watch::Sender<ClusterStatus>,
}

impl LocalCluster {
    /// Loads the container and starts the engine. Takes as long as the disk takes.
    ///
    /// # Errors
    /// The container cannot be used, or a limit does not fit.
    pub fn start(options: &InProcess) -> Result<Self, Error> {
        Self::start_with(options, one_at_a_time(options), |transport| transport)
    }

    /// As [`Self::start`], with further limits of the engine, and with the transport wrapped, for example to count or to
    /// delay.
    ///
    /// # Errors
    /// The container cannot be used, or a limit does not fit.
    pub fn start_with(
        options: &InProcess,
        limits: EngineConfig,
        wrap: impl FnOnce(Box<dyn ExpertTransport>) -> Box<dyn ExpertTransport>,
    ) -> Result<Self, Error> {
        let container = open_container(&options.container)?;
        let kernels = kernels(options.isa)?;
        let config = engine_config(options, limits);
        let plan = plan(&container, options, &config)?;
        plan.budget.log();
        let transport =
            LocalTransport::start(&container, kernels, plan, &options.tiers, options.threads)
                .map_err(refuse)?;
        let (status, cores) = (transport.status(), transport.cores());
        let name = container.manifest().source.name.clone();
        let (status, receiver) = watch::channel(status);
        // The trunk's threads compute the experts.
        let threads =
            ThreadPlacement::decide(options.tiers.numa, &Topology::detect(), options.threads);
        let start = threads.handler().map(ThreadStart);
        let inference = inference(
            &container,
            kernels,
            wrap(Box::new(transport)),
            config,
            receiver,
            name,
            start,
        )?;
        Ok(Self { inference, cores, _status: status })
    }

    /// The service, as clients see it over gRPC.
    pub fn inference(&self) -> &Inference {
        &self.inference
    }

    /// Lets the workers tell what they do for traced requests.
    pub(crate) fn trace(&self, tracer: &Tracer) {
        if tracer.is_on() {
            self.cores.iter().for_each(|core| core.trace(tracer.clone()));
        }
    }

    /// Everything that is counted, now.
    pub(crate) fn moment(&self) -> Moment {
        Moment::now(Some(self.inference.engine().stats()), &self.cores)
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        // The step thread holds the workers as well.
        self.inference.engine().shutdown();
    }
}

/// Limits of an engine that answers one request after another.
pub fn one_at_a_time(options: &InProcess) -> EngineConfig {
    EngineConfig {
        max_batch_rows: options.prefill_chunk,
        max_running: 1,
        ..EngineConfig::default()
    }
}

fn engine_config(options: &InProcess, limits: EngineConfig) -> EngineConfig {
    EngineConfig {
        threads: options.threads,
        prefill_chunk: options.prefill_chunk,
        kv_budget_bytes: options.kv_budget.0,
        context_length: options.context,
        ..limits
    }
}

/// The memory of an in-process cluster.
///
/// # Errors
/// Something does not fit.
pub fn plan(
    container: &Container,
    options: &InProcess,
    limits: &EngineConfig,
) -> Result<ProcessPlan, Error> {
    let config = engine_config(options, limits.clone());
    let beside = engine_terms(EngineMemory::of(container, &config));
    let shape = WorkShape::of(container.config(), config.max_batch_rows, options.threads);
    ProcessPlan::new(container, &options.worker_weights, &options.tiers, shape, beside)
        .map_err(refuse)
}

/// What does not fit is a refusal, the rest a failure.
pub(crate) fn refuse(error: LocalError) -> Error {
    match error {
        LocalError::Plan(error) => Error::refused(error.to_string()).with_hint(SEE_PLAN),
        LocalError::Worker(error) => refuse_worker(error),
        error => Error::failed("cannot start the in-process workers", error),
    }
}

/// As [`refuse`], of a worker's own errors.
pub(crate) fn refuse_worker(error: shimmer_worker::Error) -> Error {
    use shimmer_worker::Error::{Budget, History, Mirror, NoRoom, Setting, UnknownMemory};
    match error {
        Budget { .. } | NoRoom { .. } | UnknownMemory => {
            Error::refused(error.to_string()).with_hint(SEE_PLAN)
        }
        History(error) => Error::refused(error.to_string())
            .with_hint("give --usage another file, or remove this one to begin anew"),
        Mirror { .. } => Error::refused(error.to_string()),
        Setting { .. } => Error::refused(error.to_string())
            .with_hint("`--print-config` shows the effective settings"),
        error => Error::failed("cannot start the worker", error),
    }
}

const SEE_PLAN: &str = "`shimmer plan` with the same flags shows every term of the memory";

/// Kernels of the wanted instruction set, or of the best one.
pub(crate) fn kernels(isa: Option<Isa>) -> Result<Kernels, Error> {
    Kernels::new(isa).map_err(|error| Error::refused(error.to_string()))
}

/// Tokenizer, chat template and engine of a container behind the public service.
pub(crate) fn inference(
    container: &Arc<Container>,
    kernels: Kernels,
    transport: Box<dyn ExpertTransport>,
    config: EngineConfig,
    cluster: watch::Receiver<ClusterStatus>,
    model_name: String,
    thread_start: Option<ThreadStart>,
) -> Result<Inference, Error> {
    let directory = container.dir().display().to_string();
    let read =
        |error| Error::failed(format!("cannot read the tokenizer files of {directory}"), error);
    let tokenizer_json = container.tokenizer_json().map_err(read)?.ok_or_else(|| {
        Error::refused(format!("the container {directory} has no tokenizer.json"))
            .with_hint("put it beside the checkpoint's config.json and convert again")
    })?;
    let tokenizer_config = container.tokenizer_config().map_err(read)?;
    let template = container.chat_template().map_err(read)?;
    let text =
        |error| Error::failed(format!("cannot use the tokenizer files of {directory}"), error);
    let tokenizer = Arc::new(
        Tokenizer::from_bytes(&tokenizer_json, tokenizer_config.as_deref()).map_err(text)?,
    );
    let chat_template = ChatTemplate::from_files(template.as_deref(), tokenizer_config.as_deref())
        .map_err(text)?
        .map(Arc::new);
    let engine = Engine::start(EngineParts {
        container: Arc::clone(container),
        kernels,
        tokenizer: Arc::clone(&tokenizer),
        transport,
        config,
        thread_start,
    })
    .map_err(|error| match error {
        EngineError::Config(_) | EngineError::KvBudget { .. } => Error::refused(error.to_string()),
        error => Error::failed(format!("cannot serve the container {directory}"), error),
    })?;
    Ok(Inference::new(InferenceParts {
        engine,
        tokenizer,
        chat_template,
        cluster,
        model_name,
        build: BUILD.to_owned(),
    }))
}
