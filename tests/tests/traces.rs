//! Spans of real processes, as a collector receives them, and what happens without one that answers.

mod collector;
mod drive;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::trace::{TRACEPARENT, names};
use shimmer_tests::{
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    faults::Faults,
    in_process::InProcess,
    models::TinyModel,
    process::{generate_args, shimmer_binary, without_variables},
    wait::{wait_for, wait_until},
    workload::{Job, Outcome, decode_rows},
};
use tonic::Request;

use collector::{Collector, Received};

/// For anything that a loaded machine does in a moment.
const SOON: Duration = Duration::from_secs(60);
/// From what made a token slow up to the request.
const PATH: [&str; 4] = [names::TIER_READ, names::EXPERT_WORK, names::WORKER, names::LAYER];

/// Jobs and their answers without any trace.
fn jobs(container: &Path) -> Vec<(Job, Outcome)> {
    let jobs = decode_rows(256, 2);
    let outcomes = InProcess::start(container).run_together(&jobs);
    jobs.into_iter().zip(outcomes).collect()
}

/// A worker that has all its experts in memory, one with two slots, and a coordinator with these flags. Both may meet
/// faults.
fn cluster_with(
    container: &Path,
    [endpoint, protocol]: [&str; 2],
    flags: &[&str],
    faults: Option<&Faults>,
) -> Cluster {
    let args = |more: &[&str]| -> Vec<String> {
        let all = ["--otlp-endpoint", endpoint, "--otlp-protocol", protocol];
        let page = ["--metrics-listen", "127.0.0.1:0"];
        all.iter().chain(&page).chain(more).map(|&arg| arg.to_owned()).collect()
    };
    let worker = |args, envs| WorkerOptions { args, envs, ..WorkerOptions::default() };
    let envs = faults.map(Faults::envs).unwrap_or_default();
    let small = ["--cap", "2", "--io", "pread", "--evict-guard", "off"];
    Cluster::start(&ClusterOptions {
        workers: vec![worker(args(&[]), envs.clone()), worker(args(&small), envs)],
        args: args(flags),
        ..ClusterOptions::new(container, 0)
    })
}

fn cluster(container: &Path, collector: SocketAddr, protocol: &str, sample: &str) -> Cluster {
    let endpoint = format!("http://{collector}");
    cluster_with(container, [&endpoint, protocol], &["--trace-sample", sample], None)
}

/// The spans from `span` up to the one without a parent among `spans`.
fn upwards<'a>(spans: &'a [Received], span: &'a Received) -> Vec<&'a Received> {
    let above = |span: &&'a Received| {
        spans.iter().find(|above| (&above.id, &above.trace) == (&span.parent, &span.trace))
    };
    std::iter::successors(Some(span), above).collect()
}

/// The path from a wait for a drive up to its request, once all of it has come.
fn slow_path(spans: &[Received]) -> Option<Vec<Received>> {
    let reads = spans.iter().filter(|span| span.name == names::TIER_READ);
    let paths = reads.map(|read| upwards(spans, read));
    let mut whole = paths.filter(|path| path.iter().any(|span| span.name == names::REQUEST));
    whole.next().map(|path| path.into_iter().cloned().collect())
}

fn document() -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(root.join("../docs/TRACES.md")).unwrap()
}

#[test]
fn a_collector_sees_which_worker_and_drive_a_token_waited_for() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let collector = Collector::grpc();
    let cluster = cluster(&container, collector.address, "grpc", "100");
    let jobs = jobs(&container);
    for (job, expected) in &jobs {
        let outcome = Outcome::from(cluster.generate(job.request()).unwrap());
        assert!(outcome == *expected, "a trace changes bytes");
    }

    let path = collector.wait("the path from a drive to its request", slow_path);
    let found: Vec<&str> = path.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(found[..4], PATH);
    assert!([names::PREFILL_CHUNK, names::DECODE_STEP].contains(&found[4]), "{found:?}");
    assert_eq!(found[5..], [names::REQUEST]);
    let services: Vec<&str> = path.iter().map(|span| span.service.as_str()).collect();
    assert_eq!(services[..2], ["shimmer-worker"; 2]);
    assert_eq!(services[2..], ["shimmer-serve"; 4]);
    for span in &path[..3] {
        assert_eq!(span.attributes["shimmer.worker"], "worker-1", "{span:?}");
    }
    assert_eq!(path[0].attributes["shimmer.tier"], "drive");
    assert_eq!(path[0].attributes["shimmer.drives"], container.display().to_string());
    assert_ne!(path[1].attributes["shimmer.misses"], "0");

    // The requests have ended: all spans of the coordinator come before the last of them.
    let spans = collector.wait("both requests", |spans| {
        let of = |span: &&Received| span.name == names::REQUEST;
        (spans.iter().filter(of).count() == jobs.len()).then(|| spans.to_vec())
    });
    let traces: BTreeSet<&str> = spans.iter().map(|span| span.trace.as_str()).collect();
    assert_eq!(traces.len(), jobs.len(), "one trace for each request");
    let reads = spans.iter().filter(|span| span.name == names::TIER_READ);
    for read in reads {
        assert_eq!(read.attributes["shimmer.worker"], "worker-1", "worker-0 has all in memory");
    }
    let is_step = |span: &&Received| span.attributes.contains_key("shimmer.slowest.worker");
    let steps: Vec<&Received> = spans.iter().filter(is_step).collect();
    assert!(steps.len() >= 2 * 6, "{} steps", steps.len());
    for step in steps {
        check_slowest(&spans, step);
    }
    let documented = document();
    for name in spans.iter().flat_map(|span| span.attributes.keys()) {
        assert!(documented.contains(&format!("`{name}`")), "docs/TRACES.md lacks {name}");
    }
}

