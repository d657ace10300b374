//! The image of deploy/Dockerfile and the cluster of deploy/compose.yaml on a real engine, and what probes hear.

mod bill;
mod cluster;
mod image;
mod probes;
mod rights;
mod update;

use std::path::PathBuf;

use shimmer_coordinator::sampler::Sampling;
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    compose::Compose,
    engine::Engine,
    in_process::InProcess,
    models::TinyModel,
    workload::{Job, Outcome},
};
use tempfile::TempDir;

/// The engine, or why the test that asks ends here.
fn engine() -> Option<Engine> {
    Engine::find().map_err(|reason| println!("skipped: containers: {reason}")).ok()
}

/// A model, its container and what an undisturbed run gives.
struct Bench {
    model: TinyModel,
}

impl Bench {
    fn new() -> Self {
        Self { model: TinyModel::new(Preset::Glm4Moe) }
    }

    fn container(&self) -> PathBuf {
        self.model.container(NumericClass::default())
    }

    fn expected(&self, jobs: &[Job]) -> Vec<Outcome> {
        let run = InProcess::start(&self.container());
        jobs.iter().map(|job| run.run(job)).collect()
    }

    /// A project with this model; the directory holds its rules.
    fn compose(&self) -> Option<(Compose, TempDir)> {
        let engine = engine()?;
        let rules = TempDir::new().unwrap();
        match Compose::new(&engine, &self.container(), rules.path()) {
            Ok(compose) => Some((compose, rules)),
            Err(reason) => {
                println!("skipped: compose: {reason}");
                None
            }
        }
    }
}

/// A sampled answer of so many tokens, of its own by the seed.
fn job(seed: u64, max_tokens: u32) -> Job {
    let sampling = Sampling { temperature: 0.9, seed, ..Sampling::default() };
    Job { prompt: vec![7, 77, 3, u32::try_from(seed % 50).unwrap()], max_tokens, sampling }
}
