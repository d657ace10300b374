//! A coordinator and its workers, each on a host of its own.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Arc,
    time::Duration,
};

use serde_json::Value;
use shimmer_proto::v1::{GetModelRequest, WorkerStatus};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use super::{
    network::Network,
    stream::{Progress, Timed, run_together},
    wire::Wire,
};
use crate::{
    client,
    etcd::{self, Etcd},
    process::{Process, shimmer_binary, without_variables},
    wait::wait_for,
    workload::Job,
};

/// Time for a whole cluster to come up on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// The coordinator's host.
const COORDINATOR: usize = 0;
/// Every host has its own ports.
const API_PORT: u16 = 50051;
const WORKER_PORT: u16 = 50052;
const METRICS_PORT: u16 = 9100;

/// How one worker is started.
#[derive(Debug, Clone, Default)]
pub struct WorkerPlan {
    /// Another container directory than the coordinator's.
    pub container: Option<PathBuf>,
    /// Further flags.
    pub args: Vec<String>,
    /// Variables.
    pub envs: Vec<(&'static str, PathBuf)>,
    /// Reached through a [`Wire`] with this delay in each direction.
    pub wire: Option<Duration>,
    /// Has its place in the cluster, but is started later, by [`Deployment::launch_worker`].
    pub late: bool,
}

/// How a cluster is started.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Container directory of everybody.
    pub container: PathBuf,
    /// The workers, on hosts 1 and up.
    pub workers: Vec<WorkerPlan>,
    /// Further flags of the coordinator.
    pub args: Vec<String>,
    /// Nodes of an etcd on hosts of their own, in which members find each other; without one the coordinator has a list.
    pub etcd: usize,
    /// Further flags of everybody.
    pub member_args: Vec<String>,
}

/// A worker and its host.
#[derive(Debug)]
pub struct Worker {
    /// Its name in the cluster.
    pub id: String,
    /// Where it runs.
    pub host: usize,
    /// The proxy before it, if it was planned.
    pub wire: Option<Wire>,
    /// Where the coordinator reaches it.
    address: String,
    plan: WorkerPlan,
    /// All flags beside those of its role.
    args: Vec<String>,
    process: Option<Process>,
}

/// A running cluster; dropping it ends every process and removes every host.
#[derive(Debug)]
pub struct Deployment {
    // Fields drop in order: the coordinator first, so that it does not log the loss of its workers.
    coordinator: Process,
    workers: Vec<Worker>,
    etcd: Option<Etcd>,
    container: PathBuf,
    runtime: Runtime,
    network: Network,
    directory: TempDir,
}

impl Deployment {
    /// Starts everything and waits until every worker serves.
    ///
    /// # Errors
    /// Why this machine cannot have several hosts.
    ///
    /// # Panics
    /// A process ends, or the cluster is not ready within a minute.
    pub fn start(plan: &Plan) -> Result<Self, String> {
        if plan.etcd > 0 && !etcd::available() {
            return Err("etcd is not installed".to_owned());
        }
        let first_node = plan.workers.len() + 1;
        let network = Network::new(first_node + plan.etcd)?;
        let directory = TempDir::new().expect("a temporary directory can be made");
        let etcd = (plan.etcd > 0).then(|| {
            let hosts = first_node..first_node + plan.etcd;
            Etcd::start_on(
                hosts.map(|host| (network.address(host).to_string(), network.entry(host))),
            )
        });
        let member: Vec<String> = etcd
            .iter()
            .flat_map(|etcd| {
                let urls = etcd.urls().join(",");
                ["--cluster".to_owned(), "lab".to_owned(), "--etcd".to_owned(), urls]
            })
            .chain(plan.member_args.iter().cloned())
            .collect();
        let mut workers: Vec<Worker> = (plan.workers.iter().enumerate())
            .map(|(index, worker)| Worker::new(&network, index, worker, &member))
            .collect();
        for worker in workers.iter_mut().filter(|worker| !worker.plan.late) {
            worker.launch(&network, &plan.container, directory.path());
        }
        for process in workers.iter_mut().filter_map(|worker| worker.process.as_mut()) {
            process.listening_port(START_DEADLINE);
        }
        let mut args = member.clone();
        if etcd.is_none() {
            let addresses: Vec<&str> = workers.iter().map(|worker| &worker.address[..]).collect();
            args.extend(["--workers".to_owned(), addresses.join(",")]);
        }
        args.extend(plan.args.iter().cloned());
        let mut coordinator = start(
            &network,
            COORDINATOR,
            &Role { name: "coordinator", command: "serve", port: API_PORT },
            &plan.container,
            &args,
            &[],
            directory.path(),
        );
        coordinator.listening_port(START_DEADLINE);
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime starts");
        let container = plan.container.clone();
        let mut deployment =
            Self { coordinator, workers, etcd, container, runtime, network, directory };
        deployment.wait_until_serving(plan.workers.iter().filter(|worker| !worker.late).count());
        Ok(deployment)
    }

    /// The hosts and what is between them.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The coordinator.
    pub fn coordinator(&self) -> &Process {
        &self.coordinator
    }

    /// The workers in the order of the plan.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// The container directory that everybody reads unless planned otherwise.
    pub fn container(&self) -> &Path {
        &self.container
    }

