use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, date_time_ymd,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
};

use super::{
    AcceptError, Acceptor, DialError, Dialer, Keepalive, PeerStream, TlsFiles, TlsIdentity,
};
use crate::{
    address::PeerAddress,
    channel,
    tls::{ClientTls, ServerTls},
    v1::{GetModelRequest, inference_service_client::InferenceServiceClient},
};

const SOON: Duration = Duration::from_secs(20);

/// An authority with a directory for what it issues.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: TempDir,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let directory = TempDir::new().unwrap();
        fs::write(directory.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, directory }
    }

    fn ca(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    fn issue(&self, name: &str) -> TlsFiles {
        self.issue_as(name, |_| {})
    }

    /// A certificate for loopback, changed before it is signed.
    fn issue_as(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> TlsFiles {
        let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
        let mut params = CertificateParams::new(names).unwrap();
        change(&mut params);
        let pair = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&pair, &self.issuer).unwrap();
        let files = TlsFiles {
            ca: self.ca(),
            cert: self.directory.path().join(format!("{name}.pem")),
            key: self.directory.path().join(format!("{name}.key")),
        };
        fs::write(&files.cert, certificate.pem()).unwrap();
        fs::write(&files.key, pair.serialize_pem()).unwrap();
        files
    }
}

/// What loading the files says.
fn check_files(files: &TlsFiles, named: &Path, expected: &str) {
    let error = TlsIdentity::load(files).unwrap_err();
    assert_eq!(error.file, named, "{error}");
    assert!(error.reason.contains(expected), "{error}");
}

#[test]
fn errors_name_the_file_and_what_is_wrong() {
    let authority = Authority::new("one");
    let good = authority.issue("good");
    TlsIdentity::load(&good).unwrap();

    let gone = authority.directory.path().join("gone");
    let files = TlsFiles { ca: gone.clone(), ..good.clone() };
    check_files(&files, &gone, "No such file");
    let files = TlsFiles { cert: good.key.clone(), ..good.clone() };
    check_files(&files, &good.key, "no certificate in it; it holds a key");
    let files = TlsFiles { key: good.cert.clone(), ..good.clone() };
    check_files(&files, &good.cert, "no private key in it");
    let other = authority.issue("other");
    let files = TlsFiles { key: other.key.clone(), ..good.clone() };
    check_files(&files, &other.key, "the key does not fit the certificate in");

    let old = authority.issue_as("old", |params| {
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2021, 2, 3);
    });
    check_files(&old, &old.cert, "expired at 2021-02-03 00:00:00 UTC; it is 20");
    let early = authority.issue_as("early", |params| {
        params.not_before = date_time_ymd(3000, 1, 1);
    });
    check_files(&early, &early.cert, "valid from 3000-01-01 00:00:00 UTC on");
    let stranger = Authority::new("two");
    let files = TlsFiles { ca: stranger.ca(), ..good.clone() };
    check_files(&files, &good.cert, "not signed by the authority");
    let half = authority.issue_as("half", |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    check_files(&half, &half.cert, "needs the extended key usages serverAuth and clientAuth");

    let broken = authority.directory.path().join("broken");
    for (content, expected) in [
        ("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "well-formed PEM"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "damaged"),
        ("", "no certificate in it; a PEM file"),
    ] {
        fs::write(&broken, content).unwrap();
        let files = TlsFiles { cert: broken.clone(), ..good.clone() };
        check_files(&files, &broken, expected);
    }
    fs::write(&broken, "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n").unwrap();
    let files = TlsFiles { key: broken.clone(), ..good };
    check_files(&files, &broken, "the key is encrypted");
}

#[test]
fn the_end_of_a_certificate_is_known_and_follows_its_file() {
    const YEAR_2040: u64 = 2_208_988_800;
    let authority = Authority::new("one");
    let until = |year| {
        move |params: &mut CertificateParams| {
            params.not_after = date_time_ymd(year, 1, 1);
        }
    };
    let files = authority.issue_as("it", until(2040));
    let member = TlsIdentity::load(&files).unwrap().server();
    assert_eq!(member.not_after(), Some(YEAR_2040));
    let public = ServerTls::public(files.cert, files.key).unwrap();
    assert_eq!(public.not_after(), Some(YEAR_2040));
    authority.issue_as("it", until(2041));
    let deadline = Instant::now() + SOON;
    // Files are looked at once a second.
    while member.not_after() != Some(YEAR_2040 + 366 * 86_400) {
        assert!(Instant::now() < deadline, "{:?}", member.not_after());
        std::thread::yield_now();
    }
}

/// How the connections of a listener ended, which lives as long as this.
struct Ends {
    ends: mpsc::Receiver<Result<(), AcceptError>>,
    _tasks: JoinSet<()>,
}

impl Ends {
    async fn next(&mut self) -> Result<(), AcceptError> {
        tokio::time::timeout(SOON, self.ends.recv()).await.expect("an end").expect("a listener")
    }
}

/// A listener that answers one connection after the other, and what each became.
async fn listen(tls: Option<ServerTls>, limit: Duration) -> (PeerAddress, Ends) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string().parse().unwrap();
    // More than any test connects: not all of them listen to what became of each.
    let (ended, ends) = mpsc::channel(1024);
    let acceptor = Acceptor::new(tls, limit);
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let end = match acceptor.accept(socket).await {
                Ok(stream) => {
                    serve(stream).await;
                    Ok(())
                }
                Err(error) => Err(error),
            };
            if ended.send(end).await.is_err() {
                return;
            }
        }
    });
    (address, Ends { ends, _tasks: tasks })
}

