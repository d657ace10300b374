//! What does not fit is refused by name, on both sides, before any work.

use std::sync::atomic::Ordering;

use shimmer_model::{Container, tiny::Preset};
use shimmer_proto::expert::v1::{
    ErrorCode, Identity, session_request::Body as Ask, session_response::Body as Said,
};
use shimmer_worker::{ServeConfig, TierOptions, tier_options::RamSetting};
use tempfile::TempDir;

use super::{
    bench::{self, WorkerServer, connect, quick, wait_told},
    meddler::{Fault, Meddler},
    raw::{RawClient, hello},
};

/// The worker refuses a coordinator whose identity was changed, and tells its own identity first.
fn check_worker_refuses(change: fn(&mut Identity), expected: &str) {
    let server = WorkerServer::start("w2");
    let mut client = RawClient::open(&server);
    let mut identity = server.core.identity();
    change(&mut identity);
    client.ask(Ask::Hello(hello(identity)));
    let Ok(Some(Said::Hello(theirs))) = client.hear() else {
        panic!("the worker's hello comes first")
    };
    assert_eq!(theirs.identity, Some(server.core.identity()));
    let error = client.refused();
    assert_eq!((error.code(), error.fatal), (ErrorCode::Incompatible, true));
    assert!(error.detail.contains("coordinator raw has"), "{}", error.detail);
    assert!(error.detail.contains(expected), "{} should name {expected}", error.detail);
    assert!(error.detail.contains("worker w2 has"), "{}", error.detail);
    assert!(matches!(client.hear(), Ok(None)), "nothing follows");
    assert_eq!(server.counters().hellos_refused.load(Ordering::Relaxed), 1);
    assert_eq!(server.counters().sessions.load(Ordering::Relaxed), 0);
}

#[test]
fn the_worker_refuses_each_difference_by_name() {
    check_worker_refuses(|i| i.protocol_version = 9, "protocol version 9");
    check_worker_refuses(|i| i.math_id = "shimmer-math/0".to_owned(), "math id shimmer-math/0");
    check_worker_refuses(|i| i.container_digest = "9f3c".to_owned(), "container digest 9f3c");
    check_worker_refuses(
        |i| i.numeric_class = "experts=f32".to_owned(),
        "numeric class experts=f32",
    );
    check_worker_refuses(|i| *i = Identity::default(), "protocol version 0");
}

/// The coordinator refuses a worker whose hello was changed.
fn check_coordinator_refuses(fault: Fault, expected: &str) {
    let meddler = Meddler::start("w2", fault);
    let remote = connect(quick(), &[meddler.address()]);
    wait_told(&remote, 0, "refused", expected);
    assert!(remote.counters().refusals > 0);
    assert!(!remote.status().borrow().complete);
}

#[test]
fn the_coordinator_refuses_each_difference_by_name() {
    check_coordinator_refuses(
        Fault::Identity(|i| i.protocol_version = 9),
        "worker w2 has protocol version 9, coordinator c1 has 2",
    );
    check_coordinator_refuses(
        Fault::Identity(|i| i.math_id = "x".to_owned()),
        "worker w2 has math id x, coordinator c1 has",
    );
    check_coordinator_refuses(
        Fault::Identity(|i| i.container_digest = "9f3c".to_owned()),
        "worker w2 has container digest 9f3c",
    );
    check_coordinator_refuses(
        Fault::Identity(|i| i.numeric_class.clear()),
        "worker w2 has numeric class (none)",
    );
    check_coordinator_refuses(Fault::NoHello, "not a hello");
}

#[test]
fn a_worker_that_computes_differently_never_serves() {
    check_coordinator_refuses(Fault::SelfTest, "self-test: it computes expert");
}

#[test]
fn another_container_is_refused_on_both_sides() {
    let dir = TempDir::new().unwrap();
    let other = Container::open(&bench::make_container(dir.path(), Preset::Olmoe)).unwrap();
    let server = WorkerServer::with(bench::core(other.into(), "w", 1.0), 0, ServeConfig::default());
    let remote = connect(quick(), &[server.address()]);
    wait_told(&remote, 0, "refused", "container digest");
    assert!(server.counters().hellos_refused.load(Ordering::Relaxed) > 0);
}

#[test]
fn a_worker_that_comes_back_right_serves_without_a_restart() {
    let dir = TempDir::new().unwrap();
    let other = Container::open(&bench::make_container(dir.path(), Preset::Olmoe)).unwrap();
    let wrong = WorkerServer::with(bench::core(other.into(), "w", 1.0), 0, ServeConfig::default());
    let port = wrong.port;
    let remote = connect(quick(), &[wrong.address()]);
    wait_told(&remote, 0, "refused", "container digest");
    drop(wrong);
    let _right =
        WorkerServer::with(bench::core(bench::container(), "w", 1.0), port, ServeConfig::default());
    bench::wait_complete(&remote);
}

#[test]
fn one_name_for_two_workers_is_refused() {
    let (one, two) = (WorkerServer::start("same"), WorkerServer::start("same"));
    let remote = connect(quick(), &[one.address(), two.address()]);
    let status = remote.status();
    shimmer_tests::wait::wait_until("one of them to be refused", bench::SOON, || {
        status
            .borrow()
            .workers
            .iter()
            .any(|w| w.state == "refused" && w.detail.contains("ids must be unique"))
    });
}

#[test]
fn a_budget_that_is_too_small_is_named() {
    let core = {
        let config = shimmer_worker::WorkerConfig {
            id: "small".to_owned(),
            host: String::new(),
            coordinators: 8,
            weight: 1.0,
            tiers: TierOptions { ram: RamSetting::Bytes(4096), ..TierOptions::default() },
            threads: 1,
            pool: None,
            build: "test".to_owned(),
        };
        shimmer_worker::ExpertCore::new(
            bench::container(),
            shimmer_kernels::Kernels::new(None).unwrap(),
            config,
        )
        .unwrap()
    };
    let server = WorkerServer::with(core, 0, ServeConfig::default());
    let remote = connect(quick(), &[server.address()]);
    wait_told(&remote, 0, "refused", "--ram leaves 4.00 KiB");
    let error = RawClient::greeted(&server).assign(bench::assign_all(1, 1)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Load);
    assert!(error.detail.contains("--ram leaves 4.00 KiB"), "{}", error.detail);
}
