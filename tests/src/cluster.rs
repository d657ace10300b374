//! One coordinator and its workers as real processes on loopback.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use shimmer_proto::v1::{GenerateRequest, GetModelRequest, WorkerStatus};
use tempfile::TempDir;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
};
use tonic::Status;

use crate::{
    client::{self, Client, Generation},
    process::Process,
    wait::wait_for,
};

/// Time for a whole cluster to come up on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// How one worker is started.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    pub weight: f64,
    pub threads: usize,
    /// Instruction set; absent takes the best one.
    pub isa: Option<&'static str>,
    /// Another container directory than the coordinator's.
    pub container: Option<PathBuf>,
    /// Further flags.
    pub args: Vec<String>,
    /// Further variables.
    pub envs: Vec<(&'static str, PathBuf)>,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        let (args, envs) = (Vec::new(), Vec::new());
        Self { weight: 1.0, threads: 1, isa: None, container: None, args, envs }
    }
}

/// How a cluster is started.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    pub container: PathBuf,
    pub workers: Vec<WorkerOptions>,
    /// Threads of the coordinator.
    pub threads: usize,
    /// Instruction set of the coordinator; absent takes the best one.
    pub isa: Option<&'static str>,
    /// Further flags of the coordinator.
    pub args: Vec<String>,
}

impl ClusterOptions {
    /// `workers` ordinary workers of one thread each.
    pub fn new(container: &Path, workers: usize) -> Self {
        Self {
            container: container.to_owned(),
            workers: vec![WorkerOptions::default(); workers],
            threads: 1,
            isa: None,
            args: Vec::new(),
        }
    }
}

/// A worker process and where it listens.
#[derive(Debug)]
pub struct Worker {
    pub id: String,
    pub port: u16,
    pub process: Process,
    options: WorkerOptions,
}

/// A running cluster; dropping it ends every process.
#[derive(Debug)]
pub struct Cluster {
    // Fields drop in order: the coordinator first, so that it does not log the loss of its workers.
    pub coordinator: Process,
    pub workers: Vec<Worker>,
    pub port: u16,
    container: PathBuf,
    runtime: Runtime,
    directory: TempDir,
}

impl Cluster {
    /// Starts the workers, then the coordinator, and waits until every worker serves.
    ///
    /// # Panics
    /// A process ends, or the cluster is not ready within a minute.
    pub fn start(options: &ClusterOptions) -> Self {
        let mut cluster = Self::launch(options);
        cluster.wait_until_serving(options.workers.len());
        cluster
    }

    /// Starts the processes and waits until each listens, but not until the workers serve.
    ///
    /// # Panics
    /// A process cannot be started or ends at once.
    pub fn launch(options: &ClusterOptions) -> Self {
        let directory = TempDir::new().expect("a temporary directory can be made");
        let mut workers: Vec<Worker> = (0..options.workers.len())
            .map(|index| {
                start_worker(
                    index,
                    0,
                    &options.workers[index],
                    &options.container,
                    directory.path(),
                )
            })
            .collect();
        for worker in &mut workers {
            worker.port = worker.process.listening_port(START_DEADLINE);
        }
        let endpoints: Vec<String> =
            workers.iter().map(|worker| format!("127.0.0.1:{}", worker.port)).collect();
        let mut args: Vec<String> = [
            "serve",
            "--container",
            &options.container.display().to_string(),
            "--listen",
            "127.0.0.1:0",
            "--threads",
            &options.threads.to_string(),
            "--workers",
            &endpoints.join(","),
        ]
        .map(str::to_owned)
        .to_vec();
        args.extend(options.args.iter().cloned());
        let mut coordinator =
            Process::shimmer("coordinator", &args, isa_variable(options.isa), directory.path());
        let port = coordinator.listening_port(START_DEADLINE);
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime starts");
        Self {
            coordinator,
            workers,
            port,
            container: options.container.clone(),
            runtime,
            directory,
        }
    }

