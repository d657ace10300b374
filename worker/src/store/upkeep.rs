//! What is done to the slots between works: the cache gives memory back.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use super::{
    layer::{Layer, LayerState},
    tiered::Shared,
};

impl Shared {
    /// Takes slots of the cache out of use until they make up `bytes`, from the layer that has most to spare each time.
    /// Slots that are in use go when they come back. Bytes given back or about to be.
    pub(super) fn shrink(&self, bytes: u64) -> u64 {
        // A claim counts on the slots that its plan has given out.
        let Ok(_no_claim) = self.claiming.try_lock() else { return 0 };
        let mut layers: Vec<(&Arc<Layer>, usize, usize)> = self
            .layers()
            .map(|layer| {
                let state = layer.lock();
                let cap = state.slots.cap();
                (layer, cap, cap.saturating_sub(least(&state, layer.experts)))
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
            let mut state = layer.lock();
            if cap < state.slots.cap() {
                let before = state.slots.counts().resident;
                let spare = state.slots.shrink(cap);
                let evicted = before - state.slots.counts().resident;
                self.counters.evictions_shrink.fetch_add(evicted as u64, Relaxed);
                layer.changed(state);
                layer.give_back(spare);
            }
        }
        if taken > 0 {
            self.counters.guard_shrinks.fetch_add(1, Relaxed);
            tracing::warn!(bytes = taken, "memory is short; the cache of experts was made smaller");
        }
        taken
    }
}

/// Slots that a layer cannot do without: those of pinned experts, and one for the others if there are any.
fn least(state: &LayerState, experts: u32) -> usize {
    let pinned = state.slots.counts().pinned;
    let claimed = (0..experts).filter(|&expert| state.slots.is_claimed(expert)).count();
    pinned + usize::from(claimed > pinned)
}
