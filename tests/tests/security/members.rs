//! Mutual TLS between coordinator and workers.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::v1::{GenerateRequest, generate_response::Event};
use shimmer_tests::{
    certificates::{Authority, Member, Secret},
    client::{self, greedy},
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    in_process::InProcess,
    models::TinyModel,
    process::Process,
    wait::{wait_for, wait_until},
    workload::{Job, Outcome, digest, mixed},
};
use tempfile::TempDir;

use super::{SOON, flag, run, wait_for_line};

/// Two workers and a coordinator, each with its own certificate if there is an authority.
fn options(container: &Path, workers: &[&Member], coordinator: &Member) -> ClusterOptions {
    let worker = |member: &&Member| WorkerOptions { args: member.flags(), ..Default::default() };
    ClusterOptions {
        workers: workers.iter().map(worker).collect(),
        args: coordinator.flags(),
        ..ClusterOptions::new(container, 0)
    }
}

#[test]
fn a_cluster_with_mutual_tls_gives_the_same_bytes() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let jobs = mixed(64);
    let expected = digest(&InProcess::start(&container).run_together(&jobs));
    let (authority, files) = (Authority::new("cluster"), TempDir::new().unwrap());
    let member = |name: &str| authority.issue(&files.path().join(name));
    let (a, b, c) = (member("a"), member("b"), member("c"));
    let cluster = Cluster::start(&options(&container, &[&a, &b], &c));
    let outcomes = cluster.generate_together(jobs.iter().map(Job::request).collect()).unwrap();
    let outcomes: Vec<Outcome> = outcomes.into_iter().map(Outcome::from).collect();
    assert_eq!(digest(&outcomes), expected);
}

/// A coordinator and a worker that do not fit: what each of them says.
fn check_strangers(
    worker: &[String],
    coordinator: &[String],
    at_worker: &str,
    at_coordinator: &str,
) {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let options = ClusterOptions {
        workers: vec![WorkerOptions { args: worker.to_vec(), ..WorkerOptions::default() }],
        args: coordinator.to_vec(),
        ..ClusterOptions::new(&container, 0)
    };
    let cluster = Cluster::launch(&options);
    wait_for_line(&cluster.workers[0].process, at_worker);
    let what = format!("the coordinator to tell {at_coordinator:?}");
    wait_until(&what, SOON, || {
        let told = cluster.worker_statuses().unwrap_or_default();
        told.iter()
            .any(|worker| worker.state != "serving" && worker.detail.contains(at_coordinator))
    });
    // Nobody hangs, and both go on: the client hears at once that nothing is served.
    let error = cluster.generate(greedy(&[1, 2], 2)).unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unavailable, "{error:?}");
}

#[test]
fn strangers_hear_why_on_both_sides() {
    let files = TempDir::new().unwrap();
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let worker = ours.issue(&files.path().join("worker")).flags();
    let member = ours.issue(&files.path().join("member")).flags();
    let stranger = theirs.issue(&files.path().join("stranger"));
    // Neither trusts the other.
    check_strangers(
        &worker,
        &stranger.flags(),
        "not signed by the authority that it trusts",
        "TLS: the certificate is not signed by the authority that is trusted here",
    );
    // The coordinator trusts the worker, but not the other way round.
    let both = [theirs.pem(), ours.pem()].concat();
    std::fs::write(stranger.directory.join("ca.pem"), both).unwrap();
    check_strangers(
        &worker,
        &stranger.flags(),
        "the certificate is not signed by the authority that is trusted here",
        "the peer refused the connection: the certificate that it got is not signed",
    );
    check_strangers(
        &worker,
        &[],
        "the peer speaks plaintext, this port TLS",
        "this port speaks TLS only",
    );
    check_strangers(
        &[],
        &member,
        "the peer speaks TLS, this port plaintext",
        "TLS: the peer does not speak TLS",
    );
}

