//! TLS, keys and limits of the port for clients.

use std::{fs, net::TcpStream, path::Path, time::Duration};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::{
    status,
    tls::{ClientTls, Dialer},
    v1::{GetModelRequest, TokenizeRequest, tokenize_request::Input},
};
use shimmer_tests::{
    certificates::Authority,
    client,
    cluster::{Cluster, ClusterOptions},
    models::TinyModel,
    wait::{wait_for, wait_until},
};
use tempfile::TempDir;
use tonic::{Code, Request, Status};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::{SOON, flag, run, wait_for_line};

const FIRST: &str = "first-key-0123456789";
const SECOND: &str = "second-key-0123456789";

/// A coordinator with these flags, and a worker.
fn launch(container: &Path, args: &[&str]) -> Cluster {
    Cluster::launch(&ClusterOptions {
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        ..ClusterOptions::new(container, 1)
    })
}

/// Tokenizes with a header, or without one.
fn tokenize(cluster: &Cluster, header: Option<&str>) -> Result<Vec<u32>, Status> {
    cluster.block_on(async {
        let mut client = client::connect(cluster.port).await?;
        let text =
            TokenizeRequest { input: Some(Input::Text("a".to_owned())), ..Default::default() };
        let mut request = Request::new(text);
        if let Some(header) = header {
            request.metadata_mut().insert("authorization", header.parse().unwrap());
        }
        Ok(client.tokenize(request).await?.into_inner().token_ids)
    })
}

fn check_key(cluster: &Cluster, header: Option<&str>, refused: Option<&str>) {
    match (tokenize(cluster, header), refused) {
        (Ok(ids), None) => assert!(!ids.is_empty()),
        (Err(status), Some(reason)) => {
            assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
            assert_eq!(status::reason(&status).as_deref(), Some(reason), "{status:?}");
        }
        (found, _) => panic!("{header:?} gives {found:?}, not {refused:?}"),
    }
}

#[test]
fn calls_need_a_key_and_health_does_not() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let files = TempDir::new().unwrap();
    let keys = files.path().join("keys");
    fs::write(&keys, format!("# of the test\nalice:{FIRST}\n")).unwrap();
    let cluster =
        launch(&container, &["--api-keys", &flag(&keys), "--metrics-listen", "127.0.0.1:0"]);
    let bearer = |key: &str| format!("Bearer {key}");
    check_key(&cluster, Some(&bearer(FIRST)), None);
    check_key(&cluster, None, Some("MISSING_API_KEY"));
    check_key(&cluster, Some(FIRST), Some("MISSING_API_KEY"));
    check_key(&cluster, Some(&bearer(SECOND)), Some("UNKNOWN_API_KEY"));
    check_key(&cluster, Some(&bearer("alice")), Some("UNKNOWN_API_KEY"));
    let page = cluster.coordinator.page("/metrics");
    for expected in ["reason=\"missing_key\"} 2", "reason=\"unknown_key\"} 2"] {
        let line = format!("shimmer_coordinator_calls_refused_total{{{expected}");
        assert!(page.contains(&line), "{page}");
    }
    cluster.block_on(async {
        let uri = format!("http://127.0.0.1:{}", cluster.port);
        let endpoint = tonic::transport::Endpoint::from_shared(uri).unwrap();
        let mut health = HealthClient::new(endpoint.connect().await.unwrap());
        health.check(HealthCheckRequest { service: String::new() }).await.unwrap();
    });

    // Rotated: both for a while, then the new one alone.
    fs::write(&keys, format!("alice:{FIRST}\nalice:{SECOND}\n")).unwrap();
    wait_until("the new key to be known", SOON, || {
        tokenize(&cluster, Some(&bearer(SECOND))).is_ok()
    });
    check_key(&cluster, Some(&bearer(FIRST)), None);
    fs::write(&keys, format!("alice:{SECOND}\n")).unwrap();
    wait_until("the old key to be withdrawn", SOON, || {
        tokenize(&cluster, Some(&bearer(FIRST))).is_err()
    });
    check_key(&cluster, Some(&bearer(SECOND)), None);
    // A broken file lets nobody in who was not, and nobody out who was.
    fs::write(&keys, "short\n").unwrap();
    wait_until("the broken file to be seen", SOON, || {
        check_key(&cluster, Some(&bearer(SECOND)), None);
        cluster.coordinator.log().contains("line 1: the key has 5 characters")
    });
    check_key(&cluster, Some(&bearer(FIRST)), Some("UNKNOWN_API_KEY"));
}

