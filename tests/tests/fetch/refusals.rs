//! What cannot be fetched is refused by name, and leaves nothing that looks like a container.

use std::fs;

use shimmer_model::Manifest;
use shimmer_tests::file_server::{Reply, Request};

use super::bench::Bench;

const FILE: &str = "trunk.safetensors";

/// Fails with all of these words.
fn check(
    bench: &Bench,
    more: &[&str],
    fragments: &[&str],
    rule: impl Fn(&Request) -> Reply + Send + Sync + 'static,
) {
    let server = bench.serve(rule);
    let ended = bench.fetch(&server.url("/models"), more, &[]);
    assert_eq!(ended.code, Some(1), "{}", ended.said);
    for fragment in fragments {
        assert!(ended.said.contains(fragment), "{fragment:?} is not in: {}", ended.said);
    }
    bench.check_not_whole();
}

/// The server of these tests has its files below `/models`.
fn below(bench: &Bench) -> impl Fn(&Request) -> Option<Vec<u8>> + Send + Sync + 'static {
    let source = bench.source.clone();
    move |request| fs::read(source.join(request.path.strip_prefix("models/")?)).ok()
}

#[test]
fn another_container_is_refused_before_anything_is_written() {
    let bench = Bench { digest: "0".repeat(64), ..Bench::new() };
    let files = below(&bench);
    let found = Manifest::read(&bench.source).unwrap().digest;
    let zeros = "0".repeat(64);
    check(
        &bench,
        &[],
        &["/models/manifest.json", &found, &zeros, "another container"],
        move |it| files(it).map_or(Reply::File, |bytes| Reply::Version("\"one\"", bytes)),
    );
    assert!(!bench.out.exists(), "something was written");
}

#[test]
fn refusals_of_the_server_say_what_to_do() {
    let bench = Bench::new();
    let said = "<Error><Code>AccessDenied</Code></Error>";
    check(&bench, &[], &["status 403", "AccessDenied", "hint: check what the credentials"], |_| {
        Reply::Status(403, Vec::new(), said.to_owned())
    });
    check(&bench, &[], &["/models/manifest.json: status 404", "holds manifest.json"], |_| {
        Reply::Status(404, Vec::new(), String::new())
    });
    check(&bench, &[], &["status 401", "--token-file"], |_| {
        Reply::Status(401, Vec::new(), String::new())
    });
    check(
        &bench,
        &["--retries", "1"],
        &["gave up after 2 tries", "status 503", "--retries"],
        |_| Reply::Status(503, Vec::new(), String::new()),
    );
    check(&bench, &[], &["more than 5 redirects"], |it| {
        Reply::Status(302, vec![("location", format!("/{}", it.path))], String::new())
    });
    check(&bench, &[], &["manifest.json", "not the expected JSON"], |_| {
        Reply::Status(200, Vec::new(), "<html>please log in</html>".to_owned())
    });
    assert!(!bench.out.exists(), "something was written");
}

#[test]
fn files_that_are_not_what_the_manifest_says_are_refused() {
    let bench = Bench::new();
    let length = fs::metadata(bench.source.join(FILE)).unwrap().len();
    let expected = format!("the manifest says {length} bytes, the server has {}", length + 1);
    let files = below(&bench);
    let grown = move |it: &Request| match files(it) {
        Some(mut bytes) if it.path.ends_with(FILE) => {
            bytes.push(0);
            Reply::Version("\"one\"", bytes)
        }
        Some(bytes) => Reply::Version("\"one\"", bytes),
        None => Reply::File,
    };
    check(&bench, &[], &["/models/trunk.safetensors", &expected, "upload it again"], grown);

    let files = below(&bench);
    let wrong = move |it: &Request| match files(it) {
        Some(mut bytes) if it.path.ends_with("layer-002.safetensors") => {
            *bytes.last_mut().unwrap() ^= 1;
            Reply::Version("\"one\"", bytes)
        }
        Some(bytes) => Reply::Version("\"one\"", bytes),
        None => Reply::File,
    };
    let named = ["layer-002.safetensors", "layers.2.experts.", "the manifest says"];
    check(&bench, &[], &[&named[..], &["at the source is damaged"]].concat(), wrong);

    let files = below(&bench);
    let restless = move |it: &Request| match files(it) {
        Some(bytes) if it.path.ends_with(FILE) => {
            let etags = ["\"a\"", "\"b\"", "\"c\""];
            Reply::Version(etags[it.before % 3], bytes)
        }
        Some(bytes) => Reply::Version("\"one\"", bytes),
        None => Reply::File,
    };
    fs::remove_dir_all(&bench.out).unwrap();
    check(&bench, &["--connections", "1"], &["changed at the source 3 times", "ETag"], restless);
}

