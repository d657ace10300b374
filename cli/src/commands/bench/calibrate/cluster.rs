//! A coordinator and workers as processes on loopback, for as long as they are measured.

use std::path::Path;

use crate::{
    backend::Backend,
    commands::demo::{Process, START_DEADLINE, serving},
    config::{Access, ApiAddress, Endpoints, InProcess, Target},
    error::Error,
};

/// Running processes and a client of them.
#[derive(Debug)]
pub(super) struct Cluster {
    backend: Backend,
    coordinator: Process,
    workers: Vec<Process>,
}

impl Cluster {
    /// Starts them with the threads of the in-process cluster, and waits until every worker serves.
    ///
    /// # Errors
    /// A process does not start.
    pub(super) async fn start(
        process: &InProcess,
        count: usize,
        cap: Option<u32>,
        logs: &Path,
    ) -> Result<Self, Error> {
        let container = process.container.display().to_string();
        let threads = process.threads.to_string();
        let own = std::process::id();
        let mut workers = Vec::with_capacity(count);
        for index in 0..count {
            let id = format!("worker-{index}");
            let mut flags = vec!["worker", "--container", &container, "--listen", "127.0.0.1:0"];
            flags.extend(["--id", &id, "--threads", &threads]);
            let cap = cap.map(|cap| cap.to_string());
            flags.extend(cap.iter().flat_map(|cap| ["--cap", cap.as_str()]));
            let name = format!("shimmer-calibrate-{own}-{id}");
            workers.push(Process::start(&name, &flags, logs)?);
        }
        let mut addresses = Vec::with_capacity(count);
        for worker in &mut workers {
            addresses.push(worker.address(START_DEADLINE).await?);
        }
        let addresses = addresses.join(",");
        let mut flags = vec!["serve", "--container", &container, "--listen", "127.0.0.1:0"];
        flags.extend(["--workers", &addresses, "--threads", &threads]);
        let name = format!("shimmer-calibrate-{own}-coordinator");
        let mut coordinator = Process::start(&name, &flags, logs)?;
        let address = coordinator.address(START_DEADLINE).await?;
        let endpoint: ApiAddress = address.parse().map_err(|error| {
            Error::failed(format!("the coordinator listens on {address}"), error)
        })?;
        let target = Target::Endpoint(Endpoints::new(vec![endpoint], Access::default()));
        let backend = Backend::open(target).await?;
        serving(&backend, &mut coordinator, &mut workers).await?;
        Ok(Self { backend, coordinator, workers })
    }

    pub(super) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Ends them, the coordinator first, and removes their logs.
    pub(super) async fn stop(self) {
        let logs: Vec<_> =
            self.workers.iter().chain([&self.coordinator]).map(Process::log).collect();
        self.coordinator.stop().await;
        for worker in self.workers {
            worker.stop().await;
        }
        for log in logs {
            drop(std::fs::remove_file(log));
        }
    }
}
