//! The coordinator's figures for Prometheus. Names, units and labels are documented in docs/METRICS.md, which a test
//! compares with what is encoded here.

mod vllm;

use std::{fmt, sync::Arc, time::Duration};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};
use serde::Serialize;
use shimmer_proto::v1::WorkerStatus;
use tokio::sync::watch;

use crate::admin::ClusterControl as _;
use crate::api::{ApiKeys, ClusterStatus, DoorCounters, DoorReport};
use crate::dispatch::WorkerStats;
use crate::engine::{EngineHandle, EngineStats};
use crate::histogram::{BOUNDS_US, Histogram};
use crate::journal::{Journal, JournalStats};
use crate::prediction::Overlap;
use crate::transport::{ClusterHandle, LinkState, RemoteCounters, RemoteObserver};

pub use self::vllm::VllmCollector;

/// Everything that a coordinator counts, at one moment.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CoordinatorReport {
    /// The engine.
    pub engine: EngineStats,
    /// The links to workers.
    pub links: RemoteCounters,
    /// The journal; all zero without one.
    pub journal: JournalStats,
    /// The workers, in the order of the engine's.
    pub workers: Vec<ReportedWorker>,
    /// The public port.
    pub door: DoorReport,
    /// The file of API keys cannot be used, and those that were read before are let in.
    pub api_keys_outdated: bool,
    /// Generation of the placement in force; 0 before the first.
    pub generation: u64,
    /// The one that is being loaded; 0 for none.
    pub next_generation: u64,
    /// Every expert has a live owner, so that any request can be served.
    pub complete: bool,
}

/// A worker as its link knows it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ReportedWorker {
    /// Where it is reached.
    pub endpoint: String,
    /// Name from its hello; empty before.
    pub worker_id: String,
    /// State of its link.
    pub state: String,
    /// Experts that it can compute.
    pub experts: u64,
}

/// Where a coordinator's figures come from.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The engine.
    pub engine: EngineHandle,
    /// The links.
    pub links: RemoteObserver,
    /// The journal, if there is one.
    pub journal: Option<Journal>,
    /// The workers.
    pub cluster: watch::Receiver<ClusterStatus>,
    /// The public port.
    pub door: Arc<DoorCounters>,
    /// Keys of the public port, if it asks for some.
    pub keys: Option<ApiKeys>,
    /// Members and placement.
    pub control: ClusterHandle,
}

impl Sources {
    /// Reads everything.
    pub fn report(&self) -> CoordinatorReport {
        let worker = |worker: &WorkerStatus| ReportedWorker {
            endpoint: worker.endpoint.clone(),
            worker_id: worker.worker_id.clone(),
            state: worker.state.clone(),
            experts: worker.experts,
        };
        let (generation, next) = self.control.generations();
        CoordinatorReport {
            generation,
            next_generation: next.unwrap_or(0),
            complete: self.cluster.borrow().complete,
            workers: self.cluster.borrow().workers.iter().map(worker).collect(),
            engine: self.engine.stats(),
            links: self.links.counters(),
            door: self.door.report(),
            api_keys_outdated: self.keys.as_ref().is_some_and(ApiKeys::are_outdated),
            journal: self.journal.as_ref().map(Journal::stats).unwrap_or_default(),
        }
    }
}

/// Encodes a report whenever it is asked for.
pub struct CoordinatorCollector<F>(pub F);

impl<F> fmt::Debug for CoordinatorCollector<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CoordinatorCollector")
    }
}

