//! Lazy claims: experts that a worker stands in for, read when work wants them.
//!
//! A lazy claim waits for nobody: not for a drive, not for works, not for a claim that is being loaded. It takes slots that
//! nobody counts on, or one of those that are there.

use std::{
    slice,
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
};

use super::{Shape, TieredClaim};
use crate::store::{StoreError, WantedLayer, layer::Layer, tiered::Shared, upkeep::least};

impl Shared {
    /// Claims experts of one layer without reading any.
    pub(in crate::store) fn adopt(
        self: &Arc<Self>,
        wanted: &WantedLayer,
    ) -> Result<TieredClaim, StoreError> {
        self.check_known(slice::from_ref(wanted))?;
        let mut shape = self.shape();
        let layer = self.planned(wanted.layer);
        // First, so that a claim that pins in this layer now leaves a slot.
        let mut claim = self.count(slice::from_ref(wanted), true);
        let placed = self.make_place(layer, &wanted.experts, &shape);
        // Slots and pins are no longer as planned, whether that was of use or not.
        shape.plan = None;
        drop(shape);
        match placed {
            Ok(()) => {
                self.tiered.store(true, Relaxed);
                Ok(claim)
            }
            Err(error) => {
                // Nobody gets more by that.
                claim.store = Weak::new();
                Err(error)
            }
        }
    }

    /// Sees to it that a layer has a slot for each of these experts, as far as there is memory that nobody counts on; and at
    /// least one that is not pinned, which is enough for any work.
    fn make_place(
        &self,
        layer: &Arc<Layer>,
        experts: &[u32],
        shape: &Shape,
    ) -> Result<(), StoreError> {
        let state = layer.lock();
        let new = experts.iter().filter(|&&expert| state.slots.claims(expert) == 1).count();
        let claimed = state.slots.claimed();
        let cap = state.slots.cap();
        drop(state);
        let most = self.options.cap.map_or(usize::MAX, |most| most.max(1) as usize);
        let lack = claimed.saturating_sub(cap).min(new).min(most.saturating_sub(cap));
        let fits = usize::try_from(self.spare_bytes(shape) / layer.bytes(1)).unwrap_or(usize::MAX);
        let more = lack.min(fits);
        if more > 0 {
            match self.give(layer, more) {
                Ok(()) => self.promise(self.promised.load(Relaxed) + layer.bytes(more)),
                Err(error) => tracing::warn!(%error, "slots for experts of another worker"),
            }
        }
        if claimed <= layer.lock().slots.cap() || has_open_slot(layer) {
            return Ok(());
        }
        if self.move_slot_to(layer, &|donor| spare_slots(donor) > 0)? {
            return Ok(());
        }
        let unpinned = layer.lock().slots.unpin_coldest();
        if unpinned.is_some() {
            return Ok(());
        }
        // A layer without any slot: one that has two or more can do with one less.
        if self.move_slot_to(layer, &|donor| part_with_one(donor))? {
            return Ok(());
        }
        Err(StoreError::NoSlot { layer: layer.layer, bytes: layer.bytes(1) })
    }

    /// Bytes of slots that nobody counts on. None while the guard keeps the cache below its plan, because then they are not
    /// there.
    fn spare_bytes(&self, shape: &Shape) -> u64 {
        let short = self.promised.load(Relaxed) < self.planned.load(Relaxed);
        if short { 0 } else { self.unclaimed_bytes(shape) }
    }

    /// Takes idle slots of layers that can do without, the one with most slots first, until they make up one of this layer,
    /// and gives it that one. Whether that could be done; if not, the slots are back where they were.
    fn move_slot_to(
        &self,
        layer: &Arc<Layer>,
        may_give: &dyn Fn(&Layer) -> bool,
    ) -> Result<bool, StoreError> {
        let mut donors: Vec<(usize, &Arc<Layer>)> = self
            .layers()
            .filter(|donor| donor.layer != layer.layer)
            .map(|donor| (donor.lock().slots.cap(), donor))
            .collect();
        donors.sort_by_key(|(cap, donor)| (std::cmp::Reverse(*cap), donor.layer));
        let mut taken: Vec<(&Arc<Layer>, usize)> = Vec::new();
        let mut bytes = 0;
        for (_, donor) in donors {
            let mut memories = Vec::new();
            while bytes < layer.bytes(1) && may_give(donor) {
                let Some(memory) = donor.lock().slots.take_idle() else { break };
                memories.push(memory);
                bytes += donor.bytes(1);
            }
            if !memories.is_empty() {
                taken.push((donor, memories.len()));
                donor.give_back(memories);
            }
        }
        if bytes < layer.bytes(1) {
            for (donor, count) in taken {
                self.give(donor, count)?;
            }
            return Ok(false);
        }
        let evicted: usize = taken.iter().map(|(_, count)| count).sum();
        self.counters.evictions_claim.fetch_add(evicted as u64, Relaxed);
        self.give(layer, 1)?;
        let promised = self.promised.load(Relaxed).saturating_sub(bytes);
        self.promise(promised + layer.bytes(1));
        Ok(true)
    }
}

/// Whether some slot of the layer is not pinned.
fn has_open_slot(layer: &Layer) -> bool {
    let counts = layer.lock().slots.counts();
    counts.cap > counts.pinned
}

/// Slots that the layer can do without as it is.
fn spare_slots(layer: &Layer) -> usize {
    let state = layer.lock();
    state.slots.cap().saturating_sub(least(&state))
}

/// Takes as many pins that the layer can do with a slot less. Whether it can.
fn part_with_one(layer: &Layer) -> bool {
    let mut state = layer.lock();
    if state.slots.cap() < 2 {
        return false;
    }
    while state.slots.counts().pinned + 2 > state.slots.cap() {
        if state.slots.unpin_coldest().is_none() {
            break;
        }
    }
    true
}

#[cfg(test)]
mod tests;
