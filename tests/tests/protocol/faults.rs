//! Real processes that are killed, stopped or slowed down while they generate.

use std::{
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::v1::{GenerateResponse, generate_response::Event};
use shimmer_tests::{
    client::{Generation, greedy},
    cluster::{Cluster, ClusterOptions},
    models::TinyModel,
    process::{Process, shimmer_binary},
    wait::wait_until,
};
use tonic::{Code, Streaming};

/// For anything that a loaded machine does in a moment.
const SOON: Duration = Duration::from_secs(60);

/// Tokens of the streams that are disturbed.
const LENGTH: u32 = 300;

const PROMPT: [u32; 4] = [72, 101, 108, 111];

fn cluster(model: &TinyModel, workers: usize) -> Cluster {
    let mut options = ClusterOptions::new(&model.container(NumericClass::default()), workers);
    // They share their processors with everything else that is tested.
    options.args = ["--probe-timeout", "2s"].map(str::to_owned).to_vec();
    Cluster::start(&options)
}

fn generate(cluster: &Cluster, tokens: u32) -> Generation {
    cluster.generate(greedy(&PROMPT, tokens)).unwrap()
}

/// Begins a long generation and returns when it streams.
fn begin(cluster: &Cluster) -> Streaming<GenerateResponse> {
    cluster.block_on(async {
        let mut client = shimmer_tests::client::connect(cluster.port).await.unwrap();
        let mut stream = client.generate(greedy(&PROMPT, LENGTH)).await.unwrap().into_inner();
        loop {
            let response = stream.message().await.unwrap().unwrap();
            if matches!(response.event, Some(Event::Delta(_))) {
                return stream;
            }
        }
    })
}

/// Reads a stream to its end; its tokens after the first delta and the digest of its logits.
fn finish(cluster: &Cluster, mut stream: Streaming<GenerateResponse>) -> (Vec<u32>, String) {
    cluster.block_on(async {
        let mut tokens = Vec::new();
        let read = async {
            while let Some(response) = stream.message().await.unwrap() {
                match response.event {
                    Some(Event::Delta(delta)) => tokens.extend(delta.token_ids),
                    Some(Event::Finished(finished)) => return finished.logits_sha256.unwrap(),
                    _ => {}
                }
            }
            panic!("the stream ended without its last event")
        };
        let digest = tokio::time::timeout(SOON, read).await.expect("the stream ends in time");
        (tokens, digest)
    })
}

/// A fault of one worker while a stream runs costs it no byte: the other one stands in. After it is over the worker is back,
/// without a restart of the coordinator.
fn check(detail: &str, fault: impl FnOnce(&mut Cluster), mend: impl FnOnce(&mut Cluster)) {
    let model = TinyModel::new(Preset::Glm4Moe);
    let mut cluster = cluster(&model, 2);
    let undisturbed = generate(&cluster, LENGTH);
    let stream = begin(&cluster);
    fault(&mut cluster);
    let (tokens, digest) = finish(&cluster, stream);
    assert!(undisturbed.tokens.ends_with(&tokens), "no token differs");
    assert_eq!(digest, undisturbed.logits_sha256, "no bit of a logit differs");
    assert!(cluster.coordinator.ended().is_none(), "the coordinator lives on");
    let is_lost = |cluster: &Cluster| {
        let statuses = cluster.worker_statuses().unwrap_or_default();
        statuses.iter().any(|worker| worker.state == "lost" && worker.detail.contains(detail))
    };
    wait_until("the loss to be told", SOON, || is_lost(&cluster));
    mend(&mut cluster);
    cluster.wait_until_serving(2);
    let after = generate(&cluster, LENGTH);
    assert_eq!(
        (undisturbed.tokens, undisturbed.logits_sha256),
        (after.tokens, after.logits_sha256)
    );
}

#[test]
fn a_killed_worker_costs_a_stream_no_byte_and_comes_back() {
    check("", |cluster| cluster.workers[1].process.kill(), |cluster| cluster.restart_worker(1));
}

#[test]
fn a_stopped_worker_is_told_from_a_slow_one_and_comes_back() {
    check(
        "does not answer health probes",
        |cluster| cluster.workers[0].process.signal("STOP"),
        |cluster| cluster.workers[0].process.signal("CONT"),
    );
}

#[test]
fn requests_are_refused_while_no_worker_is_left() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let mut cluster = cluster(&model, 2);
    cluster.workers.iter_mut().for_each(|worker| worker.process.kill());
    let away = |cluster: &Cluster| {
        let statuses = cluster.worker_statuses().unwrap_or_default();
        statuses.iter().all(|worker| worker.state != "serving")
    };
    wait_until("the loss to be seen", SOON, || away(&cluster));
    let status = cluster.generate(greedy(&PROMPT, 4)).unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    cluster.restart_worker(0);
    cluster.restart_worker(1);
    cluster.wait_until_serving(2);
    assert_eq!(generate(&cluster, 4).tokens.len(), 4);
}

#[test]
fn without_any_worker_the_coordinators_own_copy_answers() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let mut options = ClusterOptions::new(&model.container(NumericClass::default()), 1);
    options.args = vec!["--own-experts".to_owned(), "64MiB".to_owned()];
    let mut cluster = Cluster::start(&options);
    let undisturbed = generate(&cluster, LENGTH);
    let stream = begin(&cluster);
    cluster.workers[0].process.kill();
    let (tokens, digest) = finish(&cluster, stream);
    assert!(undisturbed.tokens.ends_with(&tokens));
    assert_eq!(digest, undisturbed.logits_sha256);
    assert_eq!(generate(&cluster, LENGTH).logits_sha256, undisturbed.logits_sha256);
}

#[test]
fn a_slow_worker_changes_no_byte() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let cluster = cluster(&model, 2);
    let before = generate(&cluster, 24);
    let done = AtomicBool::new(false);
    let slow = std::thread::scope(|scope| {
        // Stopped most of the time: each signal takes a process of its own to send.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                cluster.workers[0].process.signal("STOP");
                cluster.workers[0].process.signal("CONT");
            }
        });
        let slow = cluster.generate(greedy(&PROMPT, 24));
        done.store(true, Ordering::Relaxed);
        slow
    });
    let slow = slow.unwrap();
    assert_eq!((before.tokens, before.logits_sha256), (slow.tokens, slow.logits_sha256));
}

#[test]
fn a_worker_needs_no_home_and_ends_on_request() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let logs = tempfile::TempDir::new().unwrap();
    let mut command = Command::new(shimmer_binary());
    let container = model.container(NumericClass::default());
    command.args([
        "worker",
        "--id",
        "w",
        "--listen",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--container",
    ]);
    command.arg(container).env_remove("HOME");
    let mut worker = Process::spawn("worker", command, logs.path());
    worker.listening_port(SOON);
    worker.signal("TERM");
    assert!(worker.wait_for_end(SOON).success(), "{}", worker.log());
}