#[test]
fn commands_show_their_key_over_tls() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let files = TempDir::new().unwrap();
    let authority = Authority::new("public");
    let member = authority.issue(&files.path().join("server"));
    let [keys, key] = ["keys", "key"].map(|name| files.path().join(name));
    fs::write(&keys, format!("{FIRST}\n")).unwrap();
    fs::write(&key, format!("me:{FIRST}\n")).unwrap();
    let (cert, secret) = (member.file("cert.pem"), member.file("key.pem"));
    let flags = ["--api-keys", &flag(&keys), "--api-tls-cert", &cert, "--api-tls-key", &secret];
    let cluster = launch(&container, &flags);
    let (ca, key) = (member.file("ca.pem"), flag(&key));
    let endpoint = format!("https://localhost:{}", cluster.port);
    let ask = |endpoint: &str, more: &[&str], envs: &[(&str, &str)]| {
        run(&[&["tokenize", "a", "--endpoint", endpoint][..], more].concat(), envs)
    };
    let (code, ids, error) = ask(&endpoint, &["--ca", &ca, "--api-key-file", &key], &[]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(!ids.trim().is_empty());
    let by_variable = ask(&endpoint, &["--ca", &ca], &[("SHIMMER_API_KEY", FIRST)]);
    assert_eq!(by_variable, (0, ids, String::new()));

    let stranger = Authority::new("another").issue(&files.path().join("stranger"));
    let other = stranger.file("ca.pem");
    let plain = format!("localhost:{}", cluster.port);
    for (endpoint, more, code, expected) in [
        (&endpoint, &["--ca", &ca][..], 1, "UNAUTHENTICATED: this server asks for an API key"),
        (&endpoint, &[], 2, "needs --ca"),
        (&endpoint, &["--ca", &other], 1, "not signed by the authority that is trusted here"),
        (&plain, &["--api-key-file", &key], 1, "this port speaks TLS only"),
    ] {
        let (found, _, error) = ask(endpoint, more, &[]);
        assert_eq!(found, code, "{error}");
        assert!(error.contains(expected), "{error}");
    }
    wait_for_line(&cluster.coordinator, "the peer speaks plaintext, this port TLS");
}

#[test]
fn a_tls_client_of_a_plaintext_port_hears_why() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let files = TempDir::new().unwrap();
    let ca = Authority::new("any").issue(files.path()).file("ca.pem");
    let cluster = launch(&container, &[]);
    let endpoint = format!("https://localhost:{}", cluster.port);
    let (code, _, error) = run(&["tokenize", "a", "--endpoint", &endpoint, "--ca", &ca], &[]);
    assert_eq!(code, 1);
    assert!(error.contains("the peer does not speak TLS"), "{error}");
    wait_for_line(&cluster.coordinator, "the peer speaks TLS, this port plaintext");
}

#[test]
fn keys_in_plaintext_beyond_loopback_are_warned_of() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let files = TempDir::new().unwrap();
    let keys = files.path().join("keys");
    fs::write(&keys, format!("{FIRST}\n")).unwrap();
    // Later flags win, so that this listens on every address.
    let open = launch(&container, &["--api-keys", &flag(&keys), "--metrics-listen", "127.0.0.1:0"]);
    assert!(!open.coordinator.log().contains("API keys travel in plaintext"), "loopback only");
    drop(open);
    let directory = TempDir::new().unwrap();
    let none: [(&'static str, &str); 0] = [];
    let (container, keys) = (flag(&container), flag(&keys));
    let flags =
        ["serve", "--container", &container, "--workers", "127.0.0.1:1", "--listen", "0.0.0.0:0"];
    let flags = [&flags[..], &["--api-keys", &keys]].concat();
    let open = shimmer_tests::process::Process::shimmer("open", &flags, none, directory.path());
    wait_for_line(&open, "API keys travel in plaintext");
}

#[test]
fn connections_beyond_the_limit_hear_why_and_come_back() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let files = TempDir::new().unwrap();
    let authority = Authority::new("public");
    let member = authority.issue(files.path());
    let tls =
        ["--api-tls-cert", &member.file("cert.pem"), "--api-tls-key", &member.file("key.pem")]
            .map(str::to_owned);
    let client_tls = ClientTls::public(member.directory.join("ca.pem")).unwrap();
    for (flags, dialer) in
        [(Vec::new(), Dialer::plaintext()), (tls.to_vec(), Dialer::tls(client_tls))]
    {
        let mut args = vec!["--max-connections", "2", "--metrics-listen", "127.0.0.1:0"];
        args.extend(flags.iter().map(String::as_str));
        let cluster = launch(&container, &args);
        let address = format!("localhost:{}", cluster.port).parse().unwrap();
        let call = || {
            cluster.block_on(async {
                let channel = dialer
                    .connect(&address, SOON)
                    .await
                    .map_err(|error| Status::unavailable(error.to_string()))?;
                let mut client = client::Client::new(channel);
                client.get_model(GetModelRequest {}).await?;
                Ok::<_, Status>(client)
            })
        };
        let first = call().unwrap();
        let second = call().unwrap();
        let refused = call().unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
        assert!(status::told(&refused).contains("limit of 2 connections"), "{refused:?}");
        drop(second);
        let third = wait_for("a free seat", SOON, || call().ok());
        drop((first, third));
        let page = cluster.coordinator.page("/metrics");
        assert!(page.contains("shimmer_coordinator_connections_closed_total{reason=\"limit\"}"));
        let line = "shimmer_coordinator_connections_closed_total{reason=\"limit\"} 0";
        assert!(!page.contains(line), "{page}");
    }
}

#[test]
fn silent_connections_give_their_seats_back() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let cluster = launch(&container, &["--max-connections", "3"]);
    let silent: Vec<TcpStream> =
        (0..3).map(|_| TcpStream::connect(("127.0.0.1", cluster.port)).unwrap()).collect();
    wait_for("a seat to be free", SOON + Duration::from_secs(5), || tokenize(&cluster, None).ok());
    wait_for_line(&cluster.coordinator, "no handshake within 5000 ms");
    drop(silent);
}
