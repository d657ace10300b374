//! `shimmer worker`: serves experts until it is asked to stop.

mod registration;

use std::{
    sync::Arc,
    time::{Instant, SystemTime},
};

use shimmer_proto::{membership::Snapshot, trace::TraceCounts};
use shimmer_worker::{
    ExpertCore, ServeConfig, WorkerConfig as CoreConfig, bind,
    metrics::{WorkerCollector, WorkerReport},
    serve,
};
use tokio::sync::watch;

use self::registration::{Registration, while_serving};
use super::{cannot_listen, security};
use crate::{
    attendant::Attendant,
    block_on,
    config::{WorkerConfig, host_name},
    error::Error,
    local::{kernels, refuse_worker},
    logging,
    metrics::{self, MembershipCollector, MembershipReport, Page, ProcessCollector},
    output,
    profile::{Moment, Profile},
    traces::{TraceCollector, Traces},
};

/// Runs the command.
///
/// # Errors
/// The container or the budget is refused, or the address cannot be listened on.
pub fn run(config: WorkerConfig) -> Result<(), Error> {
    logging::start(&config.log, config.log_format);
    let attendant = Attendant::start(config.metrics_listen)?;
    let container = super::open_container(&config.container)?;
    let kernels = kernels(config.isa)?;
    let tls = security::identity(config.tls.as_ref())?.map(|identity| identity.server());
    let process = ProcessCollector::new("worker").with_certificate("member", tls.clone());
    let listener = bind(&config.listen.to_string())
        .map_err(|error| cannot_listen(config.listen, error, "--listen"))?;
    let address =
        listener.local_addr().map_err(|error| cannot_listen(config.listen, error, "--listen"))?;
    let id = config.id.unwrap_or_else(|| format!("{}:{}", host_name(), address.port()));
    // Before the experts are loaded: a password that cannot be read is heard of at once.
    let store = config.cluster.as_ref().map(|cluster| cluster.connect(&id)).transpose()?;
    let core = ExpertCore::new(
        container,
        kernels,
        CoreConfig {
            id: id.clone(),
            host: config.host_label.unwrap_or_else(host_name),
            weight: config.weight,
            tiers: config.tiers,
            coordinators: config.max_coordinators,
            threads: config.threads,
            pool: None,
            build: super::BUILD.to_owned(),
        },
    )
    .map_err(refuse_worker)?;
    let traces = Traces::start(config.traces.as_ref(), "worker", &id)?;
    if let Some(traces) = &traces {
        core.trace(traces.tracer());
    }
    if store.is_some() {
        core.announced(Instant::now());
    }
    let view = store.as_ref().map(|store| store.watch());
    let shutdown =
        attendant.serving(page(&core, view, process, traces.as_ref().map(Traces::counts)));
    block_on(async {
        tracing::info!(id, %address, isa = %kernels.isa(), threads = config.threads, "worker is ready for coordinators");
        output::announce(&format!("listening on {address}"));
        let options =
            ServeConfig { drain_timeout: config.drain_timeout.0, tls, ..ServeConfig::default() };
        let registration = store
            .zip(config.cluster)
            .map(|(store, cluster)| Registration::new(store, cluster, &core, address));
        let serving = serve(Arc::clone(&core), listener, options, shutdown.clone());
        while_serving(registration, shutdown, serving)
            .await
            .map_err(|error| Error::failed("the worker stopped", error))?;
        // A connection that does not end keeps the worker, but not what it has learned.
        core.save_usage();
        if config.profile {
            output::note(&Profile::between(&Moment::default(), &Moment::now(None, &[core])).text());
        }
        tracing::info!("stopped");
        Ok(())
    })
}

/// What the worker counts, and how the store stands that it is in.
fn page(
    core: &Arc<ExpertCore>,
    view: Option<watch::Receiver<Snapshot>>,
    process: ProcessCollector,
    traces: Option<Arc<TraceCounts>>,
) -> Page {
    let (text, json, asked) = (Arc::clone(core), Arc::clone(core), Arc::clone(core));
    let mut registry = metrics::registry(WorkerCollector(move || WorkerReport::of(&text)));
    registry.register_collector(Box::new(process));
    if let Some(view) = view.clone() {
        registry.register_collector(Box::new(MembershipCollector(view)));
    }
    if let Some(counts) = traces {
        registry.register_collector(Box::new(TraceCollector(counts)));
    }
    let json = move || {
        let mut report = serde_json::json!(WorkerReport::of(&json));
        if let Some(view) = &view {
            let membership = MembershipReport::of(&view.borrow(), SystemTime::now());
            report["membership"] = serde_json::json!(membership);
        }
        report
    };
    let ready = move || match asked.unready(Instant::now()) {
        Some(why) => Err(why.to_owned()),
        None => Ok(()),
    };
    Page { registry, json: Box::new(json), ready: Box::new(ready) }
}
