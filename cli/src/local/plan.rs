//! The memory of a process with workers in it, before anything is loaded. `shimmer plan` shows it, and what is started
//! follows it.

use std::ops::Range;

use shimmer_coordinator::{
    engine::EngineMemory,
    placement::{Candidate, PlacedLayer, Placement},
};
use shimmer_model::Container;
use shimmer_worker::{
    TierOptions,
    budget::{Available, Budget, Kind, RamBudget, Term, WorkShape},
    history,
    placement::{OwnedLayer, TierPlan, plan},
};

use super::LocalError;

/// Which experts each worker of a process owns, and what it does with them.
#[derive(Debug)]
pub struct ProcessPlan {
    /// The memory of the whole process.
    pub budget: Budget,
    /// One per weight, in that order.
    pub workers: Vec<PlannedWorker>,
    /// The owner of every expert.
    pub placement: Placement,
}

/// One worker of a process.
#[derive(Debug)]
pub struct PlannedWorker {
    /// Its name in the placement.
    pub id: String,
    /// Its relative capacity.
    pub weight: f64,
    /// Its part of the bytes for experts.
    pub budget: RamBudget,
    /// What it does with them.
    pub tiers: TierPlan,
}

impl ProcessPlan {
    /// Plans a process that has all workers of these weights. `shape` is of all of their work together, `beside` is what
    /// else the process holds.
    ///
    /// # Errors
    /// The experts, or what stands beside them, do not fit as the settings want.
    pub fn new(
        container: &Container,
        weights: &[f64],
        tiers: &TierOptions,
        shape: WorkShape,
        beside: Vec<Term>,
    ) -> Result<Self, LocalError> {
        let terms = beside.into_iter().chain(shape.terms()).collect();
        let budget = Budget::new(Available::measure(), tiers.ram, terms)?;
        Self::of(container, weights, 0..weights.len(), tiers, budget)
    }

    /// Plans a process that is one of the workers of these weights.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_worker(
        container: &Container,
        weights: &[f64],
        worker: usize,
        tiers: &TierOptions,
        threads: usize,
        coordinators: usize,
    ) -> Result<Self, LocalError> {
        let budget = Budget::of_worker(container, tiers, threads, coordinators)?;
        Self::of(container, weights, worker..worker + 1, tiers, budget)
    }

    fn of(
        container: &Container,
        weights: &[f64],
        members: Range<usize>,
        tiers: &TierOptions,
        budget: Budget,
    ) -> Result<Self, LocalError> {
        let placement = place(container, weights)?;
        let owned = members
            .clone()
            .map(|worker| owned_by(container, &placement, worker))
            .collect::<Result<Vec<_>, _>>()?;
        let bytes = |owned: &Vec<OwnedLayer>| {
            owned.iter().map(|layer| layer.stride * layer.experts.len() as u64).sum()
        };
        let shares = budget.shares(&owned.iter().map(bytes).collect::<Vec<u64>>());
        let history =
            tiers.usage.as_ref().map(|file| history::load(&file.path, container.digest()));
        let history = history.transpose().map_err(shimmer_worker::Error::from)?.flatten();
        let uses = |layer, expert| history.as_ref().map_or(0, |usage| usage.of(layer, expert));
        let uses: Option<&dyn Fn(u32, u32) -> u64> =
            if history.is_some() { Some(&uses) } else { None };
        let workers = owned.iter().zip(shares).zip(members).map(|((owned, budget), index)| {
            let tiers = plan(owned, &budget, tiers, uses)?;
            Ok(PlannedWorker { id: worker_id(index), weight: weights[index], budget, tiers })
        });
        Ok(Self { budget, workers: workers.collect::<Result<_, LocalError>>()?, placement })
    }

    /// Bytes that the experts of all workers take.
    pub fn expert_bytes(&self) -> u64 {
        self.workers.iter().map(|worker| worker.tiers.bytes()).sum()
    }

    /// Anonymous memory of the process when everything is in use.
    pub fn peak_bytes(&self) -> u64 {
        self.budget.peak(self.expert_bytes())
    }
}

/// The terms of a coordinator in the same process.
pub fn engine_terms(memory: EngineMemory) -> Vec<Term> {
    let term = |name, bytes| Term { name, bytes, kind: Kind::Anonymous };
    vec![
        term("trunk", memory.trunk),
        term("KV pages", memory.kv),
        term("rows and logits", memory.buffers),
        term("tokenizer", memory.tokenizer),
    ]
}

/// The name of a worker without a configuration of its own.
pub(super) fn worker_id(index: usize) -> String {
    format!("worker-{index}")
}

fn place(container: &Container, weights: &[f64]) -> Result<Placement, LocalError> {
    let candidates: Vec<Candidate> = weights
        .iter()
        .enumerate()
        .map(|(index, &weight)| Candidate {
            id: worker_id(index),
            weight,
            absent_layers: container.absent_layers(),
            ..Candidate::default()
        })
        .collect();
    let layers: Vec<PlacedLayer> = container
        .config()
        .moe_layers()
        .map(|(layer, experts)| PlacedLayer { layer, experts, slab_bytes: 0 })
        .collect();
    Ok(Placement::compute(&layers, &candidates)?)
}

fn owned_by(
    container: &Container,
    placement: &Placement,
    worker: usize,
) -> Result<Vec<OwnedLayer>, LocalError> {
    let owned = placement.owned_by(worker).into_iter().map(|(layer, experts)| {
        let stride = container.expert_layout(layer)?.slab_bytes() as u64;
        Ok(OwnedLayer { layer, stride, experts })
    });
    owned.collect()
}
