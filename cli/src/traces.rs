//! Sends finished spans to a collector over OTLP, in a thread of its own.
//!
//! Whoever makes spans never waits for it: the queue is bounded, an export has a short limit, and what a slow or dead
//! collector does not take is dropped and counted.

mod client;
mod collector;
mod settings;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use opentelemetry::{
    InstrumentationScope, KeyValue,
    trace::{Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState},
};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::{
    Resource,
    trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks},
};
use shimmer_proto::trace::{Kind, SpanRecord, TraceContext, TraceCounts, Tracer, Value};

use crate::error::Error;
pub(crate) use client::ClientTrace;
pub(crate) use collector::TraceCollector;
pub use settings::{OtlpProtocol, TraceArgs, TraceConfig, trace_config};

/// Most spans of one export: about 200 KiB.
const BATCH: usize = 512;
/// Spans wait so long for others.
const GATHER: Duration = Duration::from_millis(500);
/// Longest export. A collector beside the process answers in milliseconds.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the last spans when the process ends, half of it more for an export that is under way.
const FLUSH: Duration = Duration::from_millis(600);

/// The exporter's thread; dropping it sends the last spans, for less than a second.
#[derive(Debug)]
pub struct Traces {
    tracer: Tracer,
    counts: Arc<TraceCounts>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Traces {
    /// Starts the exporter; none without an endpoint.
    ///
    /// # Errors
    /// The exporter cannot be built, or its thread not be started.
    pub fn start(
        config: Option<&TraceConfig>,
        role: &str,
        instance: &str,
    ) -> Result<Option<Self>, Error> {
        let Some(config) = config else { return Ok(None) };
        let failed = |error: &dyn std::fmt::Display| {
            Error::failed("cannot export traces", error.to_string())
                .with_hint("check --otlp-endpoint")
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("shimmer-otlp-io")
            .enable_all()
            .build()
            .map_err(|error| failed(&error))?;
        // The exporter's connection belongs to the runtime.
        let entered = runtime.enter();
        let mut exporter = exporter(config).map_err(|error| failed(&error))?;
        drop(entered);
        let resource = Resource::builder_empty()
            .with_service_name(format!("shimmer-{role}"))
            .with_attributes([
                KeyValue::new("service.instance.id", instance.to_owned()),
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            ])
            .build();
        exporter.set_resource(&resource);
        let (tracer, queue, counts) = Tracer::new(config.sample);
        let ending = Arc::new(AtomicBool::new(false));
        let (told, ended) = (Arc::clone(&counts), Arc::clone(&ending));
        let thread = std::thread::Builder::new().name("shimmer-otlp".to_owned());
        let thread = thread
            .spawn(move || {
                export(&runtime, &exporter, &queue, &told, &ended);
                // A collector that never answers holds nothing up.
                runtime.shutdown_background();
            })
            .map_err(|error| failed(&error))?;
        tracing::info!(endpoint = config.endpoint, sample = config.sample, "traces are exported");
        Ok(Some(Self { tracer, counts, ending, thread: Some(thread) }))
    }

    /// Where spans go.
    pub fn tracer(&self) -> Tracer {
        self.tracer.clone()
    }

    /// What became of them.
    pub fn counts(&self) -> Arc<TraceCounts> {
        Arc::clone(&self.counts)
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        self.ending.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that exports traces panicked");
        }
        let (exported, dropped) = (self.counts.exported(), self.counts.dropped());
        tracing::info!(exported, dropped, "traces have ended");
    }
}

fn exporter(config: &TraceConfig) -> Result<SpanExporter, opentelemetry_otlp::ExporterBuildError> {
    match config.protocol {
        OtlpProtocol::Grpc => SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&config.endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build(),
        OtlpProtocol::Http => SpanExporter::builder()
            .with_http()
            .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
            .with_endpoint(config.http_endpoint())
            .with_timeout(EXPORT_TIMEOUT)
            .build(),
    }
}

/// Exports until the end was asked for, then what is left within [`FLUSH`].
fn export(
    runtime: &tokio::runtime::Runtime,
    exporter: &SpanExporter,
    queue: &Receiver<SpanRecord>,
    counts: &TraceCounts,
    ending: &AtomicBool,
) {
    let scope = InstrumentationScope::builder("shimmer").build();
    let mut end: Option<Instant> = None;
    let mut complained = false;
    loop {
        if end.is_none() && ending.load(Relaxed) {
            end = Some(Instant::now() + FLUSH);
        }
        let batch = gather(queue, ending);
        if batch.is_empty() {
            if end.is_some() {
                return;
            }
            continue;
        }
        let spans = batch.len();
        let left = end.map_or(EXPORT_TIMEOUT, |end| end.saturating_duration_since(Instant::now()));
        let batch = batch.into_iter().map(|span| data(span, &scope)).collect();
        let sent = runtime.block_on(async {
            // An end that comes during an export shortens it.
            let limit = async {
                let begun = Instant::now();
                while begun.elapsed() < left && (end.is_some() || !ending.load(Relaxed)) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                if end.is_none() && ending.load(Relaxed) {
                    tokio::time::sleep(FLUSH / 2).await;
                }
            };
            tokio::select! {
                sent = exporter.export(batch) => sent.map_err(|error| error.to_string()),
                () = limit => Err("the collector does not answer in time".to_owned()),
            }
        });
        match sent {
            Ok(()) => {
                counts.add_exported(spans);
                complained = false;
            }
            Err(error) => {
                counts.add_dropped(spans);
                // Once for each outage; the counter tells the rest.
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(error, "the collector takes no spans; they are dropped");
                }
            }
        }
        if end.is_some_and(|end| end <= Instant::now()) {
            counts.add_dropped(queue.try_iter().count());
            return;
        }
    }
}