/// The message that a step calls the slowest is the longest below it.
fn check_slowest(spans: &[Received], step: &Received) {
    let below = spans.iter().filter(|span| {
        let path = upwards(spans, span);
        span.name == names::WORKER && path.iter().any(|above| above.id == step.id)
    });
    let below: Vec<&Received> = below.collect();
    let longest = below.iter().map(|span| span.nanos).max().expect("a step has messages");
    let named = below.iter().any(|span| {
        span.nanos == longest
            && span.attributes["shimmer.worker"] == step.attributes["shimmer.slowest.worker"]
            && span.attributes["shimmer.layer"] == step.attributes["shimmer.slowest.layer"]
    });
    assert!(named, "{step:?} names another one than the longest of {below:?}");
}

#[test]
fn a_callers_decision_is_followed_and_its_trace_continued_over_http() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let collector = Collector::http();
    // By itself this coordinator traces nothing.
    let cluster = cluster(&container, collector.address, "http", "0");
    let (job, expected) = &jobs(&container)[0];
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let untraced = "4bf92f3577b34da6a3ce929d0e0e4736";
    let call = |traceparent: &str| {
        let mut request = Request::new(job.request());
        request.metadata_mut().insert(TRACEPARENT, traceparent.parse().unwrap());
        cluster.block_on(async {
            let mut client = shimmer_tests::client::connect(cluster.port).await.unwrap();
            let mut events = client.generate(request).await.unwrap().into_inner();
            while events.message().await.unwrap().is_some() {}
        });
    };
    call(&format!("00-{untraced}-{parent}-00"));
    assert!(Outcome::from(cluster.generate(job.request()).unwrap()) == *expected);
    call("this is no context");
    call(&format!("00-{trace}-{parent}-01"));
    let path = collector.wait("the path from a drive to its request", slow_path);
    let request = path.last().unwrap();
    assert_eq!((request.name.as_str(), request.parent.as_str()), (names::REQUEST, parent));
    let others: Vec<Received> =
        collector.spans().into_iter().filter(|span| span.trace != trace).collect();
    assert_eq!(others, [], "spans of requests that are not sampled");
}

#[test]
fn a_collector_that_is_dead_or_silent_changes_no_byte_and_is_counted() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let jobs = jobs(&container);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (address, protocol) in [
        (closed, "grpc"),
        (closed, "http"),
        (silent.local_addr().unwrap(), "grpc"),
        (silent.local_addr().unwrap(), "http"),
    ] {
        let cluster = cluster(&container, address, protocol, "100");
        for (job, expected) in &jobs {
            let outcome = Outcome::from(cluster.generate(job.request()).unwrap());
            assert!(outcome == *expected, "other bytes over {protocol}");
        }
        let workers = cluster.workers.iter().map(|worker| &worker.process);
        for process in workers.chain([&cluster.coordinator]) {
            let what = format!("{} to give spans up over {protocol}", process.name());
            let lost = "shimmer_trace_spans_dropped_total ";
            wait_until(&what, SOON, || {
                let page = process.page("/metrics");
                let mut values = page.lines().filter_map(|line| line.strip_prefix(lost));
                values.next().is_some_and(|value| value != "0")
            });
            let page = process.page("/metrics");
            assert!(page.contains("\nshimmer_trace_spans_exported_total 0\n"), "{page}");
        }
    }
}

#[test]
fn a_command_sends_its_spans_before_it_ends() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let collector = Collector::grpc();
    let endpoint = format!("http://{}", collector.address);
    let generate = |more: &[&str]| -> serde_json::Value {
        let mut command = Command::new(shimmer_binary());
        command.args(generate_args(&container, more));
        let output = without_variables(&mut command).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let expected = generate(&[]);
    let traced = ["--cap", "2", "--otlp-endpoint", &endpoint, "--trace-sample", "100"];
    // The last export has a limit, which a machine that is busy enough exceeds.
    let path = wait_for("a whole trace of a command", SOON, || {
        let answer = generate(&traced);
        for same in ["tokens", "logits_sha256"] {
            assert_eq!(answer.get(same), expected.get(same), "a trace changes the answer");
        }
        let path = slow_path(&collector.spans())?;
        (path.last()?.name == names::GENERATE).then_some(path)
    });
    assert_eq!(path.len(), PATH.len() + 3);
    let services: BTreeSet<&str> = path.iter().map(|span| span.service.as_str()).collect();
    assert_eq!(services, BTreeSet::from(["shimmer-generate"]));
}

#[test]
fn the_document_has_every_span() {
    let text = document();
    let section = text.split("\n## ").find(|section| section.starts_with("Spans\n")).unwrap();
    let rows = section.lines().filter_map(|row| row.strip_prefix("| `")?.split_once("` | "));
    let documented: BTreeMap<&str, &str> = rows.collect();
    assert_eq!(
        documented.into_keys().collect::<BTreeSet<_>>(),
        BTreeSet::from(names::ALL),
        "docs/TRACES.md and shimmer_proto::trace::names"
    );
}
