//! What operators ask of real processes and order them: `shimmer status`, `placement`, `drain`, `rebalance`, `readmit`.

use std::{path::Path, process::Command, time::Duration};

use serde_json::Value;
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    certificates::Authority,
    client::greedy,
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    models::TinyModel,
    process::{Process, shimmer_binary},
    wait::wait_for,
};
use tempfile::TempDir;

/// For anything that happens by itself on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// A cluster with an admin port.
struct Operated {
    cluster: Cluster,
    admin: String,
    /// Flags of an operator who is a member.
    flags: Vec<String>,
}

impl Operated {
    fn start(container: &Path, workers: usize) -> Self {
        Self::start_with(container, vec![WorkerOptions::default(); workers], Vec::new(), Vec::new())
    }

    fn start_with(
        container: &Path,
        workers: Vec<WorkerOptions>,
        more: Vec<String>,
        flags: Vec<String>,
    ) -> Self {
        let mut args =
            ["--id", "coordinator", "--admin-listen", "127.0.0.1:0"].map(str::to_owned).to_vec();
        args.extend(more);
        let options = ClusterOptions { workers, args, ..ClusterOptions::new(container, 0) };
        let cluster = Cluster::start(&options);
        let admin = address_of(&cluster.coordinator);
        Self { cluster, admin, flags }
    }

    /// Runs a command to its end: exit code, standard output, standard error.
    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        run(&[args, &["--admin", &self.admin], &flags].concat())
    }

    /// What a command that must succeed says.
    fn say(&self, args: &[&str]) -> String {
        let (code, out, error) = self.run(args);
        assert_eq!(code, 0, "{args:?}: {error}");
        out
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.say(&[args, &["--json"]].concat())).unwrap()
    }

    /// Experts that a worker holds by the placement, first or as a copy.
    fn held(&self, worker: &str) -> u64 {
        let status = self.json(&["status"]);
        let workers = status["workers"].as_array().unwrap();
        let found = workers.iter().find(|known| known["id"] == worker).unwrap();
        found["primary_experts"].as_u64().unwrap() + found["copy_experts"].as_u64().unwrap()
    }

    /// A command that must be refused.
    fn check_refused(&self, args: &[&str], code: i32, expected: &str) {
        let (found, _, error) = self.run(args);
        assert_eq!(found, code, "{args:?}: {error}");
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

fn address_of(coordinator: &Process) -> String {
    wait_for("the address of the admin port", SOON, || {
        let log = coordinator.log();
        log.lines().find_map(|line| line.strip_prefix("admin on ")).map(str::to_owned)
    })
}

fn run(args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(shimmer_binary());
    command.args(args);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SHIMMER_") {
            command.env_remove(name);
        }
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

#[test]
fn status_and_placement_show_who_holds_what() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let operated = Operated::start(&model.container(NumericClass::default()), 2);
    operated.cluster.generate(greedy(&[1, 2, 3], 8)).unwrap();
    let status = operated.json(&["status"]);
    assert_eq!(status["complete"], true);
    assert_eq!(
        (&status["coordinator_id"], &status["leader"]),
        (&"coordinator".into(), &"coordinator".into())
    );
    assert_eq!(
        (&status["store"]["kind"], &status["store"]["connected"]),
        (&"static".into(), &true.into())
    );
    assert!(status["generation"].as_u64().unwrap() > 0 && status["next_generation"].is_null());
    let workers = status["workers"].as_array().unwrap();
    let sum = |key: &str| workers.iter().map(|worker| worker[key].as_u64().unwrap()).sum::<u64>();
    assert!(workers.iter().all(|worker| worker["state"] == "serving"), "{status}");
    assert!(sum("expert_rows") > 0, "{status}");

    let placement = operated.json(&["placement"]);
    assert_eq!(placement["generation"], status["generation"]);
    let layers = placement["layers"].as_array().unwrap();
    let experts: usize =
        layers.iter().map(|layer| layer["experts"].as_array().unwrap().len()).sum();
    assert_eq!(sum("primary_experts"), experts as u64, "each expert has one first owner");
    let one = operated.json(&["placement", "--layer", &layers[0]["layer"].to_string()]);
    assert_eq!(one["layers"].as_array().unwrap().len(), 1);
    assert_eq!(one["layers"][0], layers[0]);

    for (args, parts) in [
        (&["status"][..], &["leader       coordinator", "worker-0", "worker-1", "faults"][..]),
        (&["placement"], &["generation 1", "worker-0", "worker-1"]),
        (&["placement", "--layer", &layers[0]["layer"].to_string()], &["first", "worker-"]),
    ] {
        let text = operated.say(args);
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    operated.check_refused(&["placement", "--layer", "999"], 2, "layer 999 has no routed experts");
}

#[test]
fn a_worker_drains_and_comes_back_without_changing_a_byte() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let operated = Operated::start(&model.container(NumericClass::default()), 3);
    let request = || greedy(&[9, 8, 7, 6, 5], 24);
    let expected = operated.cluster.generate(request()).unwrap();
    assert!(operated.held("worker-1") > 0);

    let drained = operated.json(&["drain", "worker-1", "--wait"]);
    assert!(drained["moves"].as_u64().unwrap() > 0, "{drained}");
    assert_eq!(operated.held("worker-1"), 0);
    assert_eq!(operated.cluster.generate(request()).unwrap().logits_sha256, expected.logits_sha256);
    assert!(
        operated.say(&["drain", "worker-1", "--wait"]).contains("is drained"),
        "again is no error"
    );

    operated.say(&["drain", "worker-1", "--undo", "--wait"]);
    assert!(operated.held("worker-1") > 0);
    assert_eq!(operated.cluster.generate(request()).unwrap().logits_sha256, expected.logits_sha256);
}