    /// Kills a worker at once and reaps it.
    pub fn kill_worker(&mut self, worker: usize) {
        self.workers[worker].running().kill();
    }

    /// The status of a worker's process, if it has ended.
    pub fn ended(&mut self, worker: usize) -> Option<ExitStatus> {
        self.workers[worker].running().ended()
    }

    /// Waits until `count` workers serve.
    ///
    /// # Panics
    /// The coordinator ends, or the workers do not serve within a minute.
    pub fn wait_until_serving(&mut self, count: usize) {
        wait_for(&format!("{count} serving workers"), START_DEADLINE, || {
            if let Some(status) = self.coordinator.ended() {
                panic!("the coordinator ended with {status} before it served");
            }
            let statuses = self.statuses()?;
            (statuses.iter().filter(|worker| worker.state == "serving").count() == count)
                .then_some(())
        });
    }

    /// What the coordinator says about its workers; nothing while it does not answer.
    pub fn statuses(&self) -> Option<Vec<WorkerStatus>> {
        self.runtime.block_on(async {
            let mut client = client::connect_to(self.api()).await.ok()?;
            Some(client.get_model(GetModelRequest {}).await.ok()?.into_inner().workers)
        })
    }

    /// What the coordinator says about one worker.
    pub fn state_of(&self, worker: usize) -> Option<WorkerStatus> {
        let id = &self.workers[worker].id;
        self.statuses()?.into_iter().find(|status| status.worker_id == *id)
    }

    /// What a worker counts.
    ///
    /// # Panics
    /// It does not answer.
    pub fn figures(&self, worker: usize) -> Value {
        let page = self.workers[worker].process().page("/metrics.json");
        serde_json::from_str(&page).expect("the page of figures is JSON")
    }

    /// Runs all jobs at the same time, to their ends, and meanwhile something else.
    ///
    /// # Panics
    /// The coordinator does not accept connections.
    pub fn run<T: Send>(
        &mut self,
        jobs: &[Job],
        meanwhile: impl FnOnce(&mut Self, &Progress) -> T,
    ) -> (Vec<Timed>, T) {
        let progress = Progress::new(jobs.len());
        let requests = jobs.iter().map(Job::request).collect();
        let client = self
            .runtime
            .block_on(client::connect_to(self.api()))
            .expect("a serving coordinator accepts connections");
        let running = {
            let progress = Arc::clone(&progress);
            self.runtime.spawn(async move { run_together(client, requests, &progress).await })
        };
        let other = meanwhile(self, &progress);
        let timed = self.runtime.block_on(running).expect("a client task does not panic");
        (timed, other)
    }

    /// Starts a worker that is late, or once more one that has ended or is to be ended, with its options.
    ///
    /// # Panics
    /// The process cannot be started.
    pub fn launch_worker(&mut self, index: usize) {
        self.workers[index].launch(&self.network, &self.container, self.directory.path());
    }

    /// The etcd that was planned.
    ///
    /// # Panics
    /// None was.
    pub fn etcd(&mut self) -> &mut Etcd {
        self.etcd.as_mut().expect("an etcd was planned")
    }

    /// Where clients connect.
    pub fn api(&self) -> SocketAddr {
        (self.network.address(COORDINATOR), API_PORT).into()
    }
}

impl Worker {
    fn new(network: &Network, index: usize, plan: &WorkerPlan, member: &[String]) -> Self {
        let host = index + 1;
        let target = SocketAddr::from((network.address(host), WORKER_PORT));
        let wire = plan.wire.map(|delay| Wire::new(network.outside().into(), target, delay));
        let address = wire.as_ref().map_or(target, Wire::address).to_string();
        let mut args = plan.args.clone();
        if !member.is_empty() {
            args.extend(member.iter().cloned());
            args.extend(["--advertise".to_owned(), address.clone()]);
        }
        let id = format!("worker-{index}");
        Self { id, host, address, wire, plan: plan.clone(), args, process: None }
    }

    fn launch(&mut self, network: &Network, container: &Path, logs: &Path) {
        drop(self.process.take());
        let container = self.plan.container.as_deref().unwrap_or(container);
        let role = Role { name: &self.id, command: "worker", port: WORKER_PORT };
        self.process =
            Some(start(network, self.host, &role, container, &self.args, &self.plan.envs, logs));
    }

    /// Its process.
    ///
    /// # Panics
    /// It is late.
    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("the worker was launched")
    }

    fn running(&mut self) -> &mut Process {
        self.process.as_mut().expect("the worker was launched")
    }
}

struct Role<'a> {
    name: &'a str,
    command: &'a str,
    port: u16,
}

fn start(
    network: &Network,
    host: usize,
    role: &Role<'_>,
    container: &Path,
    args: &[String],
    envs: &[(&'static str, PathBuf)],
    logs: &Path,
) -> Process {
    let address = network.address(host);
    let mut command = network.command(host, shimmer_binary());
    command.arg(role.command).arg("--container").arg(container);
    command.args(["--listen", &format!("{address}:{}", role.port)]);
    command.args(["--metrics-listen", &format!("{address}:{METRICS_PORT}")]);
    command.args(["--id", role.name, "--threads", "1"]).args(args);
    without_variables(&mut command).envs(envs.iter().cloned());
    Process::spawn(role.name, command, logs)
}
