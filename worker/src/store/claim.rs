//! Claims: what an assignment changes. The plan for everything that is claimed gives each layer its slots and its pinned
//! experts; those are read here, the others when work wants them.
//!
//! A claim may take minutes, and others go on meanwhile: works, and lazy claims, which take slots of their own. Slots change
//! only under the lock of [`Shape`], which nobody holds while waiting; what a claim still has to take stands there.

mod adopt;
mod loads;
mod replan;

use std::{
    sync::{Arc, MutexGuard, PoisonError, Weak, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use super::{
    Claim, LoadProgress, NoProgress, StoreError, WantedLayer, layer::Layer, tiered::Shared,
};
use crate::{
    placement::{LayerPlan, OwnedLayer, TierPlan, plan},
    tier_options::{PinSetting, RamSetting, TierOptions},
};
use loads::Loads;
pub(super) use replan::Replans;

/// Time that works under way get to give slots back: far more than a work takes.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(10);

/// Claimed experts, by layer.
#[derive(Debug)]
pub(super) struct TieredClaim {
    layers: Vec<(Arc<Layer>, Vec<u32>)>,
    /// Read when wanted.
    lazy: bool,
    store: Weak<Shared>,
}

impl Claim for TieredClaim {}

impl Drop for TieredClaim {
    fn drop(&mut self) {
        for (layer, experts) in &self.layers {
            let mut state = layer.lock();
            experts.iter().for_each(|&expert| state.unclaim(expert, self.lazy));
            layer.changed(state);
        }
        // Those that stay may get more.
        if let Some(store) = self.store.upgrade() {
            store.replan_soon();
        }
    }
}

/// How the memory for experts is divided.
#[derive(Debug, Default)]
pub(super) struct Shape {
    /// Bytes of slots that a claim under way has still to take.
    growing: u64,
    /// What the layers were last given their slots for; none once something else has changed them.
    plan: Option<TierPlan>,
}

/// Slots that layers get.
type Growth = Vec<(Arc<Layer>, usize)>;

impl Shared {
    /// Claims experts, gives slots to layers and reads what the plan pins. The caller holds `claiming`.
    pub(super) fn claim(
        self: &Arc<Self>,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<TieredClaim, StoreError> {
        self.check_known(wanted)?;
        let mut shape = self.shape();
        let plan = self.plan(wanted)?;
        let claim = self.count(wanted, false);
        let growth = self.reshape(&plan, &mut shape);
        drop(shape);
        match self.settle(&plan, growth, wanted, progress) {
            Ok(()) => Ok(claim),
            Err(error) => {
                drop(claim);
                // The others get back what the claim would have cost them, as far as that can be had.
                if let Err(error) = self.apply_again(&NoProgress) {
                    tracing::warn!(%error, "restoring what is pinned after a failed claim");
                }
                Err(error)
            }
        }
    }

    /// Plans what is claimed now, and gives slots and pins as planned. The caller holds `claiming`.
    fn apply_again(&self, progress: &dyn LoadProgress) -> Result<(), StoreError> {
        let mut shape = self.shape();
        let plan = self.plan(&[])?;
        let growth = self.reshape(&plan, &mut shape);
        drop(shape);
        self.settle(&plan, growth, &[], progress)
    }

    /// What may change slots.
    pub(super) fn shape(&self) -> MutexGuard<'_, Shape> {
        self.shape.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes pins and slots that the plan does not give. The slots that layers lack are counted and given later, once
    /// works have given theirs back.
    fn reshape(&self, plan: &TierPlan, shape: &mut Shape) -> Growth {
        self.tiered.store(!plan.all_resident() || self.waits_for_lazy(plan), Relaxed);
        self.planned.store(plan.bytes(), Relaxed);
        self.promise(plan.bytes());
        self.unpin(plan);
        self.lower_caps(plan);
        let lack = |planned: &LayerPlan| {
            let layer = self.planned(planned.layer);
            let missing = slots(planned).saturating_sub(layer.lock().slots.cap());
            (missing > 0).then(|| (Arc::clone(layer), missing))
        };
        let growth: Growth = plan.layers.iter().filter_map(lack).collect();
        shape.growing = growth.iter().map(|(layer, slots)| layer.bytes(*slots)).sum();
        shape.plan = Some(plan.clone());
        growth
    }

    /// Gives the slots that [`Self::reshape`] has counted, and pins.
    fn settle(
        &self,
        plan: &TierPlan,
        growth: Growth,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<(), StoreError> {
        let waited = self.wait_for_slots();
        let mut shape = self.shape();
        shape.growing = 0;
        let settled = waited.and_then(|()| self.grow(growth));
        if settled.is_err() {
            shape.plan = None;
        }
        drop(shape);
        settled?;
        self.pin(plan, wanted, progress).inspect_err(|_| self.shape().plan = None)
    }

    fn check_known(&self, wanted: &[WantedLayer]) -> Result<(), StoreError> {
        let absent = self.container.absent_layers();
        for WantedLayer { layer, experts } in wanted {
            let known = |&expert: &u32| {
                !absent.contains(layer) && self.container.expert_entry(*layer, expert).is_ok()
            };
            if let Some(&expert) = experts.iter().find(|expert| !known(expert)) {
                return Err(StoreError::NoSuchExpert { layer: *layer, expert });
            }
        }
        Ok(())
    }

    /// What everything that is or will be claimed gets.
    ///
    /// Settings that must hold for each assignment may be too tight for two at a time: while a coordinator changes from one
    /// to the next, or two coordinators place experts differently. Then the experts are cached until one of them goes.
    pub(super) fn plan(&self, wanted: &[WantedLayer]) -> Result<TierPlan, StoreError> {
        let all = self.owned(wanted, true);
        let refused = match self.plan_as(&all, &self.options) {
            Ok(plan) => return Ok(plan),
            Err(refused) => refused,
        };
        let alone = self.owned(wanted, false);
        if alone == all || self.plan_as(&alone, &self.options).is_err() {
            return Err(refused);
        }
        let (ram, pin) = (RamSetting::Auto, PinSetting::Auto);
        let relaxed = TierOptions { ram, pin, cap: None, ..self.options.clone() };
        let plan = self.plan_as(&all, &relaxed).map_err(|_| refused)?;
        tracing::warn!(
            "several assignments do not fit beside each other as the settings say; until the earlier one is released their experts are read when they are wanted"
        );
        Ok(plan)
    }

    fn plan_as(&self, owned: &[OwnedLayer], options: &TierOptions) -> Result<TierPlan, StoreError> {
        let usage = self.history.as_ref().and_then(|history| history.earlier.as_ref());
        let uses = usage.map(|usage| move |layer, expert| usage.of(layer, expert));
        let uses = uses.as_ref().map(|uses| uses as &dyn Fn(u32, u32) -> u64);
        Ok(plan(owned, &self.budget, options, uses)?)
    }

    /// Experts by layer: those wanted, and those that are claimed if they count.
    fn owned(&self, wanted: &[WantedLayer], claimed: bool) -> Vec<OwnedLayer> {
        let of_layer = |layer: &Arc<Layer>| {
            let state = layer.lock();
            let wanted = wanted.iter().find(|wanted| wanted.layer == layer.layer);
            let is_wanted = |expert: &u32| {
                wanted.is_some_and(|wanted| wanted.experts.binary_search(expert).is_ok())
            };
            let experts: Vec<u32> = (0..layer.experts)
                .filter(|expert| claimed && state.slots.is_claimed(*expert) || is_wanted(expert))
                .collect();
            let stride = layer.bytes(1);
            (!experts.is_empty()).then_some(OwnedLayer { layer: layer.layer, stride, experts })
        };
        self.layers().filter_map(of_layer).collect()
    }

    /// Whether the plan pins experts that are not read before work wants them.
    fn waits_for_lazy(&self, plan: &TierPlan) -> bool {
        plan.layers.iter().any(|planned| {
            let state = self.planned(planned.layer).lock();
            let mut pinned = planned.pinned.iter();
            pinned.any(|&expert| {
                state.slots.is_claimed(expert)
                    && state.is_lazy(expert)
                    && !state.slots.is_resident(expert)
            })
        })
    }

    fn count(self: &Arc<Self>, wanted: &[WantedLayer], lazy: bool) -> TieredClaim {
        let mut layers = Vec::with_capacity(wanted.len());
        for WantedLayer { layer, experts } in wanted {
            let layer = self.planned(*layer);
            let mut state = layer.lock();
            experts.iter().for_each(|&expert| state.claim(expert, lazy));
            layers.push((Arc::clone(layer), experts.clone()));
        }
        TieredClaim { layers, lazy, store: Arc::downgrade(self) }
    }

    /// Takes the pins of experts that the plan does not pin.
    fn unpin(&self, plan: &TierPlan) {
        for layer in &plan.layers {
            let LayerPlan { pinned, .. } = layer;
            let layer = self.planned(layer.layer);
            let mut state = layer.lock();
            for expert in (0..layer.experts).filter(|expert| pinned.binary_search(expert).is_err())
            {
                state.slots.set_pinned(expert, false);
            }
            layer.changed(state);
        }
    }

    /// Takes slots that the plan does not give, as far as other layers need their bytes. Those in use go when they come
    /// back.
    fn lower_caps(&self, plan: &TierPlan) {
        let target = |layer: &Layer| {
            let planned = plan.layers.iter().find(|planned| planned.layer == layer.layer);
            planned.map_or(0, slots)
        };
        let total: u64 = self
            .layers()
            .map(|layer| layer.bytes(layer.lock().slots.attached().max(target(layer))))
            .sum();
        let mut excess = total.saturating_sub(self.budget.bytes);
        for layer in self.layers() {
            let state = layer.lock();
            let surplus = state.slots.attached().saturating_sub(target(layer));
            let give =
                surplus.min(usize::try_from(excess.div_ceil(layer.bytes(1))).unwrap_or(surplus));
            if give == 0 {
                continue;
            }
            excess = excess.saturating_sub(layer.bytes(give));
            let cap = state.slots.attached() - give;
            layer.shrink_to(state, cap, &self.counters.evictions_claim);
        }
    }

    /// Waits until works have given back the slots above what layers may have.
    fn wait_for_slots(&self) -> Result<(), StoreError> {
        for layer in self.layers() {
            let deadline = Instant::now() + IN_USE_TIMEOUT;
            let mut state = layer.lock();
            while state.slots.attached() > state.slots.cap() {
                let held = layer.bytes(state.slots.attached());
                let wanted = layer.bytes(state.slots.cap());
                let in_use = StoreError::InUse { layer: layer.layer, held, wanted };
                state = layer.wait_until(state, deadline).ok_or(in_use)?;
            }
        }
        Ok(())
    }

    /// Gives layers slots, the new ones of a layer in one mapping. The caller holds the shape.
    pub(super) fn grow(&self, growth: Growth) -> Result<(), StoreError> {
        growth.into_iter().try_for_each(|(layer, slots)| self.give(&layer, slots))
    }

    fn give(&self, layer: &Layer, count: usize) -> Result<(), StoreError> {
        let mut memories = layer.take_back(count);
        let new = count - memories.len();
        match self.allocator.map_slots(layer.stride, new) {
            Ok(new) => memories.extend(new),
            Err(source) => {
                layer.give_back(memories);
                let bytes = layer.bytes(count);
                return Err(StoreError::Map { layer: layer.layer, bytes, source });
            }
        }
        let mut state = layer.lock();
        state.slots.attach(memories);
        layer.changed(state);
        Ok(())
    }

    /// Bytes of slots that nobody has and no claim counts on.
    pub(super) fn unclaimed_bytes(&self, shape: &Shape) -> u64 {
        let held = |layer: &Arc<Layer>| {
            let state = layer.lock();
            layer.bytes(state.slots.attached().max(state.slots.cap()))
        };
        let held: u64 = self.layers().map(held).sum();
        self.budget.bytes.saturating_sub(held.saturating_add(shape.growing))
    }

    /// Pins what the plan pins, and reads what of that is not there. Progress is told for the experts of this claim.
    fn pin(
        &self,
        plan: &TierPlan,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<(), StoreError> {
        let mut loads = Loads::new(self);
        for LayerPlan { layer, pinned, .. } in &plan.layers {
            let of_claim = wanted.iter().find(|wanted| wanted.layer == *layer);
            for &expert in pinned {
                let told = of_claim.is_some_and(|w| w.experts.binary_search(&expert).is_ok());
                loads.pin(self.planned(*layer), expert, told, progress)?;
            }
        }
        loads.finish(progress)
    }

    fn planned(&self, layer: u32) -> &Arc<Layer> {
        self.layer(layer).expect("a plan names layers of the container")
    }
}

/// All slots that a plan gives a layer.
fn slots(plan: &LayerPlan) -> usize {
    plan.pinned.len() + plan.cache_slots as usize
}

#[cfg(test)]
mod tests;
