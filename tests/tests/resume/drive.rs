//! A journal whose files are torn or damaged, or whose drive is full.

use std::{fs, process::Command};

use shimmer_proto::{status, v1::generate_response::Event};
use shimmer_tests::{
    process::{Process, shimmer_binary},
    wait::{wait_for, wait_until},
};
use tonic::Code;

use super::bench::{Bench, DEADLINE, request};

#[test]
fn a_torn_tail_costs_nothing_and_damage_is_refused_by_its_file() {
    let mut bench = Bench::new();
    let port = bench.cluster.port;
    let expected = bench.whole(port, request("undisturbed", 200));
    for cut in [1, 3, 17, 100] {
        let id = format!("torn-{cut}");
        let mut dying = bench.another(&[]);
        let (stream, events) = bench.begin(dying.port, request(&id, 200), 60);
        dying.process.kill();
        drop(stream);
        let path = bench.file(&id);
        let bytes = fs::read(&path).unwrap();
        // The request itself, 39 ids of a prompt among it, is never torn: it had its name only when it was whole.
        let whole = 16 + u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
        fs::write(&path, &bytes[..bytes.len().saturating_sub(cut).max(whole)]).unwrap();
        assert_eq!(bench.resumed(port, &id, &events), expected, "{cut} bytes are missing");
    }
    bench.whole(port, request("damaged", 100));
    let path = bench.file("damaged");
    wait_until("the end to be written", DEADLINE, || {
        bench.resumed(port, "damaged", &[]).len() == 102
    });
    let mut bytes = fs::read(&path).unwrap();
    bytes[50] ^= 8;
    fs::write(&path, bytes).unwrap();
    let refused = bench.resume(port, "damaged", None).unwrap_err();
    assert_eq!(refused.code(), Code::DataLoss, "{refused:?}");
    assert_eq!(status::reason(&refused).as_deref(), Some("JOURNAL_DAMAGED"));
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(
        refused.message().contains(name) && refused.message().contains("at byte 0"),
        "{refused:?}"
    );
}

/// `unshare` with a mount namespace, as root of it.
fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount"]);
    command
}

/// A coordinator whose journal lies on a file system of a few pages that nobody else sees.
const SCRIPT: &str = r#"mount -t tmpfs -o size=24k tmpfs "$JOURNAL" && exec "$@""#;

#[test]
fn a_full_drive_costs_the_promise_and_nothing_else() {
    let probe = unshare().args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        println!("skipped: a full file system for the journal: mounts are not allowed here");
        return;
    }
    let bench = Bench::new();
    let small = bench.cluster.directory().join("small");
    fs::create_dir(&small).unwrap();
    let journal = small.display().to_string();
    let more = ["--journal", &journal, "--journal-keep", "10s", "--metrics-listen", "127.0.0.1:0"];
    let args = bench.cluster.coordinator_args(&bench.container, &more);
    let mut command = unshare();
    command
        .args(["sh", "-c", SCRIPT, "sh"])
        .arg(shimmer_binary())
        .args(args)
        .env("JOURNAL", &small);
    let mut process = Process::spawn("full", command, bench.cluster.directory());
    let port = process.listening_port(DEADLINE);
    wait_for("the coordinator to serve", DEADLINE, || bench.serves(port));

    let expected = bench.whole(bench.cluster.port, request("undisturbed", 12));
    let mut count = 0;
    let mut resumable = |wanted: bool| {
        wait_until(&format!("a request with resumable = {wanted}"), DEADLINE, || {
            count += 1;
            let mut events = bench.whole(port, request(&format!("r{count}"), 12));
            let Some(Event::Started(started)) = &mut events[0].event else { panic!("{events:?}") };
            let said = std::mem::replace(&mut started.resumable, true);
            assert_eq!(events, expected, "whatever the drive does, the answer is the same");
            said == wanted
        });
    };
    resumable(true);
    // Each file takes a page at least.
    resumable(false);
    let page = process.page("/metrics");
    let without = page.lines().find_map(|line| {
        line.strip_prefix("shimmer_coordinator_journal_requests_total{outcome=\"without\"} ")
    });
    assert!(without.is_some_and(|count| count.parse::<u64>().unwrap() > 0), "{page}");
    assert!(process.log().contains("No space left"), "{}", process.log());
    // The clean-up makes room, and the promise is back.
    resumable(true);
    assert!(process.log().contains("written to the journal again"), "{}", process.log());
}

#[test]
fn a_journal_that_cannot_be_kept_stops_the_start() {
    let bench = Bench::new();
    let file = bench.cluster.directory().join("file");
    fs::write(&file, b"").unwrap();
    let journal = file.join("journal").display().to_string();
    let args = bench.cluster.coordinator_args(&bench.container, &["--journal", &journal]);
    let output = Command::new(shimmer_binary()).args(args).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains(&journal) && error.contains("--journal"), "{error}");
}
