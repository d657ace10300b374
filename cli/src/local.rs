//! A coordinator and its workers inside one process: the same engine, the same expert function, no sockets.

mod transport;

use std::sync::Arc;

use shimmer_coordinator::{
    api::{ClusterStatus, Inference, InferenceParts},
    chat_template::ChatTemplate,
    dispatch::ExpertTransport,
    engine::{Engine, EngineConfig, EngineError, EngineParts},
    tokenizer::Tokenizer,
};
use shimmer_kernels::{Isa, Kernels};
use shimmer_model::Container;
use tokio::sync::watch;

use crate::{
    commands::{BUILD, open_container},
    config::InProcess,
    error::Error,
};
pub use transport::{LocalError, LocalTransport};

/// A running in-process cluster. Dropping it ends the engine.
#[derive(Debug)]
pub struct LocalCluster {
    inference: Inference,
    // The inference service watches this end.
    _status: watch::Sender<ClusterStatus>,
}

impl LocalCluster {
    /// Loads the container and starts the engine. Takes as long as the disk takes.
    ///
    /// # Errors
    /// The container cannot be used, or a limit does not fit.
    pub fn start(options: &InProcess) -> Result<Self, Error> {
        Self::start_with(options, EngineConfig::default(), |transport| transport)
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
        let transport =
            LocalTransport::start(&container, kernels, &options.worker_weights, options.threads)
                .map_err(|error| Error::failed("cannot start the in-process workers", error))?;
        let status = transport.status();
        let config = EngineConfig {
            threads: options.threads,
            prefill_chunk: options.prefill_chunk,
            kv_budget_bytes: options.kv_budget.0,
            context_length: options.context,
            ..limits
        };
        let name = container.manifest().source.name.clone();
        let (status, receiver) = watch::channel(status);
        let inference =
            inference(&container, kernels, wrap(Box::new(transport)), config, receiver, name)?;
        Ok(Self { inference, _status: status })
    }

    /// The service, as clients see it over gRPC.
    pub fn inference(&self) -> &Inference {
        &self.inference
    }
}

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
