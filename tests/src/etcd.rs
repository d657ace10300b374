//! Real etcd processes: one node or three, on addresses of this test's own.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use tempfile::TempDir;

use crate::{process::Process, wait::wait_until};

/// Ports of nodes that have a host of their own.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// For a node to answer on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// Whether this machine has etcd and its command; says so if not.
#[expect(clippy::print_stdout, reason = "what was skipped is for the person who reads the output")]
pub fn available() -> bool {
    let missing: Vec<_> = ["etcd", "etcdctl"]
        .into_iter()
        .filter(|program| {
            !Command::new(program).arg("--help").output().is_ok_and(|o| o.status.success())
        })
        .collect();
    if !missing.is_empty() {
        println!(
            "skipped: {} not installed (Debian: etcd-server, etcd-client)",
            missing.join(" and ")
        );
    }
    missing.is_empty()
}

/// Certificates for nodes that ask clients for theirs.
#[derive(Debug, Clone)]
pub struct NodeTls {
    pub ca: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// An etcd cluster; dropping it ends every node.
#[derive(Debug)]
pub struct Etcd {
    nodes: Vec<Node>,
    tls: Option<NodeTls>,
    /// Arguments of etcdctl beyond the address: a user, certificates.
    ctl: Vec<String>,
    directory: TempDir,
}

#[derive(Debug)]
struct Node {
    name: String,
    host: String,
    client_port: u16,
    peer_port: u16,
    /// What stands before its command; nothing on this host.
    entry: Vec<String>,
    process: Option<Process>,
}

/// Clusters of this process, which have different hosts.
static STARTED: AtomicU16 = AtomicU16::new(0);

impl Etcd {
    /// Starts `count` nodes and waits until they answer.
    ///
    /// # Panics
    /// A node ends or does not answer.
    pub fn start(count: usize) -> Self {
        Self::start_with(count, |_, _| None)
    }

    /// Starts a node on each of these hosts: its address, and what stands before a command that is to run there.
    ///
    /// # Panics
    /// A node ends or does not answer.
    pub fn start_on(hosts: impl IntoIterator<Item = (String, Vec<String>)>) -> Self {
        let nodes = hosts.into_iter().enumerate().map(|(index, (host, entry))| Node {
            name: format!("e{index}"),
            host,
            client_port: CLIENT_PORT,
            peer_port: PEER_PORT,
            entry,
            process: None,
        });
        Self::run(nodes.collect(), |_, _| None)
    }

    /// [`start`](Self::start) with certificates, made for these hosts in this directory.
    ///
    /// # Panics
    /// A node ends or does not answer.
    pub fn start_with(
        count: usize,
        certificates: impl FnOnce(&[String], &Path) -> Option<NodeTls>,
    ) -> Self {
        let started = STARTED.fetch_add(1, Ordering::Relaxed);
        let nodes: Vec<Node> = (0..count)
            .map(|index| {
                // Addresses of loopback that no other test uses: ports that are free here stay free.
                let pid = process::id();
                let [_, _, high, low] = pid.to_be_bytes();
                let last = usize::from(started) * 4 + index + 1;
                let host = format!("127.{}.{low}.{}", 1 + high % 250, last % 250 + 1);
                let [client_port, peer_port] = free_ports(&host);
                let (name, entry) = (format!("e{index}"), Vec::new());
                Node { name, host, client_port, peer_port, entry, process: None }
            })
            .collect();
        Self::run(nodes, certificates)
    }

    fn run(
        nodes: Vec<Node>,
        certificates: impl FnOnce(&[String], &Path) -> Option<NodeTls>,
    ) -> Self {
        let directory = TempDir::new().expect("a temporary directory can be made");
        let hosts: Vec<String> = nodes.iter().map(|node| node.host.clone()).collect();
        let tls = certificates(&hosts, directory.path());
        let ctl = tls.iter().flat_map(|tls| {
            [("--cacert", &tls.ca), ("--cert", &tls.certificate), ("--key", &tls.key)]
                .map(|(flag, path)| format!("{flag}={}", path.display()))
        });
        let mut etcd = Self { nodes, ctl: ctl.collect(), tls, directory };
        for index in 0..etcd.nodes.len() {
            etcd.launch(index);
        }
        etcd.wait_until_healthy();
        etcd
    }

    /// What members are told: the addresses of all nodes.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(|node| self.url(node)).collect()
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// There is always one.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Kills a node at once.
    pub fn kill(&mut self, index: usize) {
        if let Some(mut process) = self.nodes[index].process.take() {
            process.kill();
        }
    }

    /// Kills every node.
    pub fn kill_all(&mut self) {
        (0..self.nodes.len()).for_each(|index| self.kill(index));
    }

