use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::TcpStream,
    process::{Command, Stdio},
};

use shimmer_coordinator::{
    dispatch::WorkerStats,
    engine::EngineStats,
    metrics::{CoordinatorCollector, CoordinatorReport, ReportedWorker, VllmCollector},
};
use shimmer_worker::metrics::{WorkerCollector, WorkerReport};

use super::*;
use crate::traces::TraceCollector;

fn worker_text() -> String {
    encode(&registry(WorkerCollector(WorkerReport::default)))
}

/// With two workers, one of them with a name that must be escaped.
fn coordinator_text() -> String {
    encode(&registry(CoordinatorCollector(|| {
        let worker = |endpoint: &str| ReportedWorker {
            endpoint: endpoint.to_owned(),
            state: "serving".to_owned(),
            ..ReportedWorker::default()
        };
        CoordinatorReport {
            engine: EngineStats {
                workers: vec![WorkerStats::default(); 2],
                ..EngineStats::default()
            },
            workers: vec![worker("a:50052"), worker("\"b\\:1")],
            ..CoordinatorReport::default()
        }
    })))
}

fn membership_text() -> String {
    let view = tokio::sync::watch::Sender::default();
    encode(&registry(MembershipCollector(view.subscribe())))
}

fn vllm_text() -> String {
    let stats = EngineStats::default;
    encode(&registry(VllmCollector { model_name: "a \"model\"".to_owned(), stats }))
}

/// With certificates, so that they are shown.
fn process_text() -> String {
    let process = ProcessCollector::new("worker")
        .with_end("member", Box::new(|| Some(1_800_000_000)))
        .with_end("api", Box::new(|| None));
    encode(&registry(process))
}

fn encode(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_text::encode(&mut text, registry).unwrap();
    text
}

/// A row of the document for every family of a page: name, type, unit, labels, meaning.
fn rows(text: &str) -> Vec<String> {
    let mut rows = Vec::new();
    for block in text.split("# HELP ").skip(1) {
        let (name, help) = block.lines().next().unwrap().split_once(' ').unwrap();
        let kind = block.lines().nth(1).unwrap().rsplit_once(' ').unwrap().1;
        let unit = ["seconds", "bytes"].into_iter().find(|unit| name.contains(&format!("_{unit}")));
        let labels: BTreeSet<&str> = block
            .lines()
            .skip(2)
            .filter_map(|line| line.split_once('{')?.1.rsplit_once('}'))
            .flat_map(|(labels, _)| labels.split(','))
            .filter_map(|label| Some(label.split_once('=')?.0))
            .filter(|label| *label != "le")
            .collect();
        let labels: Vec<String> = labels.into_iter().map(|label| format!("`{label}`")).collect();
        let unit = unit.unwrap_or("count");
        rows.push(format!("| `{name}` | {kind} | {unit} | {} | {help} |", labels.join(", ")));
    }
    rows
}

#[test]
fn the_document_has_every_metric() {
    let document = include_str!("../../../docs/METRICS.md");
    let pages = [
        ("Worker", worker_text()),
        ("Coordinator", coordinator_text()),
        ("For gateways", vllm_text()),
        ("Membership", membership_text()),
        ("Process", process_text()),
        ("Traces", encode(&registry(TraceCollector(Arc::default())))),
    ];
    for (heading, text) in pages {
        let section = document
            .split("\n## ")
            .find(|part| part.lines().next() == Some(heading))
            .unwrap_or_else(|| panic!("no section {heading}"));
        let found: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
        let expected = rows(&text);
        assert_eq!(found, expected, "{heading}:\n{}", expected.join("\n"));
    }
}

/// `promtool check metrics` is what Prometheus itself says about names, units and help. ./test installs it.
#[test]
fn promtool_finds_nothing_to_say() {
    let pages = [worker_text(), coordinator_text(), membership_text(), process_text(), vllm_text()];
    for text in pages {
        let tool = Command::new("promtool")
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        // Without the tool there is nothing to ask; ./test names what it skips.
        let Ok(mut tool) = tool else { return };
        tool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = tool.wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        // The names of others are what their readers look for, colon and all.
        let theirs = |line: &str| line.starts_with("vllm:") && line.ends_with("contain ':'");
        let ours: Vec<&str> = said.lines().filter(|line| !theirs(line)).collect();
        assert!(ours.is_empty(), "{said}");
        assert!(output.status.success() || said.contains("vllm:"), "{said}");
    }
}