/// HTTP/2 without any service, until the client goes.
async fn serve(stream: PeerStream) {
    let one = tokio_stream::once(Ok::<_, std::io::Error>(stream));
    let router = channel::server_builder().add_routes(tonic::service::Routes::default());
    router.serve_with_incoming(one).await.unwrap();
}

/// What a dialer and a listener make of each other.
async fn meet(
    server: Option<ServerTls>,
    client: Option<ClientTls>,
) -> (Result<(), DialError>, Result<(), AcceptError>) {
    let (address, mut ends) = listen(server, SOON).await;
    let dialer = client.map_or_else(Dialer::plaintext, Dialer::tls);
    let dialled = dialer.connect(&address, SOON).await;
    let outcome = dialled.as_ref().map(|_| ()).map_err(|error| error.to_string());
    let kind = dialled.as_ref().err().map(|error| matches!(error, DialError::Tls(_)));
    drop(dialled);
    let accepted = ends.next().await;
    let dialled = outcome.map_err(|text| match kind {
        Some(true) => DialError::Tls(text),
        _ => DialError::Unreachable(text),
    });
    (dialled, accepted)
}

fn says<T, E: std::fmt::Display>(result: &Result<T, E>, expected: &str) {
    let text = result.as_ref().err().map_or_else(String::new, ToString::to_string);
    assert!(text.contains(expected), "{text:?} does not say {expected:?}");
}

#[tokio::test]
async fn members_know_each_other_and_nobody_else() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let load = |files: &TlsFiles| TlsIdentity::load(files).unwrap();
    let (one, two) = (load(&ours.issue("one")), load(&ours.issue("two")));
    let stranger = load(&theirs.issue("stranger"));

    let (dialled, accepted) = meet(Some(one.server()), Some(two.client())).await;
    dialled.unwrap();
    accepted.unwrap();

    // A server of another authority: the client refuses, and tells.
    let (dialled, accepted) = meet(Some(stranger.server()), Some(two.client())).await;
    says(&dialled, "TLS: the certificate is not signed by the authority that is trusted here");
    says(&accepted, "not signed by the authority that it trusts");

    // A client that trusts us and that we do not trust: only the server can tell, and the client hears it at once.
    let mixed = theirs.issue("mixed");
    fs::write(theirs.ca(), [theirs.issuer.pem(), ours.issuer.pem()].concat()).unwrap();
    let (dialled, accepted) = meet(Some(one.server()), Some(load(&mixed).client())).await;
    says(
        &dialled,
        "TLS: the peer refused the connection: the certificate that it got is not signed",
    );
    says(&accepted, "the certificate is not signed by the authority that is trusted here");

    // No certificate at all.
    let bare = ClientTls::public(ours.ca()).unwrap();
    let (_, accepted) = meet(Some(one.server()), Some(bare)).await;
    says(&accepted, "the peer showed no certificate");
}

#[tokio::test]
async fn a_port_for_clients_asks_for_no_certificate() {
    let authority = Authority::new("ours");
    let files = authority.issue("public");
    let server = ServerTls::public(files.cert, files.key).unwrap();
    let client = ClientTls::public(authority.ca()).unwrap();
    let (dialled, accepted) = meet(Some(server.clone()), Some(client)).await;
    dialled.unwrap();
    accepted.unwrap();
    let stranger = ClientTls::public(Authority::new("theirs").ca()).unwrap();
    let (dialled, _) = meet(Some(server), Some(stranger)).await;
    says(&dialled, "not signed by the authority that is trusted here");
}

#[tokio::test]
async fn plaintext_and_tls_tell_each_other_apart() {
    let authority = Authority::new("ours");
    let identity = TlsIdentity::load(&authority.issue("one")).unwrap();
    let (_, accepted) = meet(Some(identity.server()), None).await;
    says(&accepted, "the peer speaks plaintext, this port TLS");
    let (dialled, accepted) = meet(None, Some(identity.client())).await;
    says(&dialled, "TLS: the peer does not speak TLS");
    says(&accepted, "the peer speaks TLS, this port plaintext");
    let (dialled, accepted) = meet(None, None).await;
    dialled.unwrap();
    accepted.unwrap();
}

