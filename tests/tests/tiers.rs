//! Drives, memory and files that fail under a whole engine: nothing changes a byte, nothing loses a slot, and what cannot
//! be had is named to the client until it can be had again.
//!
//! The processes are the product's own. Calls into the kernel fail through a preloaded library; damage is done to files.

mod damage;
mod history;
mod reads;

use std::{process::Command, time::Duration};

use serde_json::Value;
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    faults::Faults,
    in_process::InProcess,
    models::TinyModel,
    wait::wait_for,
    workload::{Job, Outcome, mixed},
};
use tonic::{Code, Status};

/// For anything that a loaded machine does in a moment.
const SOON: Duration = Duration::from_secs(60);

/// What clients see while a fault lasts.
enum Seen<'a> {
    /// The right bytes.
    Bytes,
    /// A failed request whose message says all this.
    Error(&'a [&'a str]),
}

/// One worker with fewer slots than experts, its container, a copy of that, and what it has to answer.
struct Bench {
    model: TinyModel,
    expected: Vec<Outcome>,
}

impl Bench {
    fn new() -> Self {
        let model = TinyModel::new(Preset::Qwen3Moe);
        let mut bench = Self { model, expected: Vec::new() };
        let status =
            Command::new("cp").arg("-r").args([bench.container(), bench.mirror()]).status();
        assert!(status.unwrap().success());
        bench.expected = InProcess::start(&bench.container()).run_together(&jobs());
        bench
    }

    fn container(&self) -> std::path::PathBuf {
        self.model.container(NumericClass::default())
    }

    fn mirror(&self) -> std::path::PathBuf {
        self.model.checkpoint().with_file_name("mirror")
    }

    fn options(&self, io: &str, mirrored: bool, faults: Option<&Faults>) -> ClusterOptions {
        let mut args = vec!["--cap", "2", "--io", io, "--metrics-listen", "127.0.0.1:0"];
        // Without the guard hints are followed in a cache as small as this.
        args.extend(["--evict-guard", "off", "--pilot-workers", "2"]);
        let mirror = self.mirror().display().to_string();
        if mirrored {
            args.extend(["--mirror", &mirror]);
        }
        let args = args.into_iter().map(str::to_owned).collect();
        let envs = faults.map(Faults::envs).unwrap_or_default();
        let workers = vec![WorkerOptions { args, envs, ..WorkerOptions::default() }];
        ClusterOptions { workers, ..ClusterOptions::new(&self.container(), 0) }
    }

    fn check_same(&self, cluster: &Cluster, when: &str) {
        assert!(run(cluster).unwrap() == self.expected, "other bytes {when}");
    }

    fn check_seen(&self, cluster: &Cluster, seen: &Seen<'_>) {
        let Seen::Error(parts) = seen else { return self.check_same(cluster, "during the fault") };
        // More than once: a slot that is lost with each failure would be missed in the end.
        for _ in 0..3 {
            let status = run(cluster).unwrap_err();
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            for part in *parts {
                assert!(status.message().contains(part), "{part:?} is not in: {status}");
            }
        }
    }
}

/// A prompt that wants every expert, one that wants few, and sampling beside them.
fn jobs() -> Vec<Job> {
    let mut jobs = mixed(256);
    jobs.truncate(5);
    jobs.remove(2);
    jobs.iter_mut().for_each(|job| job.max_tokens = 6);
    jobs
}

fn run(cluster: &Cluster) -> Result<Vec<Outcome>, Status> {
    let generations = cluster.generate_together(jobs().iter().map(Job::request).collect())?;
    Ok(generations.into_iter().map(Into::into).collect())
}

/// What the worker counts of its tiers.
fn tiers(cluster: &Cluster) -> Value {
    let page = cluster.workers[0].process.page("/metrics.json");
    serde_json::from_str::<Value>(&page).unwrap()["tiers"].take()
}

fn count(tiers: &Value, name: &str) -> u64 {
    tiers[name].as_u64().unwrap_or_else(|| panic!("no {name} in {tiers}"))
}

/// The number of slots, once none is being read into; each is free or holds an expert.
fn slots(cluster: &Cluster) -> u64 {
    wait_for("every slot to be free or to hold an expert", SOON, || {
        let tiers = tiers(cluster);
        let [slots, free, resident, loads] =
            ["slots", "slots_free", "experts_resident", "loads_in_flight"]
                .map(|name| count(&tiers, name));
        (free + resident == slots && loads == 0).then_some(slots)
    })
}
