//! `shimmer doctor`: what stands in the way on this host, and how to remove it.

use std::path::{Path, PathBuf};

use clap::Args;
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use shimmer_model::Container;
use shimmer_proto::{address::PeerAddress, tls::Dialer};

use super::security;
use crate::{
    block_on,
    config::{ClusterConfig, EtcdArgs, HostPort, member_files},
    doctor::{self, Facts, Finding, Level, reach, read},
    error::Error,
    logging::LogArgs,
    output,
};

const ABOUT: &str = "\
Looks at this host as a worker or a coordinator would: kernel, processors, memory, limits of the control group, GPU driver,
io_uring, drive, clock, and, where they are named, a container, etcd and other members. Each finding is ok, note, warn or
fail, with its fix as one line. What cannot be read, as in a restricted container, is said and is no failure. Nothing is
changed; with --disk one file of 64 MiB is written, read and removed. Exit code 1 when something fails.

Examples:
  shimmer doctor                                                  this host alone
  shimmer doctor --container glm                                  and whether the container can be used here
  shimmer doctor --container glm --full                           every byte of it, as `shimmer verify` does
  shimmer doctor --etcd https://etcd:2379 --etcd-ca ca.pem --cluster prod
  shimmer doctor --container glm --peers a:50052,b:50052 --json   would these workers take us?";

/// Flags of `shimmer doctor`.
#[derive(Debug, Args)]
#[command(long_about = ABOUT)]
pub struct DoctorArgs {
    /// Container directory; its drive is what is timed
    #[arg(long, env = "SHIMMER_CONTAINER", value_name = "DIR")]
    container: Option<PathBuf>,

    /// Hashes every byte of the container
    #[arg(long, requires = "container")]
    full: bool,

    /// Directory whose drive is timed, by a file that is made there and removed
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,

    /// Workers and coordinators that should answer, separated by commas
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',', help_heading = "Members")]
    peers: Vec<HostPort>,

    /// Authority of the cluster's members, if they speak TLS; with --tls-cert and --tls-key
    #[arg(long, env = "SHIMMER_TLS_CA", value_name = "FILE", help_heading = "Members")]
    tls_ca: Option<PathBuf>,

    /// Certificate with which this host is a member
    #[arg(long, env = "SHIMMER_TLS_CERT", value_name = "FILE", help_heading = "Members")]
    tls_cert: Option<PathBuf>,

    /// Key of the certificate
    #[arg(long, env = "SHIMMER_TLS_KEY", value_name = "FILE", help_heading = "Members")]
    tls_key: Option<PathBuf>,

    #[command(flatten)]
    etcd: EtcdArgs,

    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArgs,
}

/// Runs the command.
///
/// # Errors
/// A flag cannot be used, or a finding says that something will not work.
pub fn run(args: &DoctorArgs) -> Result<(), Error> {
    args.log.start();
    let began = read::Clocks::now();
    let cluster = args.etcd.config()?;
    let files = member_files(args.tls_ca.clone(), args.tls_cert.clone(), args.tls_key.clone())?;
    let identity = security::identity(files.as_ref())?;
    let dialer = identity.map_or_else(Dialer::plaintext, |identity| Dialer::tls(identity.client()));
    let root = Path::new("/");
    let container = args.container.as_deref();
    let drive = read::drive(root, container, args.disk.as_deref());
    let container = container.map(|path| read::container(path, args.full));
    let ours = args.container.as_deref().and_then(|path| Container::open(path).ok());
    let ours = ours.as_ref().map(reach::identity_of);
    let (etcd, peers, offset) = block_on(async {
        let etcd = match &cluster {
            Some(cluster) => Some(reach::etcd(cluster).await),
            None => None,
        };
        let mut peers = Vec::with_capacity(args.peers.len());
        for peer in &args.peers {
            peers.push(reach::peer(&peer.0, &dialer, ours.as_ref()).await);
        }
        let offset = match cluster.as_ref().map(plain_endpoint) {
            Some(Some(address)) => Some(reach::offset(&address).await),
            Some(None) => Some(Err("etcd speaks TLS only".to_owned())),
            None => None,
        };
        Ok((etcd, peers, offset))
    })?;
    let facts = Facts {
        host: read::host(root),
        memory: read::memory(root),
        gpu: read::gpu(root),
        drive,
        clock: read::clock(root, began, offset),
        container,
        etcd,
        peers,
    };
    let findings = doctor::judge(&facts);
    if args.json {
        output::json(&as_json(&findings))?;
    } else {
        output::line(&table(&findings))?;
    }
    let failed: Vec<&str> = findings
        .iter()
        .filter(|finding| finding.level == Level::Fail)
        .map(|finding| finding.check.as_str())
        .collect();
    if failed.is_empty() {
        return Ok(());
    }
    Err(Error::failed("something will not work on this host", failed.join(", ")))
}

/// The first node of an etcd that speaks without TLS.
fn plain_endpoint(cluster: &ClusterConfig) -> Option<PeerAddress> {
    let text = cluster.endpoints().first()?.to_string();
    text.strip_prefix("http://")?.parse().ok()
}

fn as_json(findings: &[Finding]) -> Value {
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    json!({
        "findings": findings.iter().map(Finding::json).collect::<Vec<_>>(),
        "ok": count(Level::Ok),
        "note": count(Level::Note),
        "warn": count(Level::Warn),
        "fail": count(Level::Fail),
    })
}

fn table(findings: &[Finding]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    for finding in findings {
        table.add_row([finding.level.name(), &finding.check, &finding.found]);
        if let Some(fix) = finding.fix.as_ref().filter(|_| finding.level != Level::Ok) {
            table.add_row(["", "", &format!("fix: {fix}")]);
        }
    }
    table.trim_fmt()
}
