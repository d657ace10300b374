//! What the settings mean: which experts are pinned, and how many cache slots each layer gets.

use super::{
    error::PlanError,
    tiers::{Candidate, ExpertId, place},
};
use crate::{
    budget::{BudgetTerm, RamBudget},
    tier_options::{PinSetting, RamSetting, TierOptions},
};

/// The experts of one layer that a worker owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedLayer {
    /// Layer in the model.
    pub layer: u32,
    /// Bytes of one slab, and of the slot that it lies in.
    pub stride: u64,
    /// Experts, ascending, each once.
    pub experts: Vec<u32>,
}

impl OwnedLayer {
    fn bytes(&self, experts: usize) -> u64 {
        self.stride.saturating_mul(experts as u64)
    }
}

/// What one layer gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerPlan {
    /// Layer in the model.
    pub layer: u32,
    /// Bytes of one slot.
    pub stride: u64,
    /// Experts that are read at start and never evicted, ascending.
    pub pinned: Vec<u32>,
    /// Slots that the others share; 0 when there are no others.
    pub cache_slots: u32,
}

/// What a worker does with the memory for experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierPlan {
    /// As owned, in the same order.
    pub layers: Vec<LayerPlan>,
    /// Experts owned.
    pub experts: u64,
    /// Experts pinned.
    pub pinned: u64,
    /// Bytes of the owned experts.
    pub owned_bytes: u64,
    /// Bytes of the pinned ones.
    pub pinned_bytes: u64,
    /// Bytes of the cache slots.
    pub cache_bytes: u64,
    /// What keeps more from being resident; none if every expert is.
    pub binding: Option<BudgetTerm>,
}

impl TierPlan {
    /// Whether nothing is ever read after the start.
    pub fn all_resident(&self) -> bool {
        self.pinned == self.experts
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.pinned_bytes + self.cache_bytes
    }
}