#[test]
fn files_that_cannot_be_used_are_refused_at_the_start() {
    let files = TempDir::new().unwrap();
    let model = TinyModel::new(Preset::Olmoe);
    let container = flag(&model.container(NumericClass::default()));
    let authority = Authority::new("cluster");
    let expired = authority.issue_expired(&files.path().join("old")).flags();
    let good = authority.issue(&files.path().join("good"));
    let mut mixed = good.flags();
    mixed[5] = authority.issue(&files.path().join("other")).file("key.pem");
    for (flags, expected) in [
        (expired, "expired at 2021-02-03 00:00:00 UTC"),
        (mixed, "the key does not fit the certificate in"),
        (good.flags()[..4].to_vec(), "tls-key is missing"),
    ] {
        let more: Vec<&str> = flags.iter().map(String::as_str).collect();
        for role in [
            &["worker", "--container", &container, "--listen", "127.0.0.1:0"][..],
            &["serve", "--container", &container, "--listen", "127.0.0.1:0", "--workers", "a:1"],
        ] {
            let (code, _, error) = run(&[role, &more].concat(), &[]);
            assert_eq!(code, 2, "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn certificates_change_while_a_stream_runs() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let files = TempDir::new().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mut secrets: Vec<Secret> = ["a", "b", "c"]
        .map(|name| {
            std::fs::create_dir(files.path().join(name)).unwrap();
            Secret::new(&files.path().join(name))
        })
        .into();
    secrets.iter_mut().for_each(|secret| secret.put(&old));
    let members: Vec<Member> = secrets.iter().map(Secret::member).collect();
    let mut cluster =
        Cluster::start(&options(&container, &[&members[0], &members[1]], &members[2]));
    let request = greedy(&[5, 4, 3, 2], 48);
    let expected = cluster.generate(request.clone()).unwrap();

    let mut stream = begin(&cluster, request);
    advance(&cluster, &mut stream);
    secrets.iter_mut().for_each(|secret| secret.put(&new));
    let (tokens, sha256) = finish(&cluster, stream);
    assert_eq!(tokens, expected.tokens.len() - 1, "all tokens but the first");
    assert_eq!(sha256, expected.logits_sha256);

    // A worker that starts again knows the new authority only; the coordinator has not been told anything.
    cluster.restart_worker(0);
    cluster.wait_until_serving(2);
    wait_for_line(&cluster.coordinator, "TLS identity read again");
    assert_eq!(cluster.generate(greedy(&[5, 4, 3, 2], 48)).unwrap().tokens, expected.tokens);

    // The other worker has never been restarted: an old member is a stranger to it by now.
    let last = old.issue(&files.path().join("last"));
    let address = format!("127.0.0.1:{}", cluster.workers[1].port);
    let mut flags = ["serve", "--listen", "127.0.0.1:0", "--workers", &address, "--container"]
        .map(str::to_owned)
        .to_vec();
    flags.push(flag(&container));
    flags.extend(last.flags());
    let none: [(&'static str, &str); 0] = [];
    let stranger = Process::shimmer("stranger", &flags, none, cluster.directory());
    wait_for_line(&stranger, "not signed by the authority that is trusted here");
}

type Events = tonic::Streaming<shimmer_proto::v1::GenerateResponse>;

fn begin(cluster: &Cluster, request: GenerateRequest) -> Events {
    cluster.block_on(async {
        let mut client = client::connect(cluster.port).await.unwrap();
        client.generate(request).await.unwrap().into_inner()
    })
}

/// Takes events until the first token.
fn advance(cluster: &Cluster, stream: &mut Events) {
    cluster.block_on(async {
        loop {
            let event = stream.message().await.unwrap().unwrap().event.unwrap();
            if let Event::Delta(delta) = event
                && !delta.token_ids.is_empty()
            {
                assert_eq!(delta.token_ids.len(), 1, "the stream is taken as it comes");
                return;
            }
        }
    });
}

/// Takes the rest: the number of its tokens, and the digest.
fn finish(cluster: &Cluster, mut stream: Events) -> (usize, String) {
    cluster.block_on(async {
        let mut tokens = 0;
        while let Some(response) = stream.message().await.unwrap() {
            match response.event.unwrap() {
                Event::Delta(delta) => tokens += delta.token_ids.len(),
                Event::Finished(finished) => return (tokens, finished.logits_sha256.unwrap()),
                Event::Started(_) => panic!("a stream starts once"),
            }
        }
        panic!("the stream has no end");
    })
}

#[test]
fn unfinished_handshakes_keep_nobody_out() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let (authority, files) = (Authority::new("cluster"), TempDir::new().unwrap());
    let member = |name: &str| authority.issue(&files.path().join(name));
    let (worker, coordinator) = (member("worker"), member("coordinator"));
    let cluster = Cluster::start(&options(&container, &[&worker], &coordinator));
    let half = |begun: &[u8]| {
        let mut socket = TcpStream::connect(("127.0.0.1", cluster.workers[0].port)).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket.write_all(begun).unwrap();
        socket
    };
    // The head of a TLS record that promises 512 bytes, and nothing at all.
    let mut halves: Vec<TcpStream> = (0..8).map(|_| half(&[0x16, 3, 1, 2, 0])).collect();
    halves.extend((0..8).map(|_| half(&[])));
    cluster.generate(greedy(&[1, 2, 3], 4)).unwrap();
    for socket in &mut halves {
        let mut rest = Vec::new();
        // Closed or reset by the worker; a time-out would be an error of another kind.
        match socket.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    wait_for("the worker to say so", SOON, || {
        let log = cluster.workers[0].process.log();
        (log.matches("no handshake within 5000 ms").count() == 16).then_some(())
    });
    cluster.generate(greedy(&[1, 2, 3], 4)).unwrap();
}
