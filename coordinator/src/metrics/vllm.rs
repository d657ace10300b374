//! The figures that gateways and autoscalers made for vLLM read, under vLLM's names and with its label `model_name`.
//!
//! What has no counterpart here (swapping, preemption, adapters, a prefix cache) is left out rather than shown as zero.
//! Colons in names are against the advice of Prometheus, and wanted here: they are what such readers look for.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};
use shimmer_kernels::PAGE_POSITIONS;

use super::buckets;
use crate::engine::{EngineStats, LATENCY_BOUNDS_MS, RequestStats, Spread, TOKEN_BOUNDS};

/// Encodes the engine's figures whenever it is asked for.
pub struct VllmCollector<F> {
    /// Name of the model, as clients are told it.
    pub model_name: String,
    /// Reads the engine.
    pub stats: F,
}

impl<F> fmt::Debug for VllmCollector<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VllmCollector").field("model_name", &self.model_name).finish()
    }
}

/// Name, help and where to read it.
type Family<V> = (&'static str, &'static str, fn(&EngineStats) -> V);
/// The same of a histogram.
type Histogram = (&'static str, &'static str, fn(&RequestStats) -> &Spread);

#[expect(clippy::cast_precision_loss, reason = "counts of requests and shares of pages")]
const GAUGES: &[Family<f64>] = &[
    ("vllm:num_requests_running", "Sequences in the batch.", |e| e.running as f64),
    ("vllm:num_requests_waiting", "Sequences in the queue.", |e| e.waiting as f64),
    ("vllm:kv_cache_usage_perc", "Share of the KV pages that sequences have, 0 to 1.", |e| {
        // An engine that has not started has no pages, and so none in use.
        (e.kv_pages - e.kv_pages_free) as f64 / e.kv_pages.max(1) as f64
    }),
];

const COUNTERS: &[Family<u64>] = &[
    ("vllm:prompt_tokens", "Tokens of the prompts that were processed to their end.", |e| {
        e.requests.prompt_tokens
    }),
    ("vllm:generation_tokens", "Tokens sampled.", |e| e.generated_tokens),
];

/// Value of a label, and where to read its series.
type Reason = (&'static str, fn(&RequestStats) -> u64);

const REASONS: &[Reason] = &[
    ("stop", |r| r.stopped),
    ("length", |r| r.full),
    ("abort", |r| r.aborted),
    ("error", |r| r.failed),
];

const LATENCIES: &[Histogram] = &[
    (
        "vllm:time_to_first_token_seconds",
        "Time from the acceptance of a request to its first token.",
        |r| &r.first_token,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Time from a token to the next one of the same request, once for each token.",
        |r| &r.between_tokens,
    ),
    (
        "vllm:time_per_output_token_seconds",
        "The same as vllm:inter_token_latency_seconds, by its older name.",
        |r| &r.between_tokens,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a request, once for each request.",
        |r| &r.per_token,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "Time from the acceptance of a request to its end.",
        |r| &r.whole,
    ),
    (
        "vllm:request_queue_time_seconds",
        "Time from the acceptance of a request to its place in the batch.",
        |r| &r.queue,
    ),
    (
        "vllm:request_inference_time_seconds",
        "Time from the place in the batch to the end of a request.",
        |r| &r.inference,
    ),
    (
        "vllm:request_prefill_time_seconds",
        "Time from the place in the batch to the first token.",
        |r| &r.prefill,
    ),
    ("vllm:request_decode_time_seconds", "Time from the first token to the end.", |r| &r.decode),
];

const SIZES: &[Histogram] = &[
    ("vllm:request_prompt_tokens", "Tokens of the prompts of requests that ended.", |r| &r.prompt),
    ("vllm:request_generation_tokens", "Tokens of the answers of requests that ended.", |r| {
        &r.answer
    }),
];

impl<F> Collector for VllmCollector<F>
where
    F: Fn() -> EngineStats + Send + Sync + 'static,
{
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = &(self.stats)();
        let model = ("model_name", self.model_name.as_str());
        let alone = [model];
        for &(name, help, read) in GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            metric.encode_family(&alone)?.encode_gauge(&read(stats))?;
        }
        for &(name, help, read) in COUNTERS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            let mut metric = metric.encode_family(&alone)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&read(stats), None)?;
        }
        let (name, help) = ("vllm:request_success", "Requests that ended, by how.");
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for &(reason, read) in REASONS {
            let labels = [model, ("finished_reason", reason)];
            let mut metric = metric.encode_family(&labels)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&read(&stats.requests), None)?;
        }
        let seconds = LATENCY_BOUNDS_MS.map(|ms| f64::from(ms) / 1e3);
        let tokens = TOKEN_BOUNDS.map(f64::from);
        for (families, bounds, unit) in [(LATENCIES, seconds, 1e6), (SIZES, tokens, 1.0)] {
            for &(name, help, read) in families {
                let mut metric =
                    encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
                let spread = read(&stats.requests);
                let (sum, buckets) = (sum(spread, unit), buckets(bounds, spread.counts));
                let mut metric = metric.encode_family(&alone)?;
                metric.encode_histogram::<NoLabelSet>(sum, spread.count(), &buckets, None)?;
            }
        }
        let (name, help) =
            ("vllm:cache_config_info", "Size of the KV cache: its pages and their positions.");
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        let (size, pages) = (PAGE_POSITIONS.to_string(), stats.kv_pages.to_string());
        let labels = [model, ("block_size", size.as_str()), ("num_gpu_blocks", pages.as_str())];
        metric.encode_family(&labels)?.encode_gauge(&1_u64)
    }
}

#[expect(clippy::cast_precision_loss, reason = "sums for rates")]
fn sum(spread: &Spread, unit: f64) -> f64 {
    spread.sum as f64 / unit
}
