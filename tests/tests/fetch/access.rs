//! Buckets, tokens, proxies and authorities.

use std::{collections::BTreeMap, fs};

use shimmer_tests::{
    certificates::Authority,
    file_server::{Reply, Request},
};

use super::bench::Bench;

const KEYS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE"),
    ("AWS_SECRET_ACCESS_KEY", "hush/hush+"),
    ("AWS_REGION", "eu-north-1"),
];

/// What a signature has to look like; that it is the right one is compared with AWS's example beside the code.
fn is_signed(request: &Request) -> bool {
    let header = |name: &str| request.headers.get(name).map_or("", String::as_str);
    let Some(rest) = header("authorization").strip_prefix("AWS4-HMAC-SHA256 ") else {
        return false;
    };
    let parts: BTreeMap<&str, &str> =
        rest.split(", ").filter_map(|it| it.split_once('=')).collect();
    let part = |name: &str| parts.get(name).copied().unwrap_or_default();
    let scope: Vec<&str> = part("Credential").split('/').collect();
    let ["AKIDEXAMPLE", date, "eu-north-1", "s3", "aws4_request"] = scope[..] else { return false };
    let signed: Vec<&str> = part("SignedHeaders").split(';').collect();
    let needed = ["host", "x-amz-content-sha256", "x-amz-date"];
    let hex = |text: &str| text.len() == 64 && text.bytes().all(|it| it.is_ascii_hexdigit());
    header("x-amz-date").starts_with(date)
        && needed.iter().all(|name| signed.contains(name))
        && signed.contains(&"range") == request.headers.contains_key("range")
        && hex(part("Signature"))
        && hex(header("x-amz-content-sha256"))
}

/// A store with one bucket, `models`, and the container below `olmoe/v 1`.
fn bucket(bench: &Bench, needs_keys: bool) -> impl Fn(&Request) -> Reply + Send + Sync + 'static {
    let source = bench.source.clone();
    move |request| {
        if needs_keys && !is_signed(request) {
            let said = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>";
            return Reply::Status(403, Vec::new(), said.to_owned());
        }
        let name = request.path.strip_prefix("models/olmoe/v%201/").unwrap_or("none");
        match fs::read(source.join(name)) {
            Ok(bytes) => Reply::Version("\"d41d8cd9-3\"", bytes),
            Err(_) => Reply::Status(404, Vec::new(), "<Code>NoSuchKey</Code>".to_owned()),
        }
    }
}

#[test]
fn a_bucket_is_read_with_signed_requests() {
    let bench = Bench::new();
    let server = bench.serve(bucket(&bench, true));
    let endpoint = server.url("");
    let envs =
        [&KEYS[..], &[("AWS_ENDPOINT_URL", &*endpoint), ("AWS_SESSION_TOKEN", "session")]].concat();
    let ended = bench.fetch("s3://models/olmoe/v 1", &[], &envs);
    assert!(ended.ok, "{}", ended.said);
    bench.check_whole();
    assert!(!ended.said.contains("hush"));
    for request in server.requests() {
        assert!(is_signed(&request), "{request:?}");
        assert_eq!(request.headers["x-amz-security-token"], "session");
    }
    // The wrong keys, as the store says it.
    fs::remove_dir_all(&bench.out).unwrap();
    let wrong = [("AWS_ACCESS_KEY_ID", "x"), KEYS[1], ("AWS_ENDPOINT_URL", &*endpoint)];
    let ended = bench.fetch("s3://models/olmoe/v 1", &[], &wrong);
    assert_eq!(ended.code, Some(1));
    assert!(ended.said.contains("AccessDenied") && ended.said.contains("clock"), "{}", ended.said);
}