/// Name, help and where to read a family of one series.
type Family<T, V> = (&'static str, &'static str, fn(&T) -> V);
/// Values of a label, and where to read their series.
type Series<V> = &'static [(&'static str, fn(&CoordinatorReport) -> V)];
/// Name, help, label (empty for none) and series.
type Labelled = (&'static str, &'static str, &'static str, Series<u64>);
/// How long things took.
type Durations = (&'static str, &'static str, fn(&EngineStats) -> &Histogram);

const COUNTERS: &[Labelled] = &[
    (
        "shimmer_coordinator_steps",
        "Steps run; a step with prompt rows is a prefill step.",
        "kind",
        &[("decode", |r| r.engine.decode_steps), ("prefill", |r| r.engine.prefill_steps)],
    ),
    (
        "shimmer_coordinator_rows",
        "Rows of token positions run through the model.",
        "kind",
        &[("decode", |r| r.engine.decode_rows), ("prefill", |r| r.engine.prefill_rows)],
    ),
    (
        "shimmer_coordinator_generated_tokens",
        "Tokens sampled.",
        "",
        &[("", |r| r.engine.generated_tokens)],
    ),
    (
        "shimmer_coordinator_generations",
        "Generations that ended.",
        "outcome",
        &[
            ("finished", |r| r.engine.finished),
            ("cancelled", |r| r.engine.cancelled),
            ("failed", |r| r.engine.failed),
        ],
    ),
    (
        "shimmer_coordinator_requests_refused",
        "Requests that were not queued.",
        "reason",
        &[
            ("invalid", |r| r.engine.refused.invalid),
            ("context", |r| r.engine.refused.context),
            ("duplicate", |r| r.engine.refused.duplicate),
            ("queue_full", |r| r.engine.refused.queue_full),
            ("shutting_down", |r| r.engine.refused.shutting_down),
        ],
    ),
    ("shimmer_coordinator_hints", "Prefetch hints sent.", "", &[("", |r| r.engine.hints)]),
    (
        "shimmer_coordinator_link_events",
        "What happened to links to workers.",
        "event",
        &[
            ("connect", |r| r.links.connects),
            ("loss", |r| r.links.losses),
            ("probe", |r| r.links.probes),
            ("probe_failure", |r| r.links.failed_probes),
            ("refusal", |r| r.links.refusals),
            ("slow", |r| r.links.slowed),
        ],
    ),
    (
        "shimmer_coordinator_frames_refused",
        "Frames of workers that were not used.",
        "reason",
        &[
            ("corrupt", |r| r.links.corrupt_frames),
            ("unreadable", |r| r.links.unreadable_frames),
            ("duplicate", |r| r.links.dropped.duplicate),
            ("stale", |r| r.links.dropped.stale),
            ("unknown", |r| r.links.dropped.unknown),
        ],
    ),
    (
        "shimmer_coordinator_resent_messages",
        "Work whose worker was lost or refused it, sent to others.",
        "",
        &[("", |r| r.engine.faults.resent)],
    ),
    (
        "shimmer_coordinator_hedged_messages",
        "Work sent to others beside a worker that was late or has become slow, by who answered first.",
        "first",
        &[
            ("late_worker", |r| r.engine.faults.hedged.saturating_sub(r.engine.faults.hedges_won)),
            ("other", |r| r.engine.faults.hedges_won),
        ],
    ),
    (
        "shimmer_coordinator_adopted_experts",
        "Experts that workers read from their own drives to stand in for others.",
        "",
        &[("", |r| r.engine.faults.adopted)],
    ),
    (
        "shimmer_coordinator_own_messages",
        "Work computed on the coordinator's own copy, because no worker could.",
        "",
        &[("", |r| r.engine.faults.own_copies)],
    ),
    (
        "shimmer_coordinator_audits",
        "Work to be computed by two workers and compared; skipped where nobody else could.",
        "outcome",
        &[
            ("different", |r| r.engine.faults.mismatches),
            ("equal", |r| r.engine.faults.audits.saturating_sub(r.engine.faults.mismatches)),
            ("skipped", |r| r.engine.faults.audits_skipped),
        ],
    ),
    (
        "shimmer_coordinator_quarantines",
        "Workers taken out of service because they computed something else.",
        "",
        &[("", |r| r.engine.faults.quarantines)],
    ),
    (
        "shimmer_coordinator_unavailable_rows",
        "Rows that failed because nobody could compute their experts.",
        "",
        &[("", |r| r.engine.faults.unavailable_rows)],
    ),
    (
        "shimmer_coordinator_connections",
        "Connections of clients accepted, refused ones included.",
        "",
        &[("", |r| r.door.connections)],
    ),
    (
        "shimmer_coordinator_connections_closed",
        "Connections of clients that the coordinator closed: too many were open, no call came, or TLS failed.",
        "reason",
        &[
            ("handshake", |r| r.door.handshake),
            ("limit", |r| r.door.full),
            ("silent", |r| r.door.silent),
        ],
    ),
    (
        "shimmer_coordinator_calls_refused",
        "Calls without an API key, or with an unknown one.",
        "reason",
        &[("missing_key", |r| r.door.missing_key), ("unknown_key", |r| r.door.unknown_key)],
    ),
    (
        "shimmer_coordinator_journal_requests",
        "Requests by what became of them in the journal: accepted and on the drive, or served without because it could not be written.",
        "outcome",
        &[("accepted", |r| r.journal.accepted), ("without", |r| r.journal.accept_failures)],
    ),
    (
        "shimmer_coordinator_journal_written_bytes",
        "Bytes written into the journal.",
        "",
        &[("", |r| r.journal.written_bytes)],
    ),
    (
        "shimmer_coordinator_journal_failures",
        "What the journal could not do: append tokens, keep up with them, read a file (damaged ones included), clean up.",
        "operation",
        &[
            ("append", |r| r.journal.append_failures),
            ("overrun", |r| r.journal.overruns),
            ("read", |r| r.journal.read_failures),
            ("clean", |r| r.journal.clean_failures),
        ],
    ),
    (
        "shimmer_coordinator_journal_removed_files",
        "Files of the journal removed because of their age or to make room.",
        "",
        &[("", |r| r.journal.removed)],
    ),
    (
        "shimmer_coordinator_resumes",
        "Requests resumed: they had ended, went on behind their known tokens, or were generated again because their events need logits.",
        "way",
        &[
            ("ended", |r| r.journal.resumed_ended),
            ("continued", |r| r.journal.resumed_continued),
            ("again", |r| r.journal.resumed_again),
        ],
    ),
];

const OVERLAPS: Series<Overlap> = &[
    ("row", |r| r.engine.recall.rows),
    ("step", |r| r.engine.recall.steps),
    ("previous_token", |r| r.engine.recall.previous),
];

const PREDICTIONS: &[Family<Overlap, u64>] = &[
    (
        "shimmer_prediction_predicted_experts",
        "Experts that were predicted: by row, by step after the hint's cap, or as those of the token before.",
        |o| o.predicted,
    ),
    (
        "shimmer_prediction_chosen_experts",
        "Experts that were chosen where a prediction was made.",
        |o| o.chosen,
    ),
    (
        "shimmer_prediction_hit_experts",
        "Experts that were predicted and chosen; by the chosen ones this is the recall.",
        |o| o.hits,
    ),
];

const GAUGES: &[Labelled] = &[
    (
        "shimmer_coordinator_sequences",
        "Sequences in the batch and in the queue.",
        "state",
        &[("running", |r| r.engine.running), ("waiting", |r| r.engine.waiting)],
    ),
    (
        "shimmer_coordinator_queue_limit",
        "Sequences that the queue takes; more are refused.",
        "",
        &[("", |r| r.engine.waiting_limit)],
    ),
    (
        "shimmer_coordinator_ready",
        "1 while every expert has a live owner, so that any request can be served.",
        "",
        &[("", |r| u64::from(r.complete))],
    ),
    (
        "shimmer_coordinator_kv_pages",
        "KV pages.",
        "state",
        &[
            ("free", |r| r.engine.kv_pages_free),
            ("used", |r| r.engine.kv_pages - r.engine.kv_pages_free),
        ],
    ),
    (
        "shimmer_coordinator_placement_generation",
        "Generation of the placement: in force, and the one that is being loaded (0 for none).",
        "which",
        &[("in_force", |r| r.generation), ("next", |r| r.next_generation)],
    ),
    (
        "shimmer_coordinator_open_connections",
        "Connections of clients that are open.",
        "",
        &[("", |r| r.door.open)],
    ),
    (
        "shimmer_coordinator_api_keys_outdated",
        "1 while the file of API keys cannot be used, so that the keys that were read before are let in.",
        "",
        &[("", |r| u64::from(r.api_keys_outdated))],
    ),
    (
        "shimmer_coordinator_journal_bytes",
        "Bytes of all files of the journal's directory, as of the last clean-up and of what was written here since.",
        "",
        &[("", |r| r.journal.bytes)],
    ),
    (
        "shimmer_coordinator_journal_open_files",
        "Files of requests that run.",
        "",
        &[("", |r| r.journal.open)],
    ),
    (
        "shimmer_coordinator_journal_pending_tokens",
        "Tokens that wait to be written.",
        "",
        &[("", |r| r.journal.pending_tokens)],
    ),
];

const HISTOGRAMS: &[Durations] = &[
    ("shimmer_coordinator_decode_step_seconds", "Wall time of steps of decode rows alone.", |e| {
        &e.decode_step
    }),
    (
        "shimmer_coordinator_layer_wait_seconds",
        "Wall time that a layer's round waited for workers after the coordinator's own share of it.",
        |e| &e.layer_wait,
    ),
];

const WORKER_COUNTS: &[Family<WorkerStats, u64>] = &[
    ("shimmer_coordinator_worker_results", "Results taken from a worker.", |w| w.results),
    ("shimmer_coordinator_worker_expert_rows", "Pairs of row and expert in them.", |w| {
        w.expert_rows
    }),
];

const WORKER_TIMES: &[Family<WorkerStats, f64>] = &[
    (
        "shimmer_coordinator_worker_compute_seconds",
        "Time of a worker on that work, by its own clock.",
        |w| w.compute.as_secs_f64(),
    ),
    (
        "shimmer_coordinator_worker_wait_seconds",
        "Time in which the step thread had nothing to do but wait, put down to the worker that answered next.",
        |w| w.wait.as_secs_f64(),
    ),
];

impl<F> Collector for CoordinatorCollector<F>
where
    F: Fn() -> CoordinatorReport + Send + Sync + 'static,
{
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let report = &self.0();
        for &(name, help, label, series) in COUNTERS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for &(value, read) in series {
                let count = read(report);
                if label.is_empty() {
                    metric.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
                } else {
                    let labels = [(label, value)];
                    let mut metric = metric.encode_family(&labels)?;
                    metric.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
                }
            }
        }
        for &(name, help, read) in PREDICTIONS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for &(scope, overlap) in OVERLAPS {
                let labels = [("scope", scope)];
                let mut metric = metric.encode_family(&labels)?;
                metric.encode_counter::<NoLabelSet, _, u64>(&read(&overlap(report)), None)?;
            }
        }
        for &(name, help, label, series) in GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for &(value, read) in series {
                let count = read(report);
                if label.is_empty() {
                    metric.encode_gauge(&count)?;
                } else {
                    let labels = [(label, value)];
                    metric.encode_family(&labels)?.encode_gauge(&count)?;
                }
            }
        }
        for &(name, help, read) in HISTOGRAMS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
            let histogram = read(&report.engine);
            let seconds = BOUNDS_US.map(|us| Duration::from_micros(us).as_secs_f64());
            let (sum, buckets) = (histogram.sum.as_secs_f64(), buckets(seconds, histogram.counts));
            metric.encode_histogram::<NoLabelSet>(sum, histogram.count(), &buckets, None)?;
        }
        encode_workers(report, &mut encoder)
    }
}

