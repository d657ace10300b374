//! The end of a worker: coordinators are told, answered until they leave, and nobody is waited for longer than was said.

use std::time::{Duration, Instant};

use shimmer_proto::expert::v1::{
    ErrorCode, ExpertWork, Fence, session_request::Body as Ask, session_response::Body as Said,
};
use shimmer_worker::ServeConfig;
use tonic::Code;

use super::{
    bench::{self, SOON, WorkerServer, moe_layers},
    raw::{EPOCH, GENERATION, RawClient, hello},
};

fn work() -> ExpertWork {
    let fence = Fence {
        epoch: EPOCH,
        generation: GENERATION,
        step: 1,
        layer: moe_layers()[0].0,
        ..Fence::default()
    };
    bench::work(fence, &[0, 2, 5], 4, 9)
}

fn server(drain_timeout: Duration) -> WorkerServer {
    let config = ServeConfig { drain_timeout, ..ServeConfig::default() };
    WorkerServer::with(bench::core(bench::container(), "w", 1.0), 0, config)
}

/// Hears that the worker will leave.
fn told(client: &mut RawClient) {
    match client.hear() {
        Ok(Some(Said::Draining(draining))) => {
            assert_eq!(draining.reason, "worker w was asked to stop");
            assert!(draining.left_ms <= u64::try_from(SOON.as_millis()).unwrap());
            assert!(draining.left_ms > 0, "it has only begun");
        }
        other => panic!("expected to be told, heard {other:?}"),
    }
}

#[test]
fn work_is_answered_until_coordinators_leave() {
    let mut server = server(SOON);
    let mut known = RawClient::assigned(&server);
    let mut old = RawClient::assigned(&server);
    // On its way when the worker is asked to stop.
    known.ask(Ask::Work(work()));
    server.stop();
    let (mut results, mut heard) = (0, 0);
    for _ in 0..2 {
        match known.hear() {
            Ok(Some(Said::Result(_))) => results += 1,
            Ok(Some(Said::Draining(_))) => heard += 1,
            other => panic!("heard {other:?}"),
        }
    }
    assert_eq!((results, heard), (1, 1));
    // One that does not know what it was told.
    told(&mut old);
    for _ in 0..20 {
        assert!(old.works(work()));
    }
    assert!(known.works(work()));
    assert!(!server.ended(), "coordinators have streams");
    drop(known);
    assert!(old.works(work()));
    assert!(!server.ended(), "one has");
    drop(old);
    assert!(server.wait_for_end() < SOON / 2, "nobody is left to wait for");
}

#[test]
fn who_comes_while_a_worker_drains_is_told_at_once() {
    let mut server = server(SOON);
    let mut client = RawClient::assigned(&server);
    assert!(bench::is_healthy(&server));
    server.stop();
    told(&mut client);
    assert!(!bench::is_healthy(&server));
    let mut late = RawClient::open(&server);
    late.ask(Ask::Hello(hello(server.core.identity())));
    let Ok(Some(Said::Hello(theirs))) = late.hear() else { panic!("expected a hello") };
    assert!(theirs.draining);
    late.assign(bench::assign_all(EPOCH, GENERATION)).unwrap();
    assert!(late.works(work()), "it may still be of use");
    drop((client, late));
    server.wait_for_end();
}

#[test]
fn nobody_is_waited_for_longer_than_the_drain_time() {
    let mut server = server(Duration::from_millis(300));
    let mut client = RawClient::assigned(&server);
    let begun = Instant::now();
    server.stop();
    told(&mut client);
    let end = loop {
        client.ask(Ask::Work(work()));
        match client.hear() {
            Ok(Some(Said::Result(_))) => {}
            end => break end,
        }
    };
    let status = end.expect_err("the stream ends with a reason");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("worker w is shutting down"), "{status}");
    assert!(begun.elapsed() >= Duration::from_millis(300), "it was answered until then");
    server.wait_for_end();
}

#[test]
fn a_worker_without_coordinators_ends_at_once() {
    let mut server = server(SOON);
    let mute = RawClient::open(&server);
    let silent = std::net::TcpStream::connect(server.address()).unwrap();
    assert!(bench::is_healthy(&server), "a connection that was used and is idle");
    server.stop();
    let took = server.wait_for_end();
    assert!(took < Duration::from_secs(5), "it took {took:?}, far below the drain time");
    drop((mute, silent));
}

#[test]
fn more_coordinators_than_memory_was_planned_for_are_refused() {
    let server = WorkerServer::start("w");
    let mut others: Vec<RawClient> =
        (2..bench::COORDINATORS).map(|_| RawClient::greeted(&server)).collect();
    let mut one = RawClient::assigned(&server);
    let two = RawClient::assigned(&server);
    let mut third = RawClient::greeted(&server);
    let error = third.refused();
    assert_eq!((error.code(), error.fatal), (ErrorCode::Incompatible, true));
    let expected = "worker w serves 8 coordinators already, as its --max-coordinators says";
    assert_eq!(error.detail, expected);
    assert!(one.works(work()));
    drop(two);
    others.pop();
    shimmer_tests::wait::wait_until("the seat to be free", SOON, || {
        let mut again = RawClient::greeted(&server);
        again.ask(Ask::Assign(bench::assign_all(EPOCH, GENERATION)));
        !matches!(again.hear(), Ok(Some(Said::Error(_))))
    });
}
