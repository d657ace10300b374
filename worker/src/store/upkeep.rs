//! What is done to the slots between works: pins follow use, and the cache gives memory back when it is short and takes it
//! again.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use super::{
    StoreError,
    layer::{Layer, LayerState},
    tiered::Shared,
};
use crate::guard::{CacheBytes, Decision};

/// Works between two looks at the memory of the process. A look reads a few files of the kernel, 0.1 ms; that many works
/// with reads take far more than ten.
const GUARD_WORKS: u64 = 128;

/// Works of a layer between two looks at what is pinned there.
pub(super) const RE_PIN_WORKS: u64 = 64;

/// Experts that change places at one look.
const RE_PIN_SWAPS: usize = 4;

impl Shared {
    /// Looks after a layer when a work has ended: what is pinned there may have cooled.
    pub(super) fn after_work(&self, state: &mut LayerState) {
        if !self.tiered.load(Relaxed) || !state.slots.time().is_multiple_of(RE_PIN_WORKS) {
            return;
        }
        // Not while a claim pins what its plan says.
        if let Ok(_no_claim) = self.claiming.try_lock() {
            let swaps = state.slots.re_pin(RE_PIN_SWAPS).len() as u64;
            self.counters.repins.fetch_add(swaps, Relaxed);
        }
    }

    /// Asks the guard, once in a while, and does what it says. Called without locks, after a work.
    pub(super) fn watch(&self) {
        let Some(guard) = self.guard.as_ref().filter(|_| self.tiered.load(Relaxed)) else { return };
        if !(self.works.fetch_add(1, Relaxed) + 1).is_multiple_of(GUARD_WORKS) {
            return;
        }
        let mut cache = CacheBytes { planned: self.planned.load(Relaxed), ..CacheBytes::default() };
        for layer in self.layers() {
            let state = layer.lock();
            cache.now += layer.bytes(state.slots.cap());
            cache.least += layer.bytes(least(&state));
            cache.slot = cache.slot.max(layer.bytes(1));
        }
        match guard.check(cache) {
            Decision::Keep => {}
            Decision::Shrink(bytes) => {
                self.shrink(bytes);
            }
            Decision::Grow(bytes) => match self.regrow(bytes) {
                Ok(0) => {}
                Ok(grown) => tracing::info!(bytes = grown, "the cache of experts grows again"),
                Err(error) => tracing::warn!(%error, "growing the cache of experts again"),
            },
        }
    }

    /// Tells the guard how many bytes of slots there will be. The caller holds `claiming`.
    pub(super) fn promise(&self, bytes: u64) {
        let before = self.promised.swap(bytes, Relaxed);
        if let Some(guard) = &self.guard {
            guard.promised(before, bytes);
        }
    }

    /// Gives up to `bytes` of slots back to the layers that lack most of what the plan gives them. The bytes given.
    fn regrow(&self, bytes: u64) -> Result<u64, StoreError> {
        let Ok(_no_claim) = self.claiming.try_lock() else { return Ok(0) };
        let shape = self.shape();
        // Lazy claims may have taken slots that no plan knows.
        let bytes = bytes.min(self.unclaimed_bytes(&shape));
        let plan = self.plan(&[])?;
        let mut missing: Vec<usize> = Vec::with_capacity(plan.layers.len());
        for planned in &plan.layers {
            let slots = planned.pinned.len() + planned.cache_slots as usize;
            let cap = self.layer(planned.layer).map_or(slots, |layer| layer.lock().slots.cap());
            missing.push(slots.saturating_sub(cap));
        }
        let (mut given, mut grown) = (vec![0; missing.len()], 0);
        while let Some(index) =
            (0..missing.len()).max_by_key(|&index| missing[index] - given[index])
        {
            let stride = plan.layers[index].stride;
            if missing[index] == given[index] || grown + stride > bytes {
                break;
            }
            given[index] += 1;
            grown += stride;
        }
        let given = plan.layers.iter().zip(given).filter(|(_, given)| *given > 0);
        let growth = given
            .filter_map(|(planned, given)| Some((Arc::clone(self.layer(planned.layer)?), given)));
        let promised = self.promised.load(Relaxed);
        self.promise(promised + grown);
        self.grow(growth.collect()).inspect_err(|_| self.promise(promised))?;
        drop(shape);
        Ok(grown)
    }

    /// Takes slots of the cache out of use until they make up `bytes`, from the layer that has most to spare each time.
    /// Slots that are in use go when they come back. Bytes given back or about to be.
    pub(super) fn shrink(&self, bytes: u64) -> u64 {
        // A claim counts on the slots that its plan has given out.
        let Ok(_no_claim) = self.claiming.try_lock() else { return 0 };
        let _no_lazy_claim = self.shape();
        let mut layers: Vec<(&Arc<Layer>, usize, usize)> = self
            .layers()
            .map(|layer| {
                let state = layer.lock();
                let cap = state.slots.cap();
                (layer, cap, cap.saturating_sub(least(&state)))
            })
            .collect();
        let mut taken = 0;
        while taken < bytes {
            let most = layers.iter_mut().max_by_key(|(layer, _, spare)| (*spare, layer.layer));
            let Some((layer, cap, spare)) = most.filter(|(_, _, spare)| *spare > 0) else { break };
            *cap -= 1;
            *spare -= 1;
            taken += layer.bytes(1);
        }
        for (layer, cap, _) in layers {
            let state = layer.lock();
            if cap < state.slots.cap() {
                layer.shrink_to(state, cap, &self.counters.evictions_shrink);
            }
        }
        if taken > 0 {
            self.promise(self.promised.load(Relaxed).saturating_sub(taken));
            self.counters.guard_shrinks.fetch_add(1, Relaxed);
            tracing::warn!(bytes = taken, "memory is short; the cache of experts was made smaller");
        }
        taken
    }
}

/// Slots that a layer cannot do without: those of pinned experts, and one for the others if there are any.
pub(super) fn least(state: &LayerState) -> usize {
    let pinned = state.slots.counts().pinned;
    pinned + usize::from(state.slots.claimed() > pinned)
}

#[cfg(test)]
mod tests;