fn encode_workers(report: &CoordinatorReport, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (name, help) = ("shimmer_coordinator_workers", "Workers by the state of their link.");
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for state in LinkState::ALL.map(LinkState::name) {
        let count = report.workers.iter().filter(|worker| worker.state == state).count() as u64;
        let labels = [("state", state)];
        metric.encode_family(&labels)?.encode_gauge(&count)?;
    }
    let (name, help) =
        ("shimmer_coordinator_worker_info", "Name and state of a worker's link; always 1.");
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for worker in &report.workers {
        let labels = [
            ("worker", &worker.endpoint),
            ("worker_id", &worker.worker_id),
            ("state", &worker.state),
        ];
        metric.encode_family(&labels)?.encode_gauge(&1_u64)?;
    }
    let (name, help) = (
        "shimmer_coordinator_worker_experts",
        "Experts that a worker can compute under the placement in force.",
    );
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for worker in &report.workers {
        let labels = [("worker", &worker.endpoint)];
        metric.encode_family(&labels)?.encode_gauge(&worker.experts)?;
    }
    let named = || report.workers.iter().map(|w| &w.endpoint).zip(&report.engine.workers);
    for &(name, help, read) in WORKER_COUNTS {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (endpoint, stats) in named() {
            let labels = [("worker", endpoint)];
            let mut metric = metric.encode_family(&labels)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&read(stats), None)?;
        }
    }
    for &(name, help, read) in WORKER_TIMES {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (endpoint, stats) in named() {
            let labels = [("worker", endpoint)];
            let mut metric = metric.encode_family(&labels)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&read(stats), None)?;
        }
    }
    Ok(())
}

/// Buckets as the encoder takes them: the last one has no bound.
fn buckets(
    bounds: impl IntoIterator<Item = f64>,
    counts: impl IntoIterator<Item = u64>,
) -> Vec<(f64, u64)> {
    bounds.into_iter().chain([f64::INFINITY]).zip(counts).collect()
}
