//! What probes hear from real processes, from the first moment to the last. No engine is needed for that.

use std::{net::TcpListener, process::Command, time::Duration};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    client,
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    models::TinyModel,
    process::{Process, shimmer_binary, without_variables},
    wait::{wait_for, wait_until},
};
use tempfile::TempDir;

use super::job;

const SOON: Duration = Duration::from_secs(60);

/// The page of a process that was told to have one.
fn page_of(process: &Process) -> String {
    wait_for("the address of the page", SOON, || {
        let log = process.log();
        let line = log.lines().find_map(|line| line.strip_prefix("metrics on "))?;
        Some(line.strip_suffix("/metrics")?.to_owned())
    })
}

/// Exit code and the one line of `shimmer healthcheck`.
fn probe(page: &str, path: &str) -> (Option<i32>, String) {
    let mut command = Command::new(shimmer_binary());
    command.args(["healthcheck", "--timeout", "30s", "--url", &format!("{page}/{path}")]);
    let output = without_variables(&mut command).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap().trim_end().to_owned())
}

fn healthy(page: &str, path: &str) -> bool {
    probe(page, path).0 == Some(0)
}

fn unhealthy(page: &str, path: &str, reason: &str) {
    let (code, text) = probe(page, path);
    assert!(code == Some(1) && text.contains(reason) && text.lines().count() == 1, "{text}");
}

#[test]
fn a_role_that_loads_is_alive_and_not_ready_and_ends_on_request() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let container = model.container(NumericClass::default()).display().to_string();
    // A file that nobody writes to: the start takes as long as this test likes.
    let directory = TempDir::new().unwrap();
    let endless = directory.path().join("endless").display().to_string();
    assert!(Command::new("mkfifo").arg(&endless).status().unwrap().success());
    let tls = ["--tls-ca", &endless, "--tls-cert", &endless, "--tls-key", &endless];
    let more: [(&str, &[&str]); 2] =
        [("serve", &["--workers", "127.0.0.1:1", "--id", "c"]), ("worker", &["--id", "w"])];
    for (role, more) in more {
        let first = [role, "--container", &container, "--listen", "127.0.0.1:0"];
        let page = ["--metrics-listen", "127.0.0.1:0"];
        let args: Vec<&str> = [&first, &page[..], &tls, more].concat();
        let log = TempDir::new().unwrap();
        let mut process = Process::shimmer(role, &args, [("RUST_BACKTRACE", "1")], log.path());
        let page = page_of(&process);
        assert!(healthy(&page, "livez"), "{role}: {:?}", probe(&page, "livez"));
        unhealthy(&page, "readyz", "status 503: loading");
        unhealthy(&page, "metrics", "status 503: loading");
        // The first process of a container has no handler of the system's to end it.
        process.signal("TERM");
        let status = process.wait_for_end(SOON);
        assert!(status.success(), "{role}: {status}: {}", process.log());
    }
}

#[test]
fn ready_means_that_requests_are_answered() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let container = model.container(NumericClass::default());
    let page = || ["--metrics-listen", "127.0.0.1:0"].map(str::to_owned).to_vec();
    let worker = WorkerOptions { args: page(), ..WorkerOptions::default() };
    let args = [page(), ["--drain-timeout", "60s"].map(str::to_owned).to_vec()].concat();
    let options =
        ClusterOptions { workers: vec![worker; 2], args, ..ClusterOptions::new(&container, 0) };
    let mut cluster = Cluster::start(&options);
    let coordinator = page_of(&cluster.coordinator);
    let workers: Vec<String> = cluster.workers.iter().map(|w| page_of(&w.process)).collect();
    for page in workers.iter().chain([&coordinator]) {
        assert!(healthy(page, "livez") && healthy(page, "readyz"), "{:?}", probe(page, "readyz"));
    }
    // Nobody computes an expert any more.
    for worker in &mut cluster.workers {
        worker.process.kill();
    }
    wait_until("the loss of the workers", SOON, || !healthy(&coordinator, "readyz"));
    unhealthy(&coordinator, "readyz", "status 503: waiting for workers: 0 of 2 serve");
    assert!(healthy(&coordinator, "livez"), "a restart would not bring the workers back");
    cluster.restart_worker(0);
    cluster.restart_worker(1);
    wait_until("the workers' return", SOON, || healthy(&coordinator, "readyz"));

    // A stream holds the coordinator after the signal: it is unready at once and lives until its end.
    let mut stream = cluster.block_on(async {
        let request = job(1, 4000).request();
        let mut client = client::connect(cluster.port).await.unwrap();
        let mut stream = client.generate(request).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        stream
    });
    cluster.coordinator.signal("TERM");
    wait_until("the signal to be heard", SOON, || !healthy(&coordinator, "readyz"));
    unhealthy(&coordinator, "readyz", "status 503: draining");
    assert!(healthy(&coordinator, "livez"));
    let more = cluster.block_on(stream.message()).unwrap();
    assert!(more.is_some(), "the stream goes on");
    drop(stream);
    assert!(cluster.coordinator.wait_for_end(SOON).success());
}

#[test]
fn a_full_disk_below_the_output_ends_nobody() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let container = model.container(NumericClass::default()).display().to_string();
    let directory = TempDir::new().unwrap();
    let start = |name: &str, output: &str, more: &[&str]| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec \"$0\" \"$@\" {output}")]);
        command.arg(shimmer_binary()).args(more);
        without_variables(&mut command);
        Process::spawn(name, command, directory.path())
    };
    let of = |role| [role, "--container", container.as_str(), "--threads", "1"];
    // Nobody can say where it listens.
    let address = {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        socket.local_addr().unwrap().to_string()
    };
    let flags = [&of("worker")[..], &["--listen", &address, "--log", "debug"]].concat();
    let mut worker = start("worker", ">/dev/full 2>/dev/full", &flags);
    let flags =
        [&of("serve")[..], &["--listen", "127.0.0.1:0", "--workers", &address, "--log", "debug"]];
    let mut coordinator = start("serve", "2>/dev/full", &flags.concat());
    let port = coordinator.listening_port(SOON);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    wait_for("an answer", SOON, || {
        runtime.block_on(async {
            let mut client = client::connect(port).await.ok()?;
            client::generate(&mut client, job(1, 8).request()).await.ok()
        })
    });
    assert!(worker.ended().is_none() && coordinator.ended().is_none());
    for process in [&mut coordinator, &mut worker] {
        process.signal("TERM");
        assert!(process.wait_for_end(SOON).success());
    }
}

#[test]
fn a_healthcheck_says_what_is_wrong_with_its_address() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let page = format!("http://{}", silent.local_addr().unwrap());
    let run = |args: &[&str]| {
        let mut command = Command::new(shimmer_binary());
        let output = without_variables(command.arg("healthcheck").args(args)).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = run(&["--url", &page, "--timeout", "100ms"]);
    assert!(code == Some(1) && text.contains("no answer within 100ms"), "{text}");
    drop(silent);
    assert_eq!(run(&["--url", &page]).0, Some(1));
    let (code, text) = run(&["--url", "https://a:1/readyz"]);
    assert!(code == Some(2) && text.contains("http://HOST:PORT/readyz"), "{text}");
}
