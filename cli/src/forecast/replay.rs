//! A trace through the workers' memory: which experts of it would have to be read. The slots are the worker's own
//! [`LayerResidency`], with its rules of eviction; hints are not replayed.

use std::collections::{BTreeMap, BTreeSet};

use shimmer_coordinator::placement::Placement;
use shimmer_worker::residency::{Demand, LayerResidency, Rules};

use super::{PlacedWorker, Trace};

/// A slot that holds nothing: what would lie in it does not matter here.
#[derive(Debug)]
struct Slot;

/// The memory of one worker for experts.
#[derive(Debug)]
pub(crate) struct Memory {
    layers: BTreeMap<u32, LayerResidency<Slot>>,
    vram: BTreeSet<(u32, u32)>,
}

impl Memory {
    /// As after a start: pinned experts are there, the cache is empty. `experts` has the number of experts of each layer.
    pub(crate) fn new(
        worker: &PlacedWorker,
        placement: &Placement,
        index: usize,
        experts: &[(u32, u32)],
        rules: Rules,
    ) -> Self {
        let owned: BTreeMap<u32, Vec<u32>> = placement.owned_by(index).into_iter().collect();
        let layers = worker.tiers.layers.iter().map(|plan| {
            let count = experts.iter().find(|(layer, _)| *layer == plan.layer).map_or(0, |of| of.1);
            let mut layer = LayerResidency::new(count, rules);
            layer.attach((0..plan.pinned.len() + plan.cache_slots as usize).map(|_| Slot));
            for expert in owned.get(&plan.layer).into_iter().flatten() {
                layer.claim(*expert);
            }
            for expert in &plan.pinned {
                if let Some(load) = layer.place(*expert) {
                    layer.complete(load.ticket, load.memory);
                }
                layer.set_pinned(*expert, true);
            }
            (plan.layer, layer)
        });
        Self { layers: layers.collect(), vram: worker.vram.clone() }
    }

    /// Uses experts in one work; those that had to be read.
    fn work(&mut self, layer: u32, experts: &[u32]) -> u32 {
        let Some(slots) = self.layers.get_mut(&layer) else { return 0 };
        slots.begin_work(experts);
        let mut misses = 0;
        for &expert in experts {
            loop {
                match slots.demand(expert) {
                    Demand::Hit(grant) => {
                        slots.release(grant);
                        break;
                    }
                    Demand::Load(load) => {
                        misses += 1;
                        slots.complete(load.ticket, load.memory);
                    }
                    Demand::Loading(_) | Demand::Full => {
                        unreachable!("loads end at once and leases with their use")
                    }
                }
            }
        }
        slots.end_work();
        misses
    }
}

/// What one worker does for one layer of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Rows of each expert that a processor computes.
    pub(crate) rows: Vec<u32>,
    /// The same on GPUs.
    pub(crate) gpu_rows: Vec<u32>,
    /// Experts that are read.
    pub(crate) misses: u32,
}

/// One layer of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerLoad {
    pub(crate) layer: u32,
    /// By worker; those without work are empty.
    pub(crate) shares: Vec<Share>,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Replayed {
    pub(crate) rows: u32,
    pub(crate) layers: Vec<LayerLoad>,
}

/// Sends a trace through the memories, as they are. First choices compute, as in a cluster in which nobody is late.
pub(crate) fn replay(
    trace: &Trace,
    placement: &Placement,
    memories: &mut [Memory],
) -> Vec<Replayed> {
    let steps = trace.steps().map(|lines| {
        let layers = lines.iter().map(|line| {
            let mut shares = vec![Share::default(); memories.len()];
            let mut wanted: Vec<Vec<u32>> = vec![Vec::new(); memories.len()];
            for &(expert, rows) in &line.experts {
                let Some(worker) = placement.owner(line.layer, expert) else { continue };
                if memories[worker].vram.contains(&(line.layer, expert)) {
                    shares[worker].gpu_rows.push(rows);
                } else {
                    shares[worker].rows.push(rows);
                    wanted[worker].push(expert);
                }
            }
            for ((memory, experts), share) in memories.iter_mut().zip(&wanted).zip(&mut shares) {
                if !experts.is_empty() {
                    share.misses = memory.work(line.layer, experts);
                }
            }
            LayerLoad { layer: line.layer, shares }
        });
        Replayed { rows: lines[0].rows, layers: layers.collect() }
    });
    steps.collect()
}
