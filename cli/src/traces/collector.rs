//! What became of spans, for the pages of both roles.

use std::{fmt, sync::Arc};

use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, metrics::MetricType};
use shimmer_proto::trace::TraceCounts;

/// Encodes the counts whenever it is asked for.
#[derive(Debug)]
pub(crate) struct TraceCollector(pub(crate) Arc<TraceCounts>);

impl Collector for TraceCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, count) in [
            ("shimmer_trace_spans_exported", "Spans that the collector took.", self.0.exported()),
            (
                "shimmer_trace_spans_dropped",
                "Spans that were lost: the queue was full, or the collector did not take them in time.",
                self.0.dropped(),
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<prometheus_client::encoding::NoLabelSet, _, u64>(&count, None)?;
        }
        Ok(())
    }
}
