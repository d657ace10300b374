//! SIGTERM: idle coordinators are gone at once, others finish or hand over.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::{Duration, Instant},
};

use shimmer_proto::status;
use shimmer_tests::wait::wait_until;
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::bench::{Bench, DEADLINE, request};

/// For an idle process, and what a person still calls at once.
const AT_ONCE: Duration = Duration::from_secs(1);

fn healthy(bench: &Bench, port: u16) -> Option<bool> {
    bench.cluster.block_on(async {
        let uri = format!("http://127.0.0.1:{port}");
        let endpoint = tonic::transport::Endpoint::from_shared(uri).unwrap();
        let mut health = HealthClient::new(endpoint.connect().await.ok()?);
        let request = HealthCheckRequest { service: "shimmer.v1.InferenceService".to_owned() };
        Some(health.check(request).await.ok()?.into_inner().status == 1)
    })
}

#[test]
fn an_idle_coordinator_exits_at_once() {
    let mut bench = Bench::new();
    let mut idle = bench.another(&["--metrics-listen", "127.0.0.1:0"]);
    // A client that stays connected does not hold it up.
    let client = bench.connect(idle.port);
    bench.whole(idle.port, request("before", 3));
    let asked = Instant::now();
    idle.process.signal("TERM");
    let ended = idle.process.wait_for_end(DEADLINE);
    let took = asked.elapsed();
    println!("an idle coordinator exits after {took:?}");
    assert!(ended.success(), "{ended}");
    assert!(took < AT_ONCE, "{took:?}");
    drop(client);
}

/// Endpoint lists learn of a stop later than the process: what they still send is served.
#[test]
fn a_coordinator_with_a_delay_takes_requests_while_it_is_unready() {
    let mut bench = Bench::new();
    let expected = bench.whole(bench.cluster.port, request("undisturbed", 40));
    // Long enough for whatever this machine does meanwhile; a second signal ends it.
    let args = ["--drain-delay", "10m", "--metrics-listen", "127.0.0.1:0"];
    let mut stopping = bench.another(&args);
    let page = stopping.process.page_address();
    stopping.process.signal("TERM");
    wait_until("readiness to go off", DEADLINE, || {
        readiness(&page).is_some_and(|answer| answer.starts_with("HTTP/1.1 503"))
            && healthy(&bench, stopping.port) == Some(false)
    });
    // On a connection of its own, as from a client that has just been sent here.
    assert_eq!(bench.whole(stopping.port, request("late", 40)), expected);
    let answer = readiness(&page).unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(stopping.process.ended().is_none(), "the delay is not over");
    stopping.process.signal("TERM");
    assert_eq!(stopping.process.wait_for_end(DEADLINE).code(), Some(130));

    // When the delay is over, it drains as ever.
    let mut stopping = bench.another(&["--drain-delay", "100ms"]);
    stopping.process.signal("TERM");
    let ended = stopping.process.wait_for_end(DEADLINE);
    assert!(ended.success(), "{ended}");
}

/// What the page says to a readiness probe.
fn readiness(page: &str) -> Option<String> {
    let mut socket = TcpStream::connect(page).ok()?;
    write!(socket, "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    Some(answer)
}

#[test]
fn a_stopping_coordinator_hands_over_what_it_cannot_finish() {
    let mut bench = Bench::new();
    let survivor = bench.cluster.port;
    let expected = bench.whole(survivor, request("undisturbed", 900));
    let mut stopping = bench.another(&["--drain-timeout", "500ms"]);
    let client = bench.connect(stopping.port);
    let (mut stream, mut events) = bench.begin(stopping.port, request("long", 900), 5);
    stopping.process.signal("TERM");
    wait_until("the coordinator to be unready", DEADLINE, || {
        healthy(&bench, stopping.port) != Some(true)
    });
    let refused = bench.cluster.block_on(client.clone().generate(request("new", 5))).unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    if !refused.details().is_empty() {
        assert_eq!(status::reason(&refused).as_deref(), Some("DRAINING"), "{refused:?}");
        assert!(status::retry_after(&refused).is_some(), "{refused:?}");
    }
    let (more, ended) = bench.rest(&mut stream);
    events.extend(more);
    if events.len() < expected.len() {
        let ended = ended.unwrap();
        assert_eq!(ended.code(), Code::Unavailable, "{ended:?}");
        assert_eq!(status::reason(&ended).as_deref(), Some(status::RESUMABLE), "{ended:?}");
        assert!(status::retry_after(&ended).is_some(), "{ended:?}");
    }
    let status = stopping.process.wait_for_end(DEADLINE);
    assert!(status.success(), "{status}");
    assert_eq!(bench.resumed(survivor, "long", &events), expected);
}

#[test]
fn a_stopping_coordinator_finishes_what_it_can() {
    let mut bench = Bench::new();
    let expected = bench.whole(bench.cluster.port, request("undisturbed", 100));
    let mut stopping = bench.another(&[]);
    let (mut stream, mut events) = bench.begin(stopping.port, request("short", 100), 2);
    stopping.process.signal("TERM");
    let (more, status) = bench.rest(&mut stream);
    assert!(status.is_none(), "{status:?}");
    events.extend(more);
    assert_eq!(super::bench::plain(events), expected);
    let ended = stopping.process.wait_for_end(DEADLINE);
    assert!(ended.success(), "{ended}");
}

#[test]
fn a_lost_worker_leaves_a_request_that_can_be_resumed() {
    let mut bench = Bench::new();
    let port = bench.cluster.port;
    let expected = bench.whole(port, request("undisturbed", 600));
    let (mut stream, mut events) = bench.begin(port, request("orphan", 600), 5);
    // Both, so that no copy of the experts can be reached.
    for worker in &mut bench.cluster.workers {
        worker.process.kill();
    }
    let (more, status) = bench.rest(&mut stream);
    events.extend(more);
    let status = status.unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert_eq!(status::reason(&status).as_deref(), Some(status::RESUMABLE), "{status:?}");
    assert!(status::retry_after(&status).is_some(), "{status:?}");
    for index in 0..2 {
        bench.cluster.restart_worker(index);
    }
    wait_until("the workers to serve again", DEADLINE, || bench.serves(port).is_some());
    assert_eq!(bench.resumed(port, "orphan", &events), expected);
}