/// Plans the memory of owned experts within a budget. `usage` gives how often an expert was used in earlier runs; absent
/// if that was never recorded.
///
/// * What fits is pinned as a whole, unless `cap` or `pin` says otherwise.
/// * `cap` gives each layer that many slots, and `pin` comes on top: nothing if it is not given.
/// * Without `cap`, `pin` comes first: as given, or half of the budget for experts that were used before. The cache takes
///   the rest, with an equal number of slots in each layer as far as layers have experts for them.
/// * A layer whose slots would hold all of its experts has them pinned instead.
pub fn plan(
    owned: &[OwnedLayer],
    budget: &RamBudget,
    options: &TierOptions,
    usage: Option<&dyn Fn(u32, u32) -> u64>,
) -> Result<TierPlan, PlanError> {
    let RamBudget { bytes: room, term } = *budget;
    let needed = sum(owned.iter().map(|layer| layer.bytes(layer.experts.len())));
    let experts = owned.iter().map(|layer| layer.experts.len() as u64).sum();
    if options.ram == RamSetting::All && needed > room {
        return Err(PlanError::All { experts, needed, room, term });
    }
    let automatic = options.cap.is_none() && options.pin == PinSetting::Auto;
    if options.ram == RamSetting::All || automatic && needed <= room {
        return Ok(finish(owned, &vec![usize::MAX; owned.len()], Vec::new(), term));
    }
    let cache = least_cache(owned, options.cap);
    let cache_bytes = sum(owned.iter().zip(&cache).map(|(layer, &slots)| layer.bytes(slots)));
    let pin_bytes = match (options.pin, options.cap) {
        (PinSetting::Bytes(bytes), _) => bytes,
        (PinSetting::All, _) => room.saturating_sub(cache_bytes),
        (PinSetting::Auto, Some(_)) => 0,
        (PinSetting::Auto, None) => (room / 2).min(room.saturating_sub(cache_bytes)),
    };
    let pinned = pinned(owned, options, pin_bytes, usage);
    let unpinned: Vec<usize> =
        owned.iter().zip(&pinned).map(|(layer, pins)| layer.experts.len() - pins.len()).collect();
    let pinned_bytes = sum(owned.iter().zip(&pinned).map(|(layer, pins)| layer.bytes(pins.len())));
    // Pins may have left a layer with fewer experts than slots.
    let least: Vec<usize> =
        cache.iter().zip(&unpinned).map(|(slots, rest)| *slots.min(rest)).collect();
    let least_bytes = sum(owned.iter().zip(&least).map(|(layer, &slots)| layer.bytes(slots)));
    if pinned_bytes.saturating_add(least_bytes) > room {
        return Err(refusal(owned, budget, options.cap, &unpinned, pinned_bytes, least_bytes));
    }
    match options.cap {
        Some(_) => Ok(finish(owned, &least, pinned, BudgetTerm::Cap)),
        None => {
            let slots = level(owned, &unpinned, room - pinned_bytes);
            Ok(finish(owned, &slots, pinned, term))
        }
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// Slots that each layer must have.
fn least_cache(owned: &[OwnedLayer], cap: Option<u32>) -> Vec<usize> {
    let slots = cap.map_or(1, |cap| cap.max(1) as usize);
    owned.iter().map(|layer| slots.min(layer.experts.len())).collect()
}

/// Pinned experts by layer, ascending.
fn pinned(
    owned: &[OwnedLayer],
    options: &TierOptions,
    bytes: u64,
    usage: Option<&dyn Fn(u32, u32) -> u64>,
) -> Vec<Vec<u32>> {
    // Of experts that were never used, a cache knows soon which ones are worth their memory.
    let used_only = options.pin == PinSetting::Auto;
    let candidates = owned.iter().flat_map(|layer| {
        layer.experts.iter().map(|&expert| Candidate {
            id: ExpertId { layer: layer.layer, expert },
            bytes: layer.stride,
            usage: usage.map_or(0, |usage| usage(layer.layer, expert)),
        })
    });
    let candidates = candidates.filter(|candidate| !used_only || candidate.usage > 0).collect();
    let mut of_layer = vec![Vec::new(); owned.len()];
    let placed = place(candidates, &[], bytes);
    let mut ids = placed.pinned;
    ids.sort_unstable();
    for ExpertId { layer, expert } in ids {
        let index = owned.iter().position(|owned| owned.layer == layer);
        of_layer[index.expect("candidates come from these layers")].push(expert);
    }
    of_layer
}

/// The same number of slots in each layer, as many as fit, then one more in each of the first layers.
fn level(owned: &[OwnedLayer], unpinned: &[usize], room: u64) -> Vec<usize> {
    let slots = |level: usize| unpinned.iter().map(move |&rest| rest.min(level));
    let bytes = |level| sum(owned.iter().zip(slots(level)).map(|(layer, n)| layer.bytes(n)));
    let most = unpinned.iter().copied().max().unwrap_or(0);
    let level = largest(most, |level| bytes(level) <= room);
    let mut left = room.saturating_sub(bytes(level));
    let mut of_layer: Vec<usize> = slots(level).collect();
    for ((layer, of_layer), &rest) in owned.iter().zip(&mut of_layer).zip(unpinned) {
        if *of_layer < rest && layer.stride <= left {
            *of_layer += 1;
            left -= layer.stride;
        }
    }
    of_layer
}

/// The largest number up to `most` that fits, where every smaller one fits too; 0 if none does.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = high - (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Names what is too large.
fn refusal(
    owned: &[OwnedLayer],
    budget: &RamBudget,
    cap: Option<u32>,
    unpinned: &[usize],
    pinned: u64,
    needed: u64,
) -> PlanError {
    let RamBudget { bytes: room, term } = *budget;
    let layers = unpinned.iter().filter(|rest| **rest > 0).count();
    let with = |slots: usize| {
        sum(owned.iter().zip(unpinned).map(|(layer, &rest)| layer.bytes(rest.min(slots))))
    };
    let fits = |slots: usize| pinned.saturating_add(with(slots)) <= room;
    if let Some(cap) = cap {
        let fitting = largest(cap as usize, fits);
        if fitting > 0 {
            let fits = u32::try_from(fitting).unwrap_or(u32::MAX);
            return PlanError::Cap { cap, layers, needed, pinned, room, term, fits };
        }
    }
    // One slot for each layer, were nothing pinned.
    let least = sum(owned.iter().map(|layer| layer.bytes(layer.experts.len().min(1))));
    if least > room {
        let layers = owned.iter().filter(|layer| !layer.experts.is_empty()).count();
        return PlanError::Minimum { layers, needed: least, room, term };
    }
    PlanError::Pins { pinned, cache: least, room, term }
}

fn finish(
    owned: &[OwnedLayer],
    slots: &[usize],
    mut pinned: Vec<Vec<u32>>,
    binding: BudgetTerm,
) -> TierPlan {
    pinned.resize(owned.len(), Vec::new());
    let layers: Vec<LayerPlan> = owned
        .iter()
        .zip(slots)
        .zip(pinned)
        .map(|((owned, &slots), pins)| {
            let rest = owned.experts.len() - pins.len();
            let all = slots >= rest;
            LayerPlan {
                layer: owned.layer,
                stride: owned.stride,
                pinned: if all { owned.experts.clone() } else { pins },
                cache_slots: if all { 0 } else { u32::try_from(slots).unwrap_or(u32::MAX) },
            }
        })
        .collect();
    let pinned = layers.iter().map(|layer| layer.pinned.len() as u64).sum();
    let experts = owned.iter().map(|layer| layer.experts.len() as u64).sum();
    TierPlan {
        experts,
        pinned,
        owned_bytes: sum(owned.iter().map(|layer| layer.bytes(layer.experts.len()))),
        pinned_bytes: sum(layers.iter().map(|layer| layer.stride * layer.pinned.len() as u64)),
        cache_bytes: sum(layers.iter().map(|layer| layer.stride * u64::from(layer.cache_slots))),
        binding: (pinned < experts).then_some(binding),
        layers,
    }
}

#[cfg(test)]
mod tests;
