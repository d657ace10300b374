//! The cluster of deploy/compose.yaml, as a project of its own that ends with its test.

use std::{
    path::Path,
    process::{self, Command},
    time::Duration,
};

use shimmer_proto::v1::GetModelRequest;
use tokio::runtime::{Builder, Runtime};

use crate::{
    client,
    engine::{Engine, deploy, docker, output},
    wait::wait_for,
};

/// For a container to come up on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// A running project; dropping it removes its containers, networks and volumes.
#[derive(Debug)]
pub struct Compose {
    program: Vec<&'static str>,
    project: String,
    variables: Vec<(&'static str, String)>,
    runtime: Runtime,
}

impl Compose {
    /// A project of this engine with a model; nothing is started.
    ///
    /// # Errors
    /// What is missing on this machine.
    ///
    /// # Panics
    /// An image cannot be built.
    pub fn new(engine: &Engine, model: &Path, rules: &Path) -> Result<Self, String> {
        let works = |program: &[&str]| {
            output(Command::new(program[0]).args(&program[1..]).arg("version")).is_ok()
        };
        let program = [vec!["docker", "compose"], vec!["docker-compose"]];
        let program = program.into_iter().find(|program| works(program));
        let program = program.ok_or("neither docker compose nor docker-compose is there")?;
        let variables = vec![
            ("ETCD_IMAGE", engine.host_image("etcd", &["etcd", "etcdctl"], "")?),
            (
                "PROMETHEUS_IMAGE",
                engine.host_image(
                    "prometheus",
                    &["prometheus", "promtool"],
                    "ENTRYPOINT [\"/bin/prometheus\"]",
                )?,
            ),
            ("IMAGE", engine.image("runtime")),
            ("MODEL", model.display().to_string()),
            ("RULES", rules.display().to_string()),
            // A free port of loopback.
            ("PUBLISH", "127.0.0.1:".to_owned()),
            ("MEMORY", "1g".to_owned()),
            ("PROBE_INTERVAL", "1s".to_owned()),
        ];
        let project = format!("shimmer-test-{}", process::id());
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        Ok(Self { program, project, variables, runtime })
    }

    /// Changes a variable of the file for the calls that follow.
    pub fn set(&mut self, name: &'static str, value: impl Into<String>) {
        self.variables.retain(|(known, _)| *known != name);
        self.variables.push((name, value.into()));
    }

    /// Runs a command of compose.
    ///
    /// # Panics
    /// It fails.
    pub fn run(&self, args: &[&str]) -> String {
        self.try_run(args).unwrap_or_else(|error| panic!("compose {args:?}: {error}"))
    }

    fn try_run(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(self.program[0]);
        command.args(&self.program[1..]).arg("--file").arg(deploy().join("compose.yaml"));
        command.args(["--project-name", &self.project]).args(args);
        output(command.envs(self.variables.iter().map(|(name, value)| (name, value))))
    }

    /// The container of a service.
    ///
    /// # Panics
    /// There is none.
    pub fn container(&self, service: &str) -> String {
        let label = |key: &str, value: &str| format!("label=com.docker.compose.{key}={value}");
        let (project, service) = (label("project", &self.project), label("service", service));
        let ids = docker(&["ps", "--all", "--quiet", "--filter", &project, "--filter", &service]);
        ids.expect("the engine answers").lines().next().expect("the service was started").to_owned()
    }

    /// Does something with the container of a service: `pause`, `unpause`, `kill`, `start`.
    ///
    /// # Panics
    /// The engine refuses.
    pub fn act(&self, verb: &str, service: &str) {
        docker(&[verb, &self.container(service)])
            .unwrap_or_else(|error| panic!("{verb} {service}: {error}"));
    }

    /// Takes a service off a network.
    ///
    /// # Panics
    /// The engine refuses.
    pub fn disconnect(&self, service: &str, network: &str) {
        let network = format!("{}_{network}", self.project);
        docker(&["network", "disconnect", &network, &self.container(service)])
            .unwrap_or_else(|error| panic!("disconnecting {service}: {error}"));
    }

    /// Brings a service back to a network, under the name that it has there.
    ///
    /// # Panics
    /// The engine refuses.
    pub fn connect(&self, service: &str, network: &str) {
        let (alias, network) =
            (format!("{service}.{network}"), format!("{}_{network}", self.project));
        docker(&["network", "connect", "--alias", &alias, &network, &self.container(service)])
            .unwrap_or_else(|error| panic!("connecting {service}: {error}"));
    }

    /// Runs a program in the container of a service.
    ///
    /// # Errors
    /// What it said.
    pub fn exec(&self, service: &str, args: &[&str]) -> Result<String, String> {
        let container = self.container(service);
        docker(&[&["exec", container.as_str()], args].concat())
    }

    /// What its own probe hears from a service.
    ///
    /// # Errors
    /// The reason why it is not healthy.
    pub fn probe(&self, service: &str) -> Result<String, String> {
        self.exec(service, &["/usr/local/bin/shimmer", "healthcheck"])
    }

    /// The port of this host behind which the coordinator is, while it runs.
    pub fn port(&self) -> Option<u16> {
        let ports = docker(&["port", &self.container("coordinator"), "50051/tcp"]).ok()?;
        ports.lines().next()?.rsplit_once(':')?.1.parse().ok()
    }

    /// Worker ids with their states as the coordinator says.
    pub fn states(&self) -> Option<Vec<(String, String)>> {
        let port = self.port()?;
        self.runtime.block_on(async {
            let mut client = client::connect(port).await.ok()?;
            let model = client.get_model(GetModelRequest {}).await.ok()?.into_inner();
            Some(model.workers.into_iter().map(|w| (w.worker_id, w.state)).collect())
        })
    }

    /// Waits until a worker has one of these states.
    ///
    /// # Panics
    /// It does not within a minute; the logs are shown.
    pub fn wait_for_state(&self, worker: &str, states: &[&str]) {
        self.wait(&format!("{worker} to be {states:?}"), || {
            let known = self.states()?;
            known
                .iter()
                .any(|(id, state)| id == worker && states.contains(&&state[..]))
                .then_some(())
        });
    }

    /// Waits until all three workers serve.
    ///
    /// # Panics
    /// They do not within a minute; the logs are shown.
    pub fn wait_until_serving(&self) {
        self.wait("three serving workers", || {
            let known = self.states()?;
            (known.iter().filter(|(_, state)| state == "serving").count() == 3).then_some(())
        });
    }

    /// [`wait_for`], with the logs of all services where it is in vain.
    ///
    /// # Panics
    /// Nothing came within a minute.
    pub fn wait<T>(&self, what: &str, condition: impl FnMut() -> Option<T>) -> T {
        let logs = Logs(self);
        let value = wait_for(what, DEADLINE, condition);
        drop(logs);
        value
    }

    /// Runs a future.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Where tasks can be spawned.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }
}

/// Shows the logs when it is dropped by a panic.
struct Logs<'a>(&'a Compose);

impl Drop for Logs<'_> {
    #[expect(clippy::print_stderr, reason = "the logs of a failed test are for its reader")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = self.0.try_run(&["logs", "--no-color", "--tail", "40"]);
            eprintln!("{}", logs.unwrap_or_else(|error| error));
        }
    }
}

impl Drop for Compose {
    fn drop(&mut self) {
        // What cannot be removed is not there, or its engine is gone.
        drop(self.try_run(&["down", "--volumes", "--timeout", "0"]));
    }
}
