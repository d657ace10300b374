//! `shimmer serve`: a coordinator until it is asked to stop.

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use shimmer_coordinator::{
    admin::{Admin, AdminParts},
    api::{DoorCounters, ServerOptions, serve},
    dispatch::FaultPolicy,
    engine::{EngineConfig, EngineMemory},
    journal::{Journal, JournalError},
    membership::leader::Timings,
    metrics::{CoordinatorCollector, Sources, VllmCollector},
    transport::{ClusterModel, OwnExperts, RemoteConfig, RemoteWorkers},
};
use shimmer_kernels::Kernels;
use shimmer_model::Container;
use shimmer_proto::{
    membership::{Snapshot, records::CoordinatorRecord},
    tls::Dialer,
    trace::TraceCounts,
};
use shimmer_worker::{bind, tier_options::ByteSize};
use tokio::{net::TcpListener, sync::watch};

use super::{
    BUILD,
    admin::{self, AdminPort},
    cannot_listen, security,
};
use crate::{
    attendant::Attendant,
    block_on,
    config::{ClusterConfig, ServeConfig, host_name, incarnation},
    error::Error,
    local::{OwnCopy, engine_terms, inference, kernels, refuse},
    logging,
    metrics::{self, MembershipCollector, MembershipReport, Page, ProcessCollector},
    output,
    traces::{TraceCollector, Traces},
};

/// Runs the command.
///
/// # Errors
/// The container or a limit is refused, or the address cannot be listened on.
pub fn run(config: ServeConfig) -> Result<(), Error> {
    logging::start(&config.log, config.log_format);
    let attendant = Attendant::start(config.metrics_listen)?;
    let container = super::open_container(&config.container)?;
    let kernels = kernels(config.isa)?;
    let identity = security::identity(config.tls.as_ref())?;
    let members = identity.as_ref().map(|identity| identity.server());
    let process = ProcessCollector::new("coordinator").with_certificate("member", members.clone());
    let dialer = identity.map_or_else(Dialer::plaintext, |identity| Dialer::tls(identity.client()));
    let admin_port = config.admin_listen.map(|at| AdminPort::bind(at, members)).transpose()?;
    // Before the model is loaded: an address that is taken is heard of at once.
    let listener = bind(&config.listen.to_string())
        .map_err(|error| cannot_listen(config.listen, error, "--listen"))?;
    let address =
        listener.local_addr().map_err(|error| cannot_listen(config.listen, error, "--listen"))?;
    let door = security::door(&config, address)?;
    let process = process.with_certificate("api", door.tls.clone());
    let counters = Arc::<DoorCounters>::default();
    let links = |error| Error::failed("cannot start the links to the workers", error);
    let journal = config.journal.clone().map(Journal::open).transpose().map_err(cannot_journal)?;
    let model = ClusterModel::from_container(&container, BUILD).map_err(links)?;
    let own = config.own_experts.map(|size| own_copy(&container, kernels, size, &config));
    let own = own.transpose()?;
    let store = config.store()?;
    let membership = store.watch();
    let reached = config.cluster.as_ref().map(|cluster| cluster.advertised(address, &host_name()));
    let settings = RemoteConfig {
        announced: reached.as_ref().map(|reached| CoordinatorRecord {
            address: reached.to_string(),
            admin_address: admin_port
                .as_ref()
                .map_or_else(String::new, |port| port.advertised(reached)),
            container_digest: container.digest().to_owned(),
            incarnation: incarnation(),
            in_force: 0,
            follows: 0,
        }),
        ..remote(&config, address, dialer)
    };
    let id = settings.coordinator_id.clone();
    let traces = Traces::start(config.traces.as_ref(), "serve", &id)?;
    let workers = RemoteWorkers::start(settings, model, store, own).map_err(links)?;
    let (status, links, handle) = (workers.status(), workers.observer(), workers.handle());
    let name =
        config.model_name.clone().unwrap_or_else(|| container.manifest().source.name.clone());
    let shown_as = name.clone();
    let inference = inference(
        &container,
        kernels,
        Box::new(workers),
        engine(&config),
        status.clone(),
        name,
        None,
    )?;
    let counted = traces.as_ref().map(Traces::counts);
    let tracer = traces.as_ref().map(Traces::tracer).unwrap_or_default();
    let inference = inference.with_tracer(tracer);
    let inference = match &journal {
        Some(journal) => inference.with_journal(journal.clone()),
        None => inference,
    };
    let operators = Admin::new(AdminParts {
        cluster: config.cluster.as_ref().map(ClusterConfig::name).unwrap_or_default(),
        coordinator_id: id.clone(),
        control: Arc::new(handle.clone()),
        engine: inference.engine().clone(),
    });
    let sources = Sources {
        control: handle,
        engine: inference.engine().clone(),
        links,
        journal,
        cluster: status,
        door: Arc::clone(&counters),
        keys: door.keys.clone(),
    };
    let shutdown = attendant.serving(page(sources, membership, shown_as, process, counted));
    block_on(async {
        let listener = TcpListener::from_std(listener)
            .map_err(|error| cannot_listen(config.listen, error, "--listen"))?;
        if let (Some(cluster), Some(reached)) = (&config.cluster, &reached) {
            cluster.warn_of(reached).await;
        }
        tracing::info!(id, %address, isa = %kernels.isa(), threads = config.threads, "coordinator is listening");
        output::announce(&format!("listening on {address}"));
        let (delay, drain) = (config.drain_delay.0, config.drain_timeout.0);
        let options = ServerOptions { door, counters, delay, drain };
        let serving = serve(inference, listener, shutdown, options);
        Box::pin(admin::beside(serving, admin_port, operators))
            .await
            .map_err(|error| Error::failed("the coordinator stopped", error))?;
        tracing::info!("stopped");
        Ok(())
    })
}

