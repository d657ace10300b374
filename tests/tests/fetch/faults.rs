//! Faults that pass: the command ends well, with every byte.

use shimmer_tests::file_server::{Reply, Request};

use super::bench::Bench;

const FILE: &str = "trunk.safetensors";

/// Fetches from a server with a fault, and returns what was said.
fn check(
    bench: &Bench,
    more: &[&str],
    rule: impl Fn(&Request) -> Reply + Send + Sync + 'static,
) -> (String, Vec<Request>) {
    let server = bench.serve(rule);
    let said = bench.must(&server.url(""), more);
    bench.check_whole();
    (said, server.requests())
}

#[test]
fn answers_that_break_off_are_continued() {
    let bench = Bench::new();
    let (said, requests) = check(&bench, &[], |request| match (&*request.path, request.before) {
        (FILE, 0) => Reply::Cut(5000),
        ("manifest.json", 0) => Reply::Cut(100),
        _ => Reply::File,
    });
    assert!(said.contains(FILE) && said.contains("next try in"), "{said}");
    let starts: Vec<u64> = requests
        .iter()
        .filter(|request| request.path == FILE)
        .map(|request| request.range().unwrap().start)
        .collect();
    assert_eq!(starts[..2], [0, 5000], "what had come is not asked for again");
}

#[test]
fn a_server_that_is_busy_is_asked_later() {
    let bench = Bench::new();
    let (said, _) = check(&bench, &[], |request| match (&*request.path, request.before) {
        ("manifest.json", 0) => {
            Reply::Status(503, vec![("retry-after", "0".to_owned())], "later".to_owned())
        }
        (FILE, 0) => Reply::Status(429, Vec::new(), String::new()),
        ("tokenizer.json", 0) => Reply::Status(500, Vec::new(), String::new()),
        _ => Reply::File,
    });
    for status in ["503", "429", "500"] {
        assert!(said.contains(&format!("status {status}")), "{said}");
    }
}

#[test]
fn a_server_without_ranges_gives_whole_files() {
    let bench = Bench::new();
    let (_, requests) = check(&bench, &["--connections", "3"], |request| {
        match (&*request.path, request.before) {
            // It begins again, because there is no way to go on.
            (FILE, 0) => Reply::Status(502, Vec::new(), String::new()),
            _ => Reply::Whole,
        }
    });
    let count = requests.iter().filter(|request| request.path == FILE).count();
    assert_eq!(count, 2, "one request for the file, after the one that failed");
}

#[test]
fn silence_is_not_waited_out() {
    let bench = Bench::new();
    let (said, _) = check(&bench, &["--stall-timeout", "300ms"], |request| {
        match (&*request.path, request.before) {
            (FILE, 1) => Reply::Stall(3000),
            _ => Reply::File,
        }
    });
    assert!(said.contains("nothing came for 300ms"), "{said}");
}

#[test]
fn redirects_are_followed() {
    let bench = Bench::new();
    let other = bench.serve(|_| Reply::File);
    let target = other.url("");
    let server = bench.serve(move |request| {
        let location = format!("{target}/{}", request.path);
        Reply::Status(307, vec![("location", location)], String::new())
    });
    let token = bench.dir.path().join("token");
    std::fs::write(&token, "hush-hush\n").unwrap();
    bench.must(&server.url(""), &["--token-file", token.to_str().unwrap()]);
    bench.check_whole();
    let shown = |request: &Request| request.headers.get("authorization").cloned();
    assert!(server.requests().iter().all(|it| shown(it).as_deref() == Some("Bearer hush-hush")));
    let elsewhere = other.requests();
    assert!(
        elsewhere.len() > 3 && elsewhere.iter().all(|it| shown(it).is_none()),
        "it was passed on"
    );
}

#[test]
fn wrong_bytes_are_fetched_again() {
    let bench = Bench::new();
    let good = std::fs::read(bench.source.join(FILE)).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    let last = good.len() as u64;
    let (said, requests) = check(&bench, &[], move |request| {
        let covers = request.range().is_some_and(|range| range.end == last);
        let first = request.path == FILE && covers && request.before < 100;
        let seen = SEEN.with_first(first);
        if seen { Reply::Version("\"one\"", bad.clone()) } else { Reply::File }
    });
    assert!(said.contains("is damaged: fetching it again"), "{said}");
    let starts: Vec<_> = requests.iter().filter(|it| it.path == FILE).collect();
    let begins = starts.iter().filter(|it| it.range().unwrap().start == 0).count();
    assert_eq!(begins, 1, "only the damaged part comes again");
}

/// Says yes once.
struct Once(std::sync::atomic::AtomicBool);

static SEEN: Once = Once(std::sync::atomic::AtomicBool::new(false));

impl Once {
    fn with_first(&self, wanted: bool) -> bool {
        wanted && !self.0.swap(true, std::sync::atomic::Ordering::SeqCst)
    }
}

#[test]
fn a_file_that_changes_is_begun_again_and_never_mixed() {
    let bench = Bench::new();
    let good = std::fs::read(bench.source.join(FILE)).unwrap();
    let old = vec![7; good.len()];
    // The first pieces are of a version that is replaced while it is fetched.
    let (said, _) = check(&bench, &["--connections", "1"], move |request| {
        match (&*request.path, request.before) {
            (FILE, 0..=2) => Reply::Version("\"zero\"", old.clone()),
            _ => Reply::File,
        }
    });
    assert!(said.contains("changed at the source, begun again"), "{said}");
    assert!(!said.contains("damaged"), "the versions were mixed: {said}");
}