    /// Starts every killed node, and waits until all of them answer.
    ///
    /// # Panics
    /// A node ends or does not answer.
    pub fn restart_all(&mut self) {
        for index in 0..self.nodes.len() {
            if self.nodes[index].process.is_none() {
                self.launch(index);
            }
        }
        self.wait_until_healthy();
    }

    /// Kills every node and removes its data; the next start makes a new cluster on the same addresses.
    ///
    /// # Panics
    /// The data cannot be removed.
    pub fn wipe(&mut self) {
        self.kill_all();
        for index in 0..self.nodes.len() {
            std::fs::remove_dir_all(self.data(index)).expect("the data of a node that has run");
        }
    }

    /// Sends a signal to a node, for example "STOP" or "CONT".
    ///
    /// # Panics
    /// It does not run.
    pub fn signal(&self, index: usize, signal: &str) {
        self.nodes[index].process.as_ref().expect("it runs").signal(signal);
    }

    /// The node that leads.
    ///
    /// # Panics
    /// There is none within the time.
    pub fn leader(&self) -> usize {
        crate::wait::wait_for("a leader of etcd", START_DEADLINE, || {
            let index_of = |node: &Node| {
                let status =
                    self.try_ctl(&self.url(node), &["endpoint", "status", "-w", "json"])?;
                let status: serde_json::Value = serde_json::from_str(&status).ok()?;
                let status = &status[0]["Status"];
                (status["leader"] == status["header"]["member_id"]).then_some(())
            };
            self.nodes.iter().position(|node| node.process.is_some() && index_of(node).is_some())
        })
    }

    /// Runs `etcdctl ARGS` against all nodes; its output.
    ///
    /// # Panics
    /// The command fails.
    pub fn ctl(&self, args: &[&str]) -> String {
        let urls = self.urls().join(",");
        self.try_ctl(&urls, args).unwrap_or_else(|| panic!("`etcdctl {}` failed", args.join(" ")))
    }

    /// Makes etcdctl act as a user from here on.
    pub fn act_as(&mut self, user: &str, password: &str) {
        self.ctl.push(format!("--user={user}:{password}"));
    }

    /// Where logs lie, and whatever else a test needs a place for.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn try_ctl(&self, urls: &str, args: &[&str]) -> Option<String> {
        let output = Command::new("etcdctl")
            .args(["--endpoints", urls, "--command-timeout=3s"])
            .args(&self.ctl)
            .args(args)
            .env("ETCDCTL_API", "3")
            .output()
            .ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    fn url(&self, node: &Node) -> String {
        format!("{}://{}:{}", self.scheme(), node.host, node.client_port)
    }

    fn data(&self, index: usize) -> PathBuf {
        self.directory.path().join(&self.nodes[index].name)
    }

    fn launch(&mut self, index: usize) {
        let peer = |node: &Node| format!("http://{}:{}", node.host, node.peer_port);
        let cluster: Vec<_> =
            self.nodes.iter().map(|node| format!("{}={}", node.name, peer(node))).collect();
        let node = &self.nodes[index];
        let url = self.url(node);
        let mut words = node.entry.iter().map(String::as_str).chain(["etcd"]);
        let mut command = Command::new(words.next().expect("there is always the program"));
        command
            .args(words)
            .args(["--name", &node.name, "--data-dir"])
            .arg(self.data(index))
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer(node)])
            .args(["--initial-advertise-peer-urls", &peer(node)])
            .args(["--initial-cluster", &cluster.join(",")])
            // Elections as etcd comes; what this machine writes need not outlive it.
            .arg("--unsafe-no-fsync");
        if let Some(tls) = &self.tls {
            command
                .arg("--client-cert-auth")
                .arg("--trusted-ca-file")
                .arg(&tls.ca)
                .arg("--cert-file")
                .arg(&tls.certificate)
                .arg("--key-file")
                .arg(&tls.key);
        }
        let process = Process::spawn(&format!("log-{}", node.name), command, self.directory.path());
        self.nodes[index].process = Some(process);
    }

    /// Waits until every node answers and takes part.
    ///
    /// # Panics
    /// One has ended, or does not within the time.
    pub fn wait_until_healthy(&mut self) {
        let urls = self.urls().join(",");
        wait_until("etcd to answer", START_DEADLINE, || {
            for node in &mut self.nodes {
                if let Some(status) = node.process.as_mut().and_then(Process::ended) {
                    panic!("{} of etcd ended with {status}", node.name);
                }
            }
            self.try_ctl(&urls, &["endpoint", "health"]).is_some()
        });
    }
}

fn free_ports(host: &str) -> [u16; 2] {
    let listeners =
        [0; 2].map(|_| TcpListener::bind((host, 0)).expect("every 127.x.y.z is this machine"));
    listeners.map(|listener| listener.local_addr().expect("a bound listener").port())
}
