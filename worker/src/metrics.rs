//! The worker's figures for Prometheus. Names, units and labels are documented in docs/METRICS.md, which a test compares
//! with what is encoded here.

mod families;

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet},
    metrics::MetricType,
};
use serde::Serialize;

use self::families::{FAMILIES, Family};
use crate::{
    counters::CountersSnapshot,
    expert_core::ExpertCore,
    tier_counters::{ReadClassSnapshot, TierSnapshot, WAIT_BOUNDS_US, WaitCounts},
};

/// Everything that a worker counts, at one moment.
#[derive(Debug, Clone, Default, Serialize)]
pub struct WorkerReport {
    /// Name in the cluster.
    pub id: String,
    /// Version and commit of the binary.
    pub build: String,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Connections, frames and work.
    pub counters: CountersSnapshot,
    /// Where experts were, and what it cost to bring them.
    pub tiers: TierSnapshot,
}

impl WorkerReport {
    /// Reads everything.
    pub fn of(core: &ExpertCore) -> Self {
        let hello = core.hello();
        Self {
            id: hello.worker_id,
            build: core.identity().build,
            isa: hello.isa,
            counters: core.counters().snapshot(),
            tiers: core.tier_snapshot(),
        }
    }

    fn counter(&self, name: &str) -> u64 {
        let mut all = self.counters.entries().chain(self.tiers.entries());
        all.find(|(known, _)| *known == name).expect("a test finds every name of the table").1
    }
}

/// Whether a counter of a report says how things stand, not what has happened since the start.
pub fn is_gauge(counter: &str) -> bool {
    let shows = |family: &&Family| family.series.iter().any(|(_, name)| *name == counter);
    FAMILIES.iter().find(shows).is_some_and(|family| matches!(family.kind, MetricType::Gauge))
}

/// Encodes a report whenever it is asked for.
pub struct WorkerCollector<F>(pub F);

impl<F> fmt::Debug for WorkerCollector<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerCollector")
    }
}

/// Demand reads by class.
type ClassFamily = (&'static str, &'static str, fn(&ReadClassSnapshot) -> Value);

const fn seconds(us: u64) -> Value {
    Value::Seconds(as_seconds(us))
}

#[expect(clippy::cast_precision_loss, reason = "seconds for people")]
const fn as_seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// Bounds in seconds, as the encoder takes them: the last bucket has no bound.
fn buckets(counts: &WaitCounts) -> Vec<(f64, u64)> {
    let bounds = WAIT_BOUNDS_US.iter().map(|&us| as_seconds(us)).chain([f64::INFINITY]);
    bounds.zip(*counts).collect()
}

const CLASSES: &[ClassFamily] = &[
    ("shimmer_demand_reads", "Experts read because work wanted them.", |c| Value::Count(c.reads)),
    ("shimmer_demand_direct_reads", "Those that passed the page cache by.", |c| {
        Value::Count(c.direct)
    }),
    ("shimmer_demand_read_bytes", "Bytes of demand reads.", |c| Value::Count(c.bytes)),
    (
        "shimmer_demand_read_service_seconds",
        "Time inside demand reads, added over threads: bytes by this is the throughput of one thread.",
        |c| seconds(c.service_us),
    ),
    (
        "shimmer_demand_read_wall_seconds",
        "Time in which at least one demand read was under way: bytes by this is the throughput, service by this the concurrency.",
        |c| seconds(c.wall_us),
    ),
];

/// One figure.
#[derive(Debug, Clone, Copy)]
enum Value {
    Count(u64),
    Seconds(f64),
}

impl Value {
    fn encode(self, kind: MetricType, metric: &mut MetricEncoder<'_>) -> fmt::Result {
        match (self, kind) {
            (Self::Count(count), MetricType::Counter) => {
                metric.encode_counter::<NoLabelSet, _, u64>(&count, None)
            }
            (Self::Count(count), _) => metric.encode_gauge(&count),
            (Self::Seconds(seconds), MetricType::Counter) => {
                metric.encode_counter::<NoLabelSet, _, u64>(&seconds, None)
            }
            (Self::Seconds(seconds), _) => metric.encode_gauge(&seconds),
        }
    }
}

impl<F> Collector for WorkerCollector<F>
where
    F: Fn() -> WorkerReport + Send + Sync + 'static,
{
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let report = &self.0();
        let (name, help) = ("shimmer_worker_info", "The worker itself; always 1.");
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        let labels = [("build", &report.build), ("id", &report.id), ("isa", &report.isa)];
        metric.encode_family(&labels)?.encode_gauge(&1_u64)?;
        for family in FAMILIES {
            let Family { name, help, kind, label, series } = *family;
            let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
            for &(value, counter) in series {
                let count = report.counter(counter);
                let count =
                    if counter.ends_with("_us") { seconds(count) } else { Value::Count(count) };
                if label.is_empty() {
                    count.encode(kind, &mut metric)?;
                } else {
                    let labels = [(label, value)];
                    count.encode(kind, &mut metric.encode_family(&labels)?)?;
                }
            }
        }
        let tiers = &report.tiers;
        let (name, help) = (
            "shimmer_expert_felt_wait_seconds",
            "Wall time that compute stood still at a time because nothing it wanted was in memory.",
        );
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let sum = report.counter("felt_wait_us");
        let count = tiers.felt_waits.iter().sum();
        let buckets = buckets(&tiers.felt_waits);
        metric.encode_histogram::<NoLabelSet>(as_seconds(sum), count, &buckets, None)?;
        for &(name, help, read) in CLASSES {
            let kind = MetricType::Counter;
            let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
            for (class, reads) in [("cold", &tiers.demand_cold), ("warm", &tiers.demand_warm)] {
                let labels = [("class", class)];
                read(reads).encode(kind, &mut metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_counter_is_exported_once() {
        let report = WorkerReport::default();
        let counters = report.counters.entries().chain(report.tiers.entries());
        let mut left: BTreeMap<&str, usize> = counters.map(|(name, _)| (name, 0)).collect();
        for (_, counter) in FAMILIES.iter().flat_map(|family| family.series) {
            *left.get_mut(counter).unwrap_or_else(|| panic!("no counter {counter}")) += 1;
        }
        assert_eq!(left.remove("felt_wait_us"), Some(0), "the sum of a histogram");
        left.retain(|_, times| *times != 1);
        assert_eq!(left, BTreeMap::new());
    }
}
