//! Traces over drives that are slow or fail: the cause is found in the trace, and from the log.

use serde_json::Value;
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::trace::names;
use shimmer_tests::{cluster::Cluster, faults::Faults, models::TinyModel, wait::wait_for};

use super::{
    SOON, cluster_with,
    collector::{Collector, Received},
    jobs, upwards,
};

/// What a read takes longer, milliseconds: far more than anything else in a step.
const SLOW: u64 = 100;

fn start(container: &std::path::Path, collector: &Collector, faults: &Faults) -> Cluster {
    let endpoint = format!("http://{}", collector.address);
    let flags = ["--trace-sample", "100", "--log-format", "json"];
    cluster_with(container, [&endpoint, "grpc"], &flags, Some(faults))
}

#[test]
fn a_step_names_the_worker_whose_drive_was_slow() {
    let Some(faults) = Faults::new() else { return };
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let (collector, (job, _)) = (Collector::grpc(), jobs(&container).remove(0));
    let cluster = start(&container, &collector, &faults);
    faults.set(&format!("slow {SLOW}"));
    cluster.generate(job.request()).unwrap();
    // Spans of one process come in order, so that those of a step and of the work in it are here with the slowest.
    let path: Vec<Received> = collector.wait("a request whose slowest read is known", |spans| {
        let request = spans.iter().find(|span| span.name == names::REQUEST)?;
        let reads = spans.iter().filter(|span| span.name == names::TIER_READ);
        let slowest = reads.max_by_key(|span| span.nanos)?;
        let path = upwards(spans, slowest);
        (path.last()? == &request).then(|| path.into_iter().cloned().collect())
    });
    assert!(path[0].nanos >= SLOW * 1_000_000, "a read that took {} ns", path[0].nanos);
    let step = &path[4].attributes;
    assert_eq!(step["shimmer.slowest.worker"], "worker-1");
    for longer in path.windows(2).take(4) {
        assert!(longer[1].nanos >= longer[0].nanos, "{longer:?}");
    }
}

#[test]
fn the_log_line_of_a_failed_request_leads_to_its_trace() {
    let Some(faults) = Faults::new() else { return };
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let (collector, (job, _)) = (Collector::grpc(), jobs(&container).remove(0));
    let cluster = start(&container, &collector, &faults);
    // Nor can the other worker stand in.
    faults.set("eio /");
    cluster.generate(job.request()).unwrap_err();
    let line: Value = wait_for("the line of the failed request", SOON, || {
        let log = cluster.coordinator.log();
        let line = log.lines().find(|line| line.contains("a generation failed"))?;
        Some(serde_json::from_str(line).unwrap())
    });
    let request = collector.wait("the request", |spans| {
        spans.iter().find(|span| span.name == names::REQUEST).cloned()
    });
    assert_eq!(line["span"]["trace_id"], request.trace, "{line}");
    assert_eq!(line["span"]["span_id"], request.id, "{line}");
    assert_ne!(request.error, "", "{request:?}");
    collector.wait("the work that failed first", |spans| {
        let of = |span: &&Received| {
            span.name == names::EXPERT_WORK
                && span.trace == request.trace
                && span.attributes["shimmer.worker"] == "worker-1"
                && span.error.contains("Input/output error")
        };
        spans.iter().find(of).map(drop)
    });
}
