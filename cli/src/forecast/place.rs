//! Experts onto hosts and tiers: the coordinator's placement, then each worker's own plan.

use std::collections::BTreeSet;

use shimmer_coordinator::{
    heat::HeatMap,
    placement::{Candidate, PlacedLayer, Placement, PlacementError, PlacementInput},
};
use shimmer_worker::{
    TierOptions,
    budget::{BudgetTerm, RamBudget},
    placement::{
        Candidate as Wanted, ExpertId, Gpu, OwnedLayer, PlanError, TierPlan, place as tiers, plan,
    },
};

use super::Hosts;

/// A cluster that is not there yet.
#[derive(Debug)]
pub(crate) struct Placed {
    /// Who owns what.
    pub(crate) placement: Placement,
    /// In the order of the file.
    pub(crate) workers: Vec<PlacedWorker>,
}

/// One worker of it.
#[derive(Debug)]
pub(crate) struct PlacedWorker {
    pub(crate) id: String,
    /// Number of its host.
    pub(crate) host: usize,
    /// Bytes for experts, and what limits them.
    pub(crate) budget: RamBudget,
    /// Experts in VRAM.
    pub(crate) vram: BTreeSet<(u32, u32)>,
    pub(crate) vram_bytes: u64,
    /// The others.
    pub(crate) tiers: TierPlan,
}

/// Why experts have no place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Misfit {
    #[error(transparent)]
    Placement(#[from] PlacementError),
    #[error("worker {id}: {source}")]
    Worker { id: String, source: PlanError },
}

/// Places every expert of `layers`; `budgets` and `options` are those of the workers, in the order of the file.
pub(crate) fn place(
    hosts: &Hosts,
    layers: &[PlacedLayer],
    absent: &[u32],
    budgets: &[RamBudget],
    options: &[TierOptions],
) -> Result<Placed, Misfit> {
    let candidates: Vec<Candidate> = hosts
        .workers()
        .zip(budgets)
        .map(|((host, worker), budget)| Candidate {
            id: worker.id.clone(),
            weight: worker.weight,
            absent_layers: absent.to_vec(),
            host: hosts.host[host].name.clone(),
            ram_budget_bytes: worker
                .vram
                .iter()
                .map(|vram| vram.0)
                .fold(budget.bytes, u64::saturating_add),
        })
        .collect();
    let heat = HeatMap::default();
    let input =
        PlacementInput { layers, candidates: &candidates, copies: hosts.replicas, heat: &heat };
    let placement = Placement::plan(&input)?;
    let stride = |layer: u32| {
        layers.iter().find(|known| known.layer == layer).map_or(0, |known| known.slab_bytes)
    };
    let workers = hosts.workers().zip(budgets).zip(options).enumerate().map(
        |(index, ((of, budget), options))| {
            let (host, worker) = of;
            let owned = placement.owned_by(index);
            let wanted = owned.iter().flat_map(|(layer, experts)| {
                experts.iter().map(|&expert| Wanted {
                    id: ExpertId { layer: *layer, expert },
                    bytes: stride(*layer),
                    usage: 0,
                })
            });
            let gpus: Vec<Gpu> = worker
                .vram
                .iter()
                .map(|vram| Gpu { requested: None, free: vram.0, reserve: 0, overhead: 0 })
                .collect();
            let placed = tiers(wanted.collect(), &gpus, 0);
            let vram: BTreeSet<(u32, u32)> =
                placed.gpus.iter().flatten().map(|id| (id.layer, id.expert)).collect();
            let rest: Vec<OwnedLayer> = owned
                .into_iter()
                .map(|(layer, experts)| OwnedLayer {
                    layer,
                    stride: stride(layer),
                    experts: experts.into_iter().filter(|e| !vram.contains(&(layer, *e))).collect(),
                })
                .collect();
            let tiers = plan(&rest, budget, options, None)
                .map_err(|source| Misfit::Worker { id: worker.id.clone(), source })?;
            Ok(PlacedWorker {
                id: worker.id.clone(),
                host,
                budget: *budget,
                vram,
                vram_bytes: placed.gpu_bytes.iter().sum(),
                tiers,
            })
        },
    );
    let workers = workers.collect::<Result<_, Misfit>>()?;
    Ok(Placed { placement, workers })
}

/// One worker that owns everything, with so many slots in each layer.
pub(crate) fn alone(layers: &[PlacedLayer], cap: u32) -> Result<Placed, Misfit> {
    let candidate = Candidate { id: "worker-0".to_owned(), weight: 1.0, ..Candidate::default() };
    let placement = Placement::compute(layers, &[candidate])?;
    let owned = placement.owned_by(0).into_iter().map(|(layer, experts)| {
        let stride = layers.iter().find(|known| known.layer == layer).map_or(1, |l| l.slab_bytes);
        OwnedLayer { layer, stride, experts }
    });
    let owned: Vec<OwnedLayer> = owned.collect();
    let budget = RamBudget { bytes: u64::MAX, term: BudgetTerm::Setting };
    let options = TierOptions { cap: Some(cap), ..TierOptions::default() };
    let tiers = plan(&owned, &budget, &options, None)
        .map_err(|source| Misfit::Worker { id: "worker-0".to_owned(), source })?;
    let worker = PlacedWorker {
        id: "worker-0".to_owned(),
        host: 0,
        budget,
        vram: BTreeSet::new(),
        vram_bytes: 0,
        tiers,
    };
    Ok(Placed { placement, workers: vec![worker] })
}