#[test]
fn a_public_bucket_is_read_without_keys() {
    let bench = Bench::new();
    let server = bench.serve(bucket(&bench, false));
    let endpoint = server.url("");
    let envs = [("AWS_ENDPOINT_URL_S3", &*endpoint)];
    let ended = bench.fetch("s3://models/olmoe/v 1/", &[], &envs);
    assert!(ended.ok, "{}", ended.said);
    bench.check_whole();
    assert!(server.requests().iter().all(|it| !it.headers.contains_key("authorization")));
    let closed = bench.serve(bucket(&bench, true));
    let endpoint = closed.url("");
    fs::remove_dir_all(&bench.out).unwrap();
    let ended = bench.fetch("s3://models/olmoe/v 1", &[], &[("AWS_ENDPOINT_URL", &*endpoint)]);
    assert!(ended.said.contains("no request was signed"), "{}", ended.said);
    // A bucket of another region sends its clients there; a signature is for one host.
    let moved = bench.serve(|_| {
        let there = ("x-amz-bucket-region", "ap-south-1".to_owned());
        Reply::Status(301, vec![there, ("location", "http://elsewhere/".to_owned())], String::new())
    });
    let endpoint = moved.url("");
    let envs = [&KEYS[..], &[("AWS_ENDPOINT_URL", &*endpoint)]].concat();
    let ended = bench.fetch("s3://models/olmoe", &[], &envs);
    assert!(ended.said.contains("AWS_REGION=ap-south-1"), "{}", ended.said);
}

#[test]
fn a_token_comes_from_the_environment_or_a_file() {
    let bench = Bench::new();
    let server =
        bench.serve(|request| match request.headers.get("authorization").map(String::as_str) {
            Some("Bearer hush-1") => Reply::File,
            _ => Reply::Status(401, Vec::new(), String::new()),
        });
    let ended = bench.fetch(&server.url(""), &[], &[("SHIMMER_FETCH_TOKEN", "hush-1")]);
    assert!(ended.ok, "{}", ended.said);
    assert!(ended.said.contains("in plain text") && !ended.said.contains("hush"), "{}", ended.said);
    bench.check_whole();
    fs::remove_dir_all(&bench.out).unwrap();
    let file = bench.dir.path().join("token");
    fs::write(&file, " hush-1\n").unwrap();
    bench.must(&server.url(""), &["--token-file", file.to_str().unwrap()]);
    fs::remove_dir_all(&bench.out).unwrap();
    let ended = bench.fetch(&server.url(""), &[], &[]);
    assert!(
        ended.said.contains("status 401") && ended.said.contains("--token-file"),
        "{}",
        ended.said
    );
}

#[test]
fn proxies_of_the_environment_are_used() {
    let bench = Bench::new();
    let proxy = bench.serve(|_| Reply::File);
    let url = proxy.url("");
    // Nobody resolves this name but the proxy.
    let ended = bench.fetch("http://models.invalid/", &[], &[("http_proxy", &*url)]);
    assert!(ended.ok, "{}", ended.said);
    bench.check_whole();
    assert!(proxy.requests().iter().all(|it| it.target.starts_with("http://models.invalid/")));
    fs::remove_dir_all(&bench.out).unwrap();
    let asked = proxy.requests().len();
    let server = bench.serve(|_| Reply::File);
    let envs = [("http_proxy", &*url), ("no_proxy", "127.0.0.1")];
    let ended = bench.fetch(&server.url(""), &[], &envs);
    assert!(ended.ok, "{}", ended.said);
    assert_eq!(proxy.requests().len(), asked, "NO_PROXY goes past it");
}

#[test]
fn a_peer_without_tls_is_told_from_one_that_is_not_trusted() {
    let bench = Bench::new();
    let server = bench.serve(|_| Reply::File);
    let authority = Authority::new("store").issue(&bench.dir.path().join("store"));
    let url = server.url("").replace("http://", "https://");
    let ended = bench.fetch(&url, &["--ca", &authority.file("ca.pem")], &[]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.said.contains("TLS: "), "{}", ended.said);
    let none = bench.dir.path().join("none.pem");
    let ended = bench.fetch(&url, &["--ca", none.to_str().unwrap()], &[]);
    assert!(ended.said.contains("none.pem"), "{}", ended.said);
}