/// A page in a thread of this test.
struct Served {
    address: SocketAddr,
    shown: Shown,
    _runtime: tokio::runtime::Runtime,
}

fn page(ready: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Page {
    Page {
        registry: registry(WorkerCollector(WorkerReport::default)),
        json: Box::new(|| serde_json::json!(WorkerReport::default())),
        ready: Box::new(ready),
    }
}

impl Served {
    /// Serves nothing yet, as while a container is loaded.
    fn loading(limits: Limits) -> Self {
        let listener = shimmer_worker::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shown = Shown { page: Arc::default(), asked: CancellationToken::new() };
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let serving = shown.clone();
        runtime.spawn(async move {
            serve(TcpListener::from_std(listener).unwrap(), serving, limits).await;
        });
        Self { address, shown, _runtime: runtime }
    }

    fn start(limits: Limits) -> Self {
        let served = Self::loading(limits);
        assert!(served.shown.page.set(page(|| Ok(()))).is_ok());
        served
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        socket
    }

    /// Everything that comes back for these bytes.
    fn say(&self, request: &str) -> String {
        let mut socket = self.connect();
        socket.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    }
}

fn check(request: &str, status: &str, within: &str) {
    let answer = Served::start(LIMITS).say(request);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{request:?}: {head}");
    assert!(body.contains(within) && body.is_empty() == within.is_empty(), "{request:?}: {body}");
}

#[test]
fn requests_get_the_page_or_a_status() {
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let closing = |path: &str, method: &str| {
        format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    };
    check(&get("/metrics"), "200", "# TYPE shimmer_worker_work_total counter");
    check(&get("/metrics?format=x"), "200", "shimmer_expert_hits_total{tier=\"pinned\"} 0");
    check(&get("/metrics.json"), "200", "\"hits_pinned\":0");
    check(&closing("/metrics", "HEAD"), "200", "");
    check(&closing("/metrics", "POST"), "405", "");
    check(&closing("/", "GET"), "404", "");
    check(&closing("/metrics/../etc/passwd", "GET"), "404", "");
    check("\u{16}\u{3}\u{1} no request\r\n\r\n", "400", "");
    check(&closing(&"/x".repeat(200_000), "GET"), "4", "");
}

#[test]
fn slow_and_silent_clients_hold_nothing_for_long() {
    let limits = Limits { connections: 2, time: Duration::from_millis(300) };
    let page = Served::start(limits);
    let mut silent = [page.connect(), page.connect(), page.connect()];
    silent[1].write_all(b"GET /metrics HTTP/1.1\r\nHo").unwrap();
    let answer = page.say("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for socket in &mut silent {
        let mut rest = Vec::new();
        // A reset closes as well.
        drop(socket.read_to_end(&mut rest));
        assert!(rest.is_empty());
    }
}

#[test]
fn a_process_lives_from_its_start_and_is_ready_while_it_works() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let served = Served::loading(LIMITS);
    let ask = |path: &str| {
        let answer = served.say(&format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().to_owned(), body.trim_end().to_owned())
    };
    let is = |path: &str, status: &str, text: &str| {
        assert_eq!(ask(path), (status.to_owned(), text.to_owned()), "{path}");
    };
    // While the container is loaded: alive, and nothing else.
    is("/livez", "200", "alive");
    is("/readyz", "503", LOADING);
    is("/metrics", "503", LOADING);
    is("/metrics.json", "503", LOADING);
    // What is shown decides, at every question.
    let works = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&works);
    let ready = move || match asked.load(Ordering::SeqCst) {
        true => Ok(()),
        false => Err("no workers".to_owned()),
    };
    assert!(served.shown.page.set(page(ready)).is_ok());
    is("/livez", "200", "alive");
    is("/readyz", "503", "no workers");
    works.store(true, Ordering::SeqCst);
    is("/readyz", "200", "ready");
    assert_eq!(ask("/metrics").0, "200");
    // After a signal it is not ready at once, whatever still runs, and lives until its end.
    served.shown.asked.cancel();
    is("/readyz", "503", "draining: this process was asked to stop");
    is("/livez", "200", "alive");
    assert_eq!(ask("/metrics").0, "200");
}
