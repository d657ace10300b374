//! A whole cluster that finds itself in a real etcd.

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::membership::{
    Snapshot,
    records::{PLACEMENT, PlacementRecord},
};
use shimmer_tests::{
    client,
    etcd::{self, Etcd},
    in_process::InProcess,
    models::TinyModel,
    process::Process,
    wait::wait_for,
    workload::{self, Job, Outcome},
};
use tokio::runtime::{Builder, Runtime};

use super::{DEADLINE, member, wait_for_view};

/// Of the tiny models.
const VOCABULARY: u32 = 256;

struct Cluster {
    etcd: Etcd,
    model: TinyModel,
    runtime: Runtime,
}

impl Cluster {
    fn start() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self { etcd: Etcd::start(1), model: TinyModel::new(Preset::Glm4Moe), runtime }
    }

    fn process(&self, role: &str, id: &str) -> Process {
        let container = self.model.container(NumericClass::default()).display().to_string();
        let urls = self.etcd.urls().join(",");
        let args = [
            role,
            "--container",
            &container,
            "--listen",
            "127.0.0.1:0",
            "--threads",
            "1",
            "--id",
            id,
            "--cluster",
            "test",
            "--etcd",
            &urls,
            "--lease",
            "6s",
        ];
        Process::shimmer(id, &args, std::iter::empty::<(&str, &str)>(), self.etcd.directory())
    }

    /// Runs a job at a coordinator, again until the cluster is complete.
    fn first(&self, port: u16, job: &Job) -> Outcome {
        wait_for("a first answer", DEADLINE, || self.run(port, job).ok())
    }

    fn run(&self, port: u16, job: &Job) -> Result<Outcome, tonic::Status> {
        let generation = self.runtime.block_on(async {
            client::generate(&mut client::connect(port).await?, job.request()).await
        })?;
        Ok(Outcome { tokens: generation.tokens, logits_sha256: generation.logits_sha256 })
    }
}

fn placement(view: &Snapshot) -> Option<PlacementRecord> {
    serde_json::from_str(&view.entries.get(PLACEMENT)?.value).ok()
}

#[test]
fn a_cluster_finds_itself_and_serves_on_without_its_etcd() {
    if !etcd::available() {
        return;
    }
    let mut cluster = Cluster::start();
    let undisturbed = InProcess::start(&cluster.model.container(NumericClass::default()));
    let jobs = workload::mixed(VOCABULARY);
    let expected: Vec<Outcome> = jobs.iter().map(|job| undisturbed.run(job)).collect();
    drop(undisturbed);

    let follower = member(&cluster.etcd, 0);
    let mut workers = vec![cluster.process("worker", "w1"), cluster.process("worker", "w2")];
    let mut coordinators = ["c1", "c2"].map(|id| cluster.process("serve", id));
    let ports = coordinators.each_mut().map(|process| process.listening_port(DEADLINE));
    for port in ports {
        assert_eq!(cluster.first(port, &jobs[0]), expected[0]);
    }
    let seen = wait_for_view("both coordinators, one leader, one placement", &*follower, |view| {
        let keys = ["coordinators/c1", "coordinators/c2", "leader"];
        keys.iter().all(|key| view.entries.contains_key(*key))
            && placement(view).is_some_and(|placement| placement.workers == ["w1", "w2"])
    });
    let first = placement(&seen).unwrap();

    // Without the store everything goes on: at both coordinators, with the same bytes.
    cluster.etcd.kill(0);
    wait_for_view("the outage", &*follower, |view| view.disconnected.is_some() && view.lease == 0);
    for (job, expected) in jobs.iter().zip(&expected) {
        for port in ports {
            assert_eq!(cluster.run(port, job).as_ref().ok(), Some(expected));
        }
    }
    // Back again: who comes now is found, and gets a share.
    cluster.etcd.restart_all();
    workers.push(cluster.process("worker", "w3"));
    let seen = wait_for_view("a placement with the new worker", &*follower, |view| {
        placement(view).is_some_and(|placement| placement.workers == ["w1", "w2", "w3"])
    });
    assert!(placement(&seen).unwrap().generation > first.generation);
    for (job, expected) in jobs.iter().zip(&expected) {
        for port in ports {
            assert_eq!(cluster.run(port, job).as_ref().ok(), Some(expected));
        }
    }
    for process in coordinators.iter_mut().chain(&mut workers) {
        process.signal("TERM");
        assert!(process.wait_for_end(DEADLINE).success(), "{} leaves", process.name());
    }
    wait_for_view("everybody to have left", &*follower, |view| {
        view.entries.values().all(|entry| entry.lease == 0)
    });
}