#[test]
fn a_rebalance_is_shown_before_it_is_made() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let operated = Operated::start(&model.container(NumericClass::default()), 2);
    let request = || greedy(&[4, 4, 4, 4], 32);
    let expected = operated.cluster.generate(request()).unwrap();
    let generation = operated.json(&["status"])["generation"].clone();
    let plan = operated.json(&["rebalance", "--dry-run", "--max-moves", "4"]);
    assert!(plan["moves"].as_array().unwrap().len() <= 4 && plan["generation"].is_null(), "{plan}");
    assert_eq!(operated.json(&["status"])["generation"], generation, "nothing was changed");
    let before = plan["imbalance_before"].as_f64().unwrap();
    assert!(plan["imbalance_after"].as_f64().unwrap() <= before, "{plan}");

    let made = operated.json(&["rebalance", "--max-moves", "4"]);
    if let Some(written) = made["generation"].as_u64() {
        wait_for("the rebalanced placement", SOON, || {
            (operated.json(&["status"])["generation"] == written).then_some(())
        });
    } else {
        assert_eq!(made["moves"].as_array().unwrap().len(), 0, "{made}");
    }
    assert_eq!(operated.cluster.generate(request()).unwrap().logits_sha256, expected.logits_sha256);
}

#[test]
fn orders_that_make_no_sense_are_refused_by_name() {
    let model = TinyModel::new(Preset::Olmoe);
    let operated = Operated::start(&model.container(NumericClass::default()), 1);
    operated.check_refused(&["drain", "nobody"], 1, "no worker is called nobody; known: worker-0");
    operated.check_refused(&["drain", "a b"], 2, "is no name of a worker");
    operated.check_refused(&["drain", "worker-0"], 1, "no other worker serves");
    operated.check_refused(&["readmit", "worker-0"], 1, "is not in quarantine");
    operated.check_refused(&["rebalance", "--max-moves", "0"], 2, "0 moves change nothing");
    operated.check_refused(&["drain", "worker-0", "--wait-limit", "1s"], 2, "--wait");
    let (code, _, error) = run(&["status", "--admin", "127.0.0.1:1"]);
    assert_eq!(code, 1);
    assert!(error.contains("serve --admin-listen"), "{error}");
}

#[test]
fn operators_are_members_where_members_speak_tls() {
    let model = TinyModel::new(Preset::Olmoe);
    let container = model.container(NumericClass::default());
    let (authority, files) = (Authority::new("cluster"), TempDir::new().unwrap());
    let member = |name: &str| authority.issue(&files.path().join(name)).flags();
    let worker = WorkerOptions { args: member("worker"), ..WorkerOptions::default() };
    let operated =
        Operated::start_with(&container, vec![worker], member("coordinator"), member("operator"));
    assert_eq!(operated.json(&["status"])["complete"], true);
    let (code, _, error) = run(&["status", "--admin", &operated.admin]);
    assert_eq!(code, 1);
    assert!(error.contains("this port speaks TLS only"), "{error}");
    let stranger = Authority::new("another").issue(&files.path().join("stranger")).flags();
    let flags: Vec<&str> = stranger.iter().map(String::as_str).collect();
    let (code, _, error) = run(&[&["status", "--admin", &operated.admin][..], &flags].concat());
    assert_eq!(code, 1);
    assert!(error.contains("not signed by the authority that is trusted here"), "{error}");
}
