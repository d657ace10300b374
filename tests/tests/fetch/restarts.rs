//! Killed, stopped, or two at a time: what has come stays, and comes once.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use shimmer_tests::{
    file_server::{Reply, Request},
    wait::{wait_for, wait_until},
};

use super::bench::{Bench, DEADLINE};

const FILE: &str = "trunk.safetensors";
/// The piece of the file that does not come at first: the second one.
const HELD: u64 = 16 << 10;
/// What comes of it nevertheless.
const PART: usize = 5000;

/// The record of a file on its way: 32 bytes, then what has come of each piece.
fn received(bench: &Bench) -> Vec<u64> {
    let record = fs::read(bench.out.join(".fetch").join(format!("{FILE}.received")));
    let record = record.unwrap_or_default();
    let counts = record.get(32..).unwrap_or_default();
    counts.chunks_exact(8).map(|it| u64::from_le_bytes(it.try_into().unwrap())).collect()
}

/// Gives everything but the end of one piece.
fn all_but_one(request: &Request) -> Reply {
    let held = request.path == FILE && request.range().is_some_and(|it| it.start / HELD == 1);
    if held {
        Reply::Stall(if request.range().unwrap().start == HELD { PART } else { 0 })
    } else {
        Reply::File
    }
}

/// Waits until all that such a server gives has come.
fn wait_for_the_rest(bench: &Bench) {
    let (length, part) = (fs::metadata(bench.source.join(FILE)).unwrap().len(), PART as u64);
    wait_until("all that is given", DEADLINE, || {
        let counts = received(bench);
        counts.get(1) == Some(&part) && counts.iter().sum::<u64>() == length - HELD + part
    });
    let layer = bench.out.join("experts/layer-002.safetensors");
    wait_until("the other files", DEADLINE, || layer.exists());
}

#[test]
fn a_killed_fetch_goes_on_where_it_was() {
    let bench = Bench::new();
    let server = bench.serve(all_but_one);
    let mut first = bench.start("first", &server.url(""), &["--stall-timeout", "300ms"]);
    wait_for_the_rest(&bench);
    first.kill();
    bench.check_not_whole();
    let server = bench.serve(|_| Reply::File);
    bench.must(&server.url(""), &[]);
    bench.check_whole();
    let asked: Vec<_> = server.requests().into_iter().map(|it| (it.range(), it.path)).collect();
    let rest = HELD + PART as u64..2 * HELD;
    assert_eq!(asked, [(None, "manifest.json".to_owned()), (Some(rest), FILE.to_owned())]);
}

#[test]
fn a_signal_ends_it_at_once_and_it_goes_on_later() {
    let bench = Bench::new();
    let server = bench.serve(all_but_one);
    let mut first = bench.start("first", &server.url(""), &["--stall-timeout", "300ms"]);
    wait_for_the_rest(&bench);
    first.signal("TERM");
    assert_eq!(first.wait_for_end(DEADLINE).code(), Some(1));
    let log = first.log();
    assert!(log.contains("run the same command again to continue"), "{log}");
    drop(server);
    let server = bench.serve(|_| Reply::File);
    bench.must(&server.url(""), &[]);
    assert_eq!(server.requests().len(), 2);
    bench.check_whole();
}

#[test]
fn two_into_one_directory_take_turns() {
    let bench = Bench::new();
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let server = bench
        .serve(move |it| if gate.load(Ordering::SeqCst) { Reply::File } else { all_but_one(it) });
    let patient = ["--stall-timeout", "300ms", "--retries", "100"];
    let mut first = bench.start("first", &server.url(""), &patient);
    wait_for_the_rest(&bench);
    let mut second = bench.start("second", &server.url(""), &patient);
    wait_for("the second one to wait", DEADLINE, || {
        second.log().contains("another process fetches into").then_some(())
    });
    open.store(true, Ordering::SeqCst);
    for process in [&mut first, &mut second] {
        let ended = process.wait_for_end(DEADLINE);
        assert!(ended.success(), "{ended}: {}", process.log());
    }
    assert!(second.log().contains("was there already"), "{}", second.log());
    bench.check_whole();
    let mut ranges: Vec<_> = server
        .requests()
        .into_iter()
        .filter(|it| it.path.contains("layer-"))
        .map(|it| (it.path.clone(), it.range().unwrap().start))
        .collect();
    let asked = ranges.len();
    ranges.sort();
    ranges.dedup();
    assert_eq!(ranges.len(), asked, "something came twice");
}

#[test]
fn a_directory_of_another_container_is_left_alone() {
    let bench = Bench::new();
    let server = bench.serve(|_| Reply::File);
    bench.must(&server.url(""), &[]);
    let ours = bench.digest.clone();
    let bench = Bench { digest: "1".repeat(64), ..bench };
    let ended = bench.fetch(&server.url(""), &[], &[]);
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.said.contains("holds another container") && ended.said.contains(&ours),
        "{}",
        ended.said
    );
    bench.check_whole();
}