    /// Arguments of one more coordinator over the same workers.
    pub fn coordinator_args(&self, container: &Path, more: &[&str]) -> Vec<String> {
        let endpoints: Vec<String> =
            self.workers.iter().map(|worker| format!("127.0.0.1:{}", worker.port)).collect();
        let container = container.display().to_string();
        let (listen, workers) = ("127.0.0.1:0", endpoints.join(","));
        let first = ["serve", "--container", &container, "--listen", listen, "--threads", "1"];
        let workers = ["--workers", workers.as_str()];
        first.iter().chain(&workers).chain(more).map(|&arg| arg.to_owned()).collect()
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
            let statuses = self.worker_statuses()?;
            (statuses.iter().filter(|worker| worker.state == "serving").count() == count)
                .then_some(())
        });
    }

    /// What the coordinator says about its workers; nothing while it does not answer.
    pub fn worker_statuses(&self) -> Option<Vec<WorkerStatus>> {
        self.block_on(async {
            let mut client = client::connect(self.port).await.ok()?;
            let model = client.get_model(GetModelRequest {}).await.ok()?;
            Some(model.into_inner().workers)
        })
    }

    /// A connected client.
    ///
    /// # Panics
    /// The coordinator does not answer.
    pub fn client(&self) -> Client {
        self.block_on(client::connect(self.port))
            .expect("a serving coordinator accepts connections")
    }

    /// Runs one generation to its end.
    ///
    /// # Errors
    /// The status with which the coordinator ended the stream.
    pub fn generate(&self, request: GenerateRequest) -> Result<Generation, Status> {
        self.block_on(async {
            client::generate(&mut client::connect(self.port).await?, request).await
        })
    }

    /// Runs generations at the same time and returns them in the order of the requests.
    ///
    /// # Errors
    /// The status of the first one that failed.
    pub fn generate_together(
        &self,
        requests: Vec<GenerateRequest>,
    ) -> Result<Vec<Generation>, Status> {
        self.block_on(async {
            let client = client::connect(self.port).await?;
            let mut tasks = JoinSet::new();
            let mut out = vec![None; requests.len()];
            for (index, request) in requests.into_iter().enumerate() {
                let mut client = client.clone();
                tasks.spawn(async move { (index, client::generate(&mut client, request).await) });
            }
            while let Some(task) = tasks.join_next().await {
                let (index, generation) = task.expect("a client task does not panic");
                out[index] = Some(generation?);
            }
            Ok(out.into_iter().flatten().collect())
        })
    }

    /// Starts a worker that ended again, with the same name, port and options.
    ///
    /// # Panics
    /// The process cannot be started.
    pub fn restart_worker(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        worker.process.kill();
        *worker = start_worker(
            index,
            worker.port,
            &worker.options,
            &self.container,
            self.directory.path(),
        );
    }

    /// Directory of the processes' logs.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Runs a future on the cluster's own runtime.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }
}

fn start_worker(
    index: usize,
    port: u16,
    options: &WorkerOptions,
    container: &Path,
    logs: &Path,
) -> Worker {
    let id = format!("worker-{index}");
    let container = options.container.as_deref().unwrap_or(container);
    let mut args: Vec<String> = [
        "worker",
        "--container",
        &container.display().to_string(),
        "--listen",
        &format!("127.0.0.1:{port}"),
        "--id",
        &id,
        "--weight",
        &options.weight.to_string(),
        "--threads",
        &options.threads.to_string(),
    ]
    .map(str::to_owned)
    .to_vec();
    args.extend(options.args.iter().cloned());
    let envs = isa_variable(options.isa)
        .into_iter()
        .map(|(key, value)| (key, PathBuf::from(value)))
        .chain(options.envs.iter().cloned());
    let process = Process::shimmer(&id, &args, envs, logs);
    Worker { id, port, process, options: options.clone() }
}

fn isa_variable(isa: Option<&'static str>) -> Vec<(&'static str, &'static str)> {
    isa.map(|isa| ("SHIMMER_ISA", isa)).into_iter().collect()
}
