//! `shimmer worker` in a real etcd.

use std::time::{Duration, Instant};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::membership::{Snapshot, records::WorkerRecord};
use shimmer_tests::{
    etcd::{self, Etcd},
    models::TinyModel,
    process::Process,
    wait::wait_until,
};

use super::{DEADLINE, member, wait_for_view};

/// As short as etcd grants with its usual elections.
const SHORT_LEASE: Duration = Duration::from_secs(2);

fn start(etcd: &Etcd, model: &TinyModel, name: &str, more: &[&str]) -> Process {
    let container = model.container(NumericClass::default()).display().to_string();
    let lease = format!("{}s", SHORT_LEASE.as_secs());
    let urls = etcd.urls().join(",");
    let mut args = vec![
        "worker",
        "--container",
        &container,
        "--listen",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--id",
        "w1",
        "--weight",
        "3",
        "--cluster",
        "test",
        "--etcd",
        &urls,
        "--lease",
        &lease,
    ];
    args.extend(more);
    Process::shimmer(name, &args, std::iter::empty::<(&str, &str)>(), etcd.directory())
}

fn record(view: &Snapshot) -> Option<WorkerRecord> {
    serde_json::from_str(&view.entries.get("workers/w1")?.value).ok()
}

fn said(process: &Process, text: &str) -> usize {
    process.log().lines().filter(|line| line.contains(text)).count()
}

#[test]
fn a_worker_registers_itself_and_leaves() {
    if !etcd::available() {
        return;
    }
    let (etcd, model) = (Etcd::start(1), TinyModel::new(Preset::Glm4Moe));
    let follower = member(&etcd, 0);
    let mut worker = start(&etcd, &model, "worker", &[]);
    let port = worker.listening_port(DEADLINE);
    let seen = wait_for_view("a worker", &*follower, |view| record(view).is_some());
    let first = record(&seen).unwrap();
    assert_eq!(first.address, format!("127.0.0.1:{port}"));
    assert_eq!((first.weight, first.draining), (3.0, false));
    assert!(!first.container_digest.is_empty() && first.ram_budget_bytes > 0);
    // Another run of the same worker takes its place at once.
    worker.kill();
    let mut worker = start(&etcd, &model, "worker-2", &["--advertise", "[fd00::7]:7000"]);
    let seen = wait_for_view("the next run", &*follower, |view| {
        record(view).is_some_and(|record| record.incarnation != first.incarnation)
    });
    assert_eq!(record(&seen).unwrap().address, "[fd00::7]:7000");
    worker.listening_port(DEADLINE);
    worker.signal("TERM");
    assert!(worker.wait_for_end(DEADLINE).success());
    wait_for_view("its end", &*follower, |view| record(view).is_none());
}

#[test]
fn a_worker_that_was_stopped_longer_than_its_lease_registers_again() {
    if !etcd::available() {
        return;
    }
    let (etcd, model) = (Etcd::start(1), TinyModel::new(Preset::Glm4Moe));
    let follower = member(&etcd, 0);
    let mut worker = start(&etcd, &model, "worker", &[]);
    worker.listening_port(DEADLINE);
    let seen = wait_for_view("a worker", &*follower, |view| record(view).is_some());
    let before = seen.entries["workers/w1"].clone();
    worker.signal("STOP");
    wait_for_view("its lease to end", &*follower, |view| record(view).is_none());
    worker.signal("CONT");
    let woken = Instant::now();
    let seen = wait_for_view("its return", &*follower, |view| record(view).is_some());
    println!("listed again {} ms after it was woken", woken.elapsed().as_millis());
    let after = &seen.entries["workers/w1"];
    assert_ne!(after.lease, before.lease);
    assert_eq!(after.value, before.value, "it is the same run");
    assert!(worker.ended().is_none());
    assert_eq!(said(&worker, "the lease has run out"), 1);
}

#[test]
fn a_worker_serves_without_etcd_and_says_so_once() {
    if !etcd::available() {
        return;
    }
    let (mut etcd, model) = (Etcd::start(1), TinyModel::new(Preset::Glm4Moe));
    etcd.kill(0);
    let mut worker = start(&etcd, &model, "worker", &[]);
    worker.listening_port(DEADLINE);
    wait_until("the outage to be told", DEADLINE, || {
        said(&worker, "the membership store does not answer") > 0
    });
    etcd.restart_all();
    let follower = member(&etcd, 0);
    wait_for_view("a worker", &*follower, |view| record(view).is_some());
    assert_eq!(said(&worker, "the membership store does not answer"), 1);
    wait_until("the return to be told", DEADLINE, || {
        said(&worker, "the membership store answers again") == 1
    });
    etcd.kill(0);
    worker.signal("TERM");
    assert!(worker.wait_for_end(Duration::from_secs(20)).success(), "it leaves without etcd");
}