#[test]
fn answers_that_break_the_protocol_are_refused() {
    let bench = Bench::new();
    let odd = |name: &'static str, value: &str| {
        let value = value.to_owned();
        move |it: &Request| match it.path.strip_prefix("models/") {
            Some(FILE) => Reply::With(name, value.clone()),
            _ => Reply::File,
        }
    };
    // The files lie below `models` of another directory.
    let root = bench.dir.path().join("root");
    fs::create_dir(&root).unwrap();
    std::os::unix::fs::symlink(&bench.source, root.join("models")).unwrap();
    let bench = Bench { source: root, ..bench };
    check(&bench, &[], &[FILE, "encodes the file as \"br\""], odd("content-encoding", "br"));
    let most = (u64::MAX / 4).to_string();
    check(&bench, &[], &[FILE, "the server announces"], odd("content-length", &most));
    let range = "bytes 5-9/*";
    let whole = |it: &Request| match it.path.strip_prefix("models/") {
        Some(FILE) => {
            Reply::Status(206, vec![("content-range", range.to_owned())], "abcde".to_owned())
        }
        _ => Reply::File,
    };
    check(&bench, &[], &[FILE, "bytes 5-9/*"], whole);
}

#[test]
fn a_manifest_cannot_lead_out_of_the_directory() {
    let bench = Bench::new();
    let mut manifest = Manifest::read(&bench.source).unwrap();
    manifest.files[0].file = "../../evil".to_owned();
    manifest.digest = manifest.compute_digest();
    let text = serde_json::to_vec(&manifest).unwrap();
    let bench = Bench { digest: manifest.digest, ..bench };
    check(&bench, &[], &["\"../../evil\"", "do not use this source"], move |it| match &*it.path {
        "models/manifest.json" => Reply::Version("\"one\"", text.clone()),
        _ => Reply::Version("\"one\"", b"evil".to_vec()),
    });
    assert!(!bench.out.exists() && !bench.dir.path().join("evil").exists());
}

#[test]
fn arguments_that_cannot_be_used_are_refused() {
    let bench = Bench::new();
    for (source, more, fragment) in [
        ("models", &[][..], "mirror stage"),
        ("https://h/m", &["--connections", "0"], "--connections"),
        ("https://h/m", &["--token-file", "/none"], "token-file"),
    ] {
        let ended = bench.fetch(source, more, &[]);
        assert_eq!(ended.code, Some(2), "{}", ended.said);
        assert!(ended.said.contains(fragment), "{fragment:?} is not in: {}", ended.said);
    }
    let out = bench.out.to_str().unwrap();
    let args = ["fetch", "https://h/m", "--out", out, "--digest", &bench.digest, "--piece", "0"];
    let ended = bench.shimmer(&args, &[]);
    assert_eq!(ended.code, Some(2), "{}", ended.said);
    assert!(ended.said.contains("--piece has no bytes"), "{}", ended.said);
    let bench = Bench { digest: "5c3f".to_owned(), ..bench };
    let ended = bench.fetch("https://h/m", &[], &[]);
    assert_eq!(ended.code, Some(2), "{}", ended.said);
    assert!(ended.said.contains("shimmer inspect"), "{}", ended.said);
}
