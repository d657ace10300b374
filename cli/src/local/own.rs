//! A coordinator's own copy of the experts: a worker inside its process that nobody connects to.

use std::{fmt, sync::Arc};

use shimmer_coordinator::transport::OwnExperts;
use shimmer_kernels::Kernels;
use shimmer_model::Container;
use shimmer_proto::{
    checksum,
    expert::v1::{Assign, ExpertResult, ExpertWork, LayerExperts, WorkerError},
};
use shimmer_worker::{
    ExpertCore, ExpertSession, TierOptions, WorkerConfig,
    budget::{Budget, STEP_ROWS, Term, WorkShape},
    guard::{MemoryGuard, SystemProbe},
    store::NoProgress,
    tier_options::{NumaSetting, PinSetting, RamSetting},
};

use super::LocalError;
use crate::commands::BUILD;

/// The only assignment that its session ever has.
const EPOCH: u64 = 1;
const GENERATION: u64 = 1;

/// See the module.
pub struct OwnCopy {
    session: ExpertSession,
    layers: Vec<u32>,
}

impl OwnCopy {
    /// Makes room for `bytes` of experts; they are read when they are wanted. `beside` is what else the process will hold.
    ///
    /// # Errors
    /// The memory does not suffice, or an expert cannot be read, or is computed differently from the manifest.
    pub fn start(
        container: &Arc<Container>,
        kernels: Kernels,
        bytes: u64,
        beside: Vec<Term>,
        threads: usize,
    ) -> Result<Self, LocalError> {
        let shape = WorkShape::of(container.config(), STEP_ROWS, threads);
        let terms = beside.into_iter().chain(shape.terms()).collect();
        let available = shimmer_worker::budget::Available::measure();
        let budget = Budget::new(available, RamSetting::Bytes(bytes), terms)?;
        let tiers = TierOptions {
            ram: RamSetting::Bytes(bytes),
            // Nothing is read before it is wanted.
            pin: PinSetting::Bytes(0),
            pilot_workers: 0,
            // The trunk's threads compute.
            numa: NumaSetting::Off,
            ..TierOptions::default()
        };
        let config = WorkerConfig {
            id: "own-experts".to_owned(),
            host: String::new(),
            coordinators: 1,
            weight: 1.0,
            tiers,
            threads,
            pool: None,
            build: BUILD.to_owned(),
        };
        let guard = Arc::new(MemoryGuard::new(&budget, Box::new(SystemProbe)));
        let core =
            ExpertCore::with_budget(Arc::clone(container), kernels, config, budget.experts, guard)?;
        let mut session = core.session();
        let absent = container.absent_layers();
        let layers: Vec<LayerExperts> = container
            .config()
            .moe_layers()
            .filter(|(layer, _)| !absent.contains(layer))
            .map(|(layer, experts)| LayerExperts { layer, experts: (0..experts).collect() })
            .collect();
        let assign = Assign { epoch: EPOCH, generation: GENERATION, layers: layers.clone() };
        session.assign(&assign, &NoProgress)?;
        if let Some(layer) = layers.first().map(|of| of.layer) {
            let found = session.self_test(layer, 0)?;
            if hex::encode(&found.digest) != container.expert_entry(layer, 0)?.self_test {
                let worker = core.id().to_owned();
                return Err(LocalError::SelfTest { worker, layer, expert: 0 });
            }
        }
        Ok(Self { session, layers: layers.into_iter().map(|of| of.layer).collect() })
    }
}

impl OwnExperts for OwnCopy {
    fn layers(&self) -> Vec<u32> {
        self.layers.clone()
    }

    fn compute(&mut self, work: &ExpertWork) -> Result<ExpertResult, WorkerError> {
        let fence = work.fence;
        let mut work = work.clone();
        if let Some(fence) = &mut work.fence {
            (fence.epoch, fence.generation) = (EPOCH, GENERATION);
        }
        checksum::seal_work(&mut work);
        match self.session.work(&work) {
            Ok(result) => Ok(ExpertResult { fence, ..result }),
            Err(error) => Err(WorkerError { fence, ..error }),
        }
    }
}

impl fmt::Debug for OwnCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnCopy").field("layers", &self.layers).finish_non_exhaustive()
    }
}