/// The spans of one export; waits for the first ones, but not once the end was asked for.
fn gather(queue: &Receiver<SpanRecord>, ending: &AtomicBool) -> Vec<SpanRecord> {
    let mut batch = Vec::new();
    let until = Instant::now() + GATHER;
    while batch.len() < BATCH {
        if ending.load(Relaxed) {
            batch.extend(queue.try_iter().take(BATCH - batch.len()));
            break;
        }
        let left = until.saturating_duration_since(Instant::now()).min(Duration::from_millis(50));
        match queue.recv_timeout(left) {
            Ok(span) => batch.push(span),
            Err(RecvTimeoutError::Timeout) if Instant::now() >= until => break,
            Err(RecvTimeoutError::Timeout) => {}
            // Whoever could make spans has gone.
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    batch
}

fn data(span: SpanRecord, scope: &InstrumentationScope) -> SpanData {
    let mut links = SpanLinks::default();
    links.links.extend(span.link.map(|link| Link::new(context(link, false), Vec::new(), 0)));
    let attribute = |(name, value): (&'static str, Value)| match value {
        Value::Int(value) => KeyValue::new(name, value),
        Value::Text(value) => KeyValue::new(name, value),
    };
    SpanData {
        span_context: context(span.context, false),
        parent_span_id: SpanId::from(span.parent),
        parent_span_is_remote: span.remote,
        span_kind: match span.kind {
            Kind::Internal => SpanKind::Internal,
            Kind::Client => SpanKind::Client,
            Kind::Server => SpanKind::Server,
        },
        name: span.name.into(),
        start_time: span.time[0],
        end_time: span.time[1],
        attributes: span.attributes.into_iter().map(attribute).collect(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links,
        status: span.error.map_or(Status::Unset, Status::error),
        instrumentation_scope: scope.clone(),
    }
}

fn context(context: TraceContext, remote: bool) -> SpanContext {
    let (trace, span) = (TraceId::from(context.trace), SpanId::from(context.span));
    SpanContext::new(trace, span, TraceFlags::SAMPLED, remote, TraceState::default())
}
