//! Hosts, the bridge between them, and cuts.

use std::{
    ffi::OsStr,
    fs,
    io::Write as _,
    net::Ipv4Addr,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

/// Names of our namespaces begin with this.
const PREFIX: &str = "shimmer-lab";
/// Where `ip netns` keeps its names.
const NAMES: &str = "/run/netns";
/// Addresses of hosts end in 1 and up, that of this process in this.
const OUTSIDE: u8 = 254;
/// Hosts of one network.
pub const MAX_HOSTS: usize = 200;

/// Frames of which direction are lost. Nobody is told: there is no reset and no message of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Both.
    Both,
    /// What the host sends.
    From,
    /// What is sent to the host.
    To,
}

/// Some hosts that reach each other.
#[derive(Debug)]
pub struct Network {
    name: String,
    /// Interface of this process.
    uplink: String,
    /// First three bytes of all addresses.
    subnet: [u8; 3],
    hosts: usize,
}

impl Network {
    /// Makes `hosts` hosts.
    ///
    /// # Errors
    /// Why this machine cannot have them: usually that making namespaces is not allowed.
    ///
    /// # Panics
    /// There are more hosts than addresses.
    pub fn new(hosts: usize) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        assert!(hosts <= MAX_HOSTS, "{hosts} hosts, at most {MAX_HOSTS}");
        remove_left_behind();
        let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        // Of the private addresses, those that are least used elsewhere; each process and network has its own.
        let [_, _, high, low] = pid.wrapping_mul(7).wrapping_add(count).to_be_bytes();
        let network = Self {
            name: format!("{PREFIX}-{pid}-{count}"),
            uplink: format!("sl{pid}n{count}"),
            subnet: [10, 128 | high, low],
            hosts,
        };
        network.build()?;
        Ok(network)
    }

    fn build(&self) -> Result<(), String> {
        let bridge = self.bridge();
        ip(&["netns", "add", &bridge])?;
        ip(&["-n", &bridge, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", &bridge, "link", "set", "br0", "up"])?;
        for host in 0..self.hosts {
            let (namespace, port) = (self.namespace(host), port(host));
            let address = format!("{}/24", self.address(host));
            ip(&["netns", "add", &namespace])?;
            let pair = ["type", "veth", "peer", "name", "eth0", "netns", &namespace];
            ip(&[&["-n", &bridge, "link", "add", &port][..], &pair].concat())?;
            ip(&["-n", &bridge, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &namespace, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", &namespace, "link", "set", "eth0", "up"])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
        }
        let pair = ["type", "veth", "peer", "name", "outside", "netns", &bridge];
        ip(&[&["link", "add", &self.uplink][..], &pair].concat())?;
        ip(&["-n", &bridge, "link", "set", "outside", "master", "br0", "up"])?;
        ip(&["addr", "add", &format!("{}/24", self.outside()), "dev", &self.uplink])?;
        ip(&["link", "set", &self.uplink, "up"])?;
        self.rules(
            "add table bridge lab\nadd chain bridge lab cuts { type filter hook forward priority 0; }",
        )
    }

    /// Number of hosts.
    pub fn hosts(&self) -> usize {
        self.hosts
    }

    /// Address of a host.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        self.at(u8::try_from(host + 1).expect("the number of hosts has a limit"))
    }

    /// Address of this process, for servers that hosts are to reach.
    pub fn outside(&self) -> Ipv4Addr {
        self.at(OUTSIDE)
    }

    fn at(&self, last: u8) -> Ipv4Addr {
        let [a, b, c] = self.subnet;
        Ipv4Addr::new(a, b, c, last)
    }

    /// A command that runs a program on a host. The process is the program itself: its id is the one to send signals to.
    pub fn command(&self, host: usize, program: impl AsRef<OsStr>) -> Command {
        self.inside(&self.namespace(host), program)
    }

    /// What stands before a command that is to run on a host.
    pub fn entry(&self, host: usize) -> Vec<String> {
        entry(&self.namespace(host))
    }

    fn inside(&self, namespace: &str, program: impl AsRef<OsStr>) -> Command {
        let [enter, rest @ ..] = &entry(namespace)[..] else { unreachable!("it is not empty") };
        let mut command = Command::new(enter);
        command.args(rest).arg(program);
        command
    }

    /// Loses all frames between a host and everybody else, until [`Self::heal`].
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn cut(&self, host: usize, cut: Cut) {
        self.lose(host, cut, 100);
    }

    /// Loses a share of the frames between a host and everybody else, until [`Self::heal`].
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn lose(&self, host: usize, cut: Cut, percent: u32) {
        let port = port(host);
        let rule = |side: &str| {
            let share = match percent {
                100.. => String::new(),
                _ => format!("numgen random mod 100 < {percent} "),
            };
            format!("add rule bridge lab cuts {side} \"{port}\" {share}drop\n")
        };
        let rules = match cut {
            Cut::Both => rule("iifname") + &rule("oifname"),
            Cut::From => rule("iifname"),
            Cut::To => rule("oifname"),
        };
        self.rules(&rules).expect("a network that was made takes rules");
    }

    /// Ends all cuts and losses.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn heal(&self) {
        self.rules("flush chain bridge lab cuts").expect("a network that was made takes rules");
    }

    /// Pulls the cable of a host, or puts it back.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn plug(&self, host: usize, plugged: bool) {
        let state = if plugged { "up" } else { "down" };
        ip(&["-n", &self.bridge(), "link", "set", &port(host), state]).expect("a host has a cable");
    }

    fn rules(&self, script: &str) -> Result<(), String> {
        let mut nft = self.inside(&self.bridge(), "nft");
        run(nft.args(["-f", "-"]), &format!("{script}\n"))
    }

    fn bridge(&self) -> String {
        format!("{}-bridge", self.name)
    }

    fn namespace(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The pair vanishes with one end at once, and the address with it; a namespace goes a moment after its name.
        let gone = ip(&["link", "del", &self.uplink]);
        drop(gone); // Building may have failed before there was one.
        for name in (0..self.hosts).map(|host| self.namespace(host)).chain([self.bridge()]) {
            if Path::new(NAMES).join(&name).exists() {
                drop(ip(&["netns", "del", &name]));
            }
        }
    }
}

fn entry(namespace: &str) -> Vec<String> {
    vec!["nsenter".to_owned(), format!("--net={NAMES}/{namespace}"), "--".to_owned()]
}

/// A host's end at the bridge.
fn port(host: usize) -> String {
    format!("host{host}")
}

/// Removes the namespaces of processes that were killed before they could.
fn remove_left_behind() {
    let Ok(names) = fs::read_dir(NAMES) else { return };
    for name in names.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').nth(1));
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            drop(ip(&["netns", "del", &name])); // Another test may be quicker.
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    run(Command::new("ip").args(args), "")
}

/// Runs a command to its end; what it says when it fails is the error.
fn run(command: &mut Command, input: &str) -> Result<(), String> {
    let shown = format!("{command:?}");
    let failed = |error: std::io::Error| format!("{shown}: {error}");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).map_err(failed)?;
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{shown}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