/// The journal's directory is not usable.
fn cannot_journal(error: JournalError) -> Error {
    Error::failed("cannot keep a journal", error)
        .with_hint("give a directory with --journal that this process may write, on a file system with hard links")
}

/// What the coordinator counts, and how the store stands that it is in.
fn page(
    sources: Sources,
    membership: watch::Receiver<Snapshot>,
    model_name: String,
    process: ProcessCollector,
    traces: Option<Arc<TraceCounts>>,
) -> Page {
    let (text, view, asked) = (sources.clone(), membership.clone(), sources.clone());
    let engine = sources.engine.clone();
    let mut registry = metrics::registry(CoordinatorCollector(move || text.report()));
    registry
        .register_collector(Box::new(VllmCollector { model_name, stats: move || engine.stats() }));
    registry.register_collector(Box::new(MembershipCollector(view)));
    registry.register_collector(Box::new(process));
    if let Some(counts) = traces {
        registry.register_collector(Box::new(TraceCollector(counts)));
    }
    let json = move || {
        let mut report = serde_json::json!(sources.report());
        let membership = MembershipReport::of(&membership.borrow(), SystemTime::now());
        report["membership"] = serde_json::json!(membership);
        report
    };
    Page { registry, json: Box::new(json), ready: Box::new(move || can_generate(&asked)) }
}

/// Whether a request would be answered now.
fn can_generate(sources: &Sources) -> Result<(), String> {
    if sources.engine.has_ended() {
        return Err("the engine has ended".to_owned());
    }
    let cluster = sources.cluster.borrow();
    if cluster.complete {
        return Ok(());
    }
    let serving = cluster.workers.iter().filter(|worker| worker.state == "serving").count();
    let known = cluster.workers.len();
    Err(format!(
        "waiting for workers: {serving} of {known} serve, and some experts have nobody who computes them"
    ))
}

/// The experts that this process can compute itself.
fn own_copy(
    container: &Arc<Container>,
    kernels: Kernels,
    size: ByteSize,
    config: &ServeConfig,
) -> Result<Box<dyn OwnExperts>, Error> {
    let beside = engine_terms(EngineMemory::of(container, &engine(config)));
    let copy = OwnCopy::start(container, kernels, size.0, beside, config.threads);
    let copy = copy.map_err(|error| refuse(error).with_hint("lower --own-experts"))?;
    tracing::info!(bytes = size.0, "own copy of the experts, for when no worker has one");
    Ok(Box::new(copy))
}

/// The name of this coordinator. Others of the same cluster may go by the default as well, and each needs a name of its own.
fn id_of(config: &ServeConfig, listening: SocketAddr) -> String {
    if config.cluster.is_none() || config.id != ServeConfig::DEFAULT_ID {
        return config.id.clone();
    }
    let (id, port) = (&config.id, listening.port());
    let host: String = host_name().chars().filter(char::is_ascii_graphic).take(40).collect();
    format!("{id}-{host}-{port}")
}

fn remote(config: &ServeConfig, listening: SocketAddr, dialer: Dialer) -> RemoteConfig {
    let defaults = RemoteConfig::default();
    let layer_ceiling = config.layer_deadline.0;
    RemoteConfig {
        dialer,
        coordinator_id: id_of(config, listening),
        build: BUILD.to_owned(),
        connect_timeout: config.connect_timeout.0,
        load_stall_timeout: config.load_stall_timeout.0,
        layer_floor: defaults.layer_floor.min(layer_ceiling),
        layer_ceiling,
        probe_timeout: config.probe_timeout.0,
        replicas: config.replicas,
        timings: Timings { replace_after: config.replace_after.0, ..defaults.timings },
        ..defaults
    }
}

fn engine(config: &ServeConfig) -> EngineConfig {
    EngineConfig {
        threads: config.threads,
        max_batch_rows: config.step_rows,
        prefill_chunk: config.prefill_chunk,
        max_running: config.max_sequences,
        max_waiting: config.queue,
        kv_budget_bytes: config.kv_budget.0,
        context_length: config.context,
        layer_deadline: config.layer_deadline.0,
        faults: FaultPolicy {
            hedge_factor: config.hedge,
            audit_per_10k: config.audit_per_10k,
            ..FaultPolicy::default()
        },
        ..EngineConfig::default()
    }
}