#[tokio::test]
async fn a_plaintext_peer_can_read_why_it_is_refused() {
    let authority = Authority::new("ours");
    let identity = TlsIdentity::load(&authority.issue("one")).unwrap();
    let (address, mut ends) = listen(Some(identity.server()), SOON).await;
    let mut socket = TcpStream::connect(address.to_string()).await.unwrap();
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer[..9], [0, 0, 0, 4, 0, 0, 0, 0, 0], "SETTINGS comes first");
    assert_eq!(answer[12], 7, "then GOAWAY");
    assert_eq!(answer[22..26], [0, 0, 0, 0xc], "INADEQUATE_SECURITY");
    assert!(String::from_utf8_lossy(&answer[26..]).contains("this port speaks TLS only"));
    drop(socket);
    says(&ends.next().await, "plaintext");
}

#[tokio::test]
async fn an_unfinished_handshake_ends_at_its_limit() {
    let authority = Authority::new("ours");
    let identity = TlsIdentity::load(&authority.issue("one")).unwrap();
    for (tls, begun) in [
        (Some(identity.server()), &[0x16, 3, 1, 2][..]),
        (Some(identity.server()), &[]),
        (None, &[]),
    ] {
        let (address, mut ends) = listen(tls, Duration::from_millis(100)).await;
        let mut socket = TcpStream::connect(address.to_string()).await.unwrap();
        socket.write_all(begun).await.unwrap();
        says(&ends.next().await, "no handshake within 100 ms");
        // Reset or closed; not left open.
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(SOON, socket.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "the socket is closed");
    }
}

#[tokio::test]
async fn a_server_that_never_answers_costs_a_client_its_limit() {
    let authority = Authority::new("ours");
    let identity = TlsIdentity::load(&authority.issue("one")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: PeerAddress = listener.local_addr().unwrap().to_string().parse().unwrap();
    let limit = Duration::from_millis(200);
    let dialled = Dialer::tls(identity.client()).connect(&address, limit).await;
    says(&dialled, "no answer within 200 ms");
    let ended = listener.accept().await.is_ok();
    assert!(ended, "somebody knocked");
}

#[tokio::test]
async fn the_name_of_the_address_must_be_in_the_certificate() {
    let authority = Authority::new("ours");
    let elsewhere = authority.issue_as("elsewhere", |params| {
        let names = vec!["worker-1.example".to_owned(), "10.0.0.7".to_owned()];
        params.subject_alt_names = CertificateParams::new(names).unwrap().subject_alt_names;
    });
    let server = TlsIdentity::load(&elsewhere).unwrap().server();
    let client = TlsIdentity::load(&authority.issue("client")).unwrap().client();
    let (dialled, _) = meet(Some(server), Some(client)).await;
    says(&dialled, "the certificate is not for 127.0.0.1: it names");
    says(&dialled, "worker-1.example");
}

#[tokio::test]
async fn new_files_count_from_the_next_connection_on() {
    let authority = Authority::new("ours");
    let (server, client) = (authority.issue("server"), authority.issue("client"));
    let identity = TlsIdentity::load(&server).unwrap();
    let members = TlsIdentity::load(&client).unwrap();
    let (address, _ends) = listen(Some(identity.server()), SOON).await;
    let dialer = Dialer::tls(members.client());
    drop(dialer.connect(&address, SOON).await.unwrap());
    // The server is given a certificate that is for another host, so that the change can be seen from outside.
    let other = authority.issue_as("other", |params| {
        let names = vec!["elsewhere.example".to_owned()];
        params.subject_alt_names = CertificateParams::new(names).unwrap().subject_alt_names;
    });
    fs::rename(&other.cert, &server.cert).unwrap();
    fs::rename(&other.key, &server.key).unwrap();
    let start = Instant::now();
    loop {
        match dialer.connect(&address, SOON).await {
            Err(DialError::Tls(text)) if text.contains("elsewhere.example") => break,
            Err(error) => panic!("{error}"),
            Ok(_) => assert!(start.elapsed() < SOON, "the new certificate is never shown"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn whoever_does_not_answer_probes_is_left() {
    // Its kernel accepts, and nothing ever reads.
    let stopped = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: PeerAddress = stopped.local_addr().unwrap().to_string().parse().unwrap();
    let moment = Duration::from_millis(50);
    // By the usual times the call would take longer than SOON.
    let dialer =
        Dialer::plaintext().with_keepalive(Keepalive { interval: moment, timeout: moment });
    let channel = dialer.connect(&address, SOON).await.unwrap();
    let mut client = InferenceServiceClient::new(channel);
    let asked = tokio::time::timeout(SOON, client.get_model(GetModelRequest {})).await;
    let status = asked.expect("the connection is given up").unwrap_err();
    assert!(status.details().is_empty(), "no server said this: {status:?}");
}
