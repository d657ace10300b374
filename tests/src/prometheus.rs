//! A real Prometheus that scrapes the pages of a test's processes.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    process::Command,
    time::Duration,
};

use serde_json::Value;
use tempfile::TempDir;

use crate::{process::Process, wait::wait_until};

/// To start, and to answer, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Whether this machine has Prometheus; says so if not.
#[expect(clippy::print_stdout, reason = "what was skipped is for the person who reads the output")]
pub fn available() -> bool {
    let found =
        Command::new("prometheus").arg("--version").output().is_ok_and(|o| o.status.success());
    if !found {
        println!("skipped: prometheus is not installed (Debian: prometheus)");
    }
    found
}

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct Prometheus {
    process: Process,
    port: u16,
    _directory: TempDir,
}

impl Prometheus {
    /// Starts a server that scrapes `targets` every second, as one job, and evaluates the rules of these files.
    ///
    /// # Panics
    /// It does not come up.
    pub fn start(targets: &[String], rules: &[&Path]) -> Self {
        let directory = TempDir::new().expect("a temporary directory can be made");
        // JSON is YAML; the file is written by nobody else.
        let config = serde_json::json!({
            "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
            "rule_files": rules,
            "scrape_configs": [{ "job_name": "shimmer", "static_configs": [{ "targets": targets }] }],
        });
        let file = directory.path().join("prometheus.yaml");
        fs::write(&file, config.to_string()).expect("a file of the test can be written");
        let port = free_port();
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        let process = Process::spawn("prometheus", command, directory.path());
        let mut server = Self { process, port, _directory: directory };
        wait_until("Prometheus to be ready", DEADLINE, || {
            let ended = server.process.ended();
            assert!(ended.is_none(), "Prometheus ended:\n{}", server.process.log());
            server.ask("GET", "/-/ready", "").is_ok_and(|(status, _)| status == 200)
        });
        server
    }

    /// The result of a query at this moment: its series.
    ///
    /// # Errors
    /// What Prometheus says that is wrong with it.
    ///
    /// # Panics
    /// Prometheus does not answer.
    pub fn query(&self, query: &str) -> Result<Vec<Value>, String> {
        let answer = self.api("POST", "/api/v1/query", &format!("query={}", encoded(query)));
        match answer["status"].as_str() {
            Some("success") => Ok(match &answer["data"]["result"] {
                Value::Array(series) if answer["data"]["resultType"] == "vector" => series.clone(),
                other => vec![other.clone()],
            }),
            _ => Err(answer["error"].to_string()),
        }
    }

    /// The value of a query that has one series.
    ///
    /// # Panics
    /// It has none, or several.
    pub fn value(&self, query: &str) -> Option<f64> {
        let series = self.query(query).unwrap_or_else(|error| panic!("{query}: {error}"));
        assert!(series.len() < 2, "{query}: {series:?}");
        let value = series.first()?["value"][1].as_str()?;
        Some(value.parse().expect("a value is a number"))
    }

    /// What a path of its interface answers.
    ///
    /// # Panics
    /// Prometheus does not answer.
    pub fn get(&self, path: &str) -> Value {
        self.api("GET", path, "")
    }

    fn api(&self, method: &str, path: &str, body: &str) -> Value {
        let (_, body) = self
            .ask(method, path, body)
            .unwrap_or_else(|error| panic!("{path}: {error}\n{}", self.process.log()));
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
    }

    /// Status and body. HTTP/1.0, so that the body comes in one piece.
    fn ask(&self, method: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
        let mut socket = TcpStream::connect(("127.0.0.1", self.port))?;
        socket.set_read_timeout(Some(DEADLINE))?;
        let length = body.len();
        write!(
            socket,
            "{method} {path} HTTP/1.0\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.ok_or(io::ErrorKind::InvalidData)?, body.to_owned()))
    }
}

/// As a form sends it.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let byte =
        |byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(byte).collect()
}

/// Prometheus does not say which port it was given, so it is told one that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
    listener.local_addr().expect("it is bound").port()
}
