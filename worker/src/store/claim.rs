//! Claims: what an assignment changes. The plan for everything that is claimed gives each layer its slots and its pinned
//! experts; those are read here, the others when work wants them.

use std::{
    sync::{
        Arc,
        atomic::Ordering::Relaxed,
        mpsc::{self, Receiver, Sender},
    },
    time::{Duration, Instant},
};

use super::{
    Claim, LoadProgress, NoProgress, StoreError, WantedLayer,
    layer::{Layer, LayerState},
    tiered::Shared,
};
use crate::{
    io::{ReadDone, ReadError, ReadJob, ReadSink, SlabReader},
    memory::SlotMemory,
    placement::{LayerPlan, OwnedLayer, TierPlan, plan},
    residency::{Demand, Load, Ticket},
    tier_counters::TierCounters,
};

/// Time that works under way get to give slots back: far more than a work takes.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(10);

/// Claimed experts, by layer.
#[derive(Debug)]
pub(super) struct TieredClaim {
    layers: Vec<(Arc<Layer>, Vec<u32>)>,
}

impl Claim for TieredClaim {}

impl Drop for TieredClaim {
    fn drop(&mut self) {
        for (layer, experts) in &self.layers {
            let mut state = layer.lock();
            experts.iter().for_each(|&expert| state.slots.unclaim(expert));
            layer.changed(state);
        }
    }
}

impl Shared {
    /// Claims experts, gives slots to layers and reads what the plan pins. The caller holds `claiming`.
    pub(super) fn claim(
        &self,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<TieredClaim, StoreError> {
        let plan = self.plan(wanted)?;
        let claim = self.count(wanted);
        match self.apply(&plan, wanted, progress) {
            Ok(()) => Ok(claim),
            Err(error) => {
                drop(claim);
                // The others get back what the claim would have cost them, as far as that can be had.
                if let Err(error) = self.plan(&[]).and_then(|p| self.apply(&p, &[], &NoProgress)) {
                    tracing::warn!(%error, "restoring what is pinned after a failed claim");
                }
                Err(error)
            }
        }
    }

    /// Gives slots and pins as planned.
    fn apply(
        &self,
        plan: &TierPlan,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<(), StoreError> {
        self.tiered.store(!plan.all_resident(), Relaxed);
        self.planned.store(plan.bytes(), Relaxed);
        self.promise(plan.bytes());
        self.unpin(plan);
        self.make_room(plan)?;
        self.grow(plan)?;
        self.pin(plan, wanted, progress)
    }

    /// What everything that is or will be claimed gets.
    pub(super) fn plan(&self, wanted: &[WantedLayer]) -> Result<TierPlan, StoreError> {
        let absent = self.container.absent_layers();
        for WantedLayer { layer, experts } in wanted {
            let known = |&expert: &u32| {
                !absent.contains(layer) && self.container.expert_entry(*layer, expert).is_ok()
            };
            if let Some(&expert) = experts.iter().find(|expert| !known(expert)) {
                return Err(StoreError::NoSuchExpert { layer: *layer, expert });
            }
        }
        let owned: Vec<OwnedLayer> = self
            .layers()
            .filter_map(|layer| {
                let state = layer.lock();
                let wanted = wanted.iter().find(|wanted| wanted.layer == layer.layer);
                let is_wanted = |expert: &u32| {
                    wanted.is_some_and(|wanted| wanted.experts.binary_search(expert).is_ok())
                };
                let experts: Vec<u32> = (0..layer.experts)
                    .filter(|expert| state.slots.is_claimed(*expert) || is_wanted(expert))
                    .collect();
                (!experts.is_empty()).then_some(OwnedLayer {
                    layer: layer.layer,
                    stride: layer.bytes(1),
                    experts,
                })
            })
            .collect();
        let usage = self.history.as_ref().and_then(|history| history.earlier.as_ref());
        let uses = usage.map(|usage| move |layer, expert| usage.of(layer, expert));
        let uses = uses.as_ref().map(|uses| uses as &dyn Fn(u32, u32) -> u64);
        Ok(plan(&owned, &self.budget, &self.options, uses)?)
    }

    fn count(&self, wanted: &[WantedLayer]) -> TieredClaim {
        let mut layers = Vec::with_capacity(wanted.len());
        for WantedLayer { layer, experts } in wanted {
            let layer = self.planned(*layer);
            let mut state = layer.lock();
            experts.iter().for_each(|&expert| state.slots.claim(expert));
            layers.push((Arc::clone(layer), experts.clone()));
        }
        TieredClaim { layers }
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

    /// Takes slots that the plan does not give, as far as other layers need their bytes.
    fn make_room(&self, plan: &TierPlan) -> Result<(), StoreError> {
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
            let deadline = Instant::now() + IN_USE_TIMEOUT;
            let mut state = layer.lock();
            while state.slots.attached() > cap {
                let held = layer.bytes(state.slots.attached());
                state = layer.wait_until(state, deadline).ok_or(StoreError::InUse {
                    layer: layer.layer,
                    held,
                    wanted: layer.bytes(cap),
                })?;
            }
        }
        Ok(())
    }

    /// Gives layers the slots that they lack, the new ones of a layer in one mapping.
    pub(super) fn grow(&self, plan: &TierPlan) -> Result<(), StoreError> {
        for planned in &plan.layers {
            let layer = self.planned(planned.layer);
            let missing = slots(planned).saturating_sub(layer.lock().slots.cap());
            if missing == 0 {
                continue;
            }
            let failed = |source| StoreError::Map {
                layer: layer.layer,
                bytes: layer.bytes(missing),
                source,
            };
            let mut memories = layer.take_back(missing);
            let new = missing - memories.len();
            match self.allocator.map_slots(layer.stride, new) {
                Ok(new) => memories.extend(new),
                Err(source) => {
                    layer.give_back(memories);
                    return Err(failed(source));
                }
            }
            let mut state = layer.lock();
            state.slots.attach(memories);
            layer.changed(state);
        }
        Ok(())
    }

    /// Pins what the plan pins, and reads what of that is not there. Progress is told for the experts of this claim.
    fn pin(
        &self,
        plan: &TierPlan,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<(), StoreError> {
        let (ended, ends) = mpsc::channel();
        let mut loads = Loads { shared: self, ended, ends, reader: None, under_way: 0 };
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

/// Reads of a claim that are under way.
struct Loads<'a> {
    shared: &'a Shared,
    ended: Sender<Ended>,
    ends: Receiver<Ended>,
    reader: Option<Arc<dyn SlabReader>>,
    under_way: usize,
}

/// The end of one read: whose it was, and the bytes to tell.
type Ended = Result<u64, (u32, u32, ReadError)>;

impl Loads<'_> {
    /// Pins an expert; if it is not there, its read is begun.
    fn pin(
        &mut self,
        layer: &Arc<Layer>,
        expert: u32,
        told: bool,
        progress: &dyn LoadProgress,
    ) -> Result<(), StoreError> {
        /// Enough for every backend to have work while the ends are told.
        const UNDER_WAY_MAX: usize = 64;
        if progress.cancelled() {
            return self.stop(StoreError::Cancelled);
        }
        while self.under_way >= UNDER_WAY_MAX {
            self.hear(progress)?;
        }
        let told = if told { layer.bytes(1) } else { 0 };
        let Some(job) = self.reserve(layer, expert) else {
            if told > 0 {
                progress.loaded(told);
            }
            return Ok(());
        };
        let reader = match &self.reader {
            Some(reader) => Arc::clone(reader),
            None => match self.shared.reader() {
                Ok(reader) => Arc::clone(self.reader.insert(reader)),
                Err(error) => {
                    let mut state = layer.lock();
                    state.slots.fail(Ticket::from_bits(job.token), job.memory);
                    layer.changed(state);
                    return self.stop(error);
                }
            },
        };
        self.under_way += 1;
        let counters = Arc::clone(&self.shared.counters);
        counters.read_begins();
        let sink: Arc<dyn ReadSink> = Arc::new(PinSink {
            layer: Arc::clone(layer),
            counters,
            told,
            ended: self.ended.clone(),
        });
        reader.submit(vec![job], &sink);
        Ok(())
    }

    /// Pins the expert if it is there, else gives the read that brings it. Reads and works of others end, so that the wait
    /// for a slot does, too.
    fn reserve(&self, layer: &Arc<Layer>, expert: u32) -> Option<ReadJob> {
        let mut state = layer.lock();
        loop {
            if state.slots.set_pinned(expert, true) {
                return None;
            }
            if let Some(load) = place(&mut state, expert) {
                let evicted = u64::from(load.evicted.is_some());
                self.shared.counters.evictions_claim.fetch_add(evicted, Relaxed);
                let token = load.ticket.to_bits();
                return Some(ReadJob { layer: layer.layer, expert, memory: load.memory, token });
            }
            state = layer.wait(state);
        }
    }

    /// Waits for the end of one read.
    fn hear(&mut self, progress: &dyn LoadProgress) -> Result<(), StoreError> {
        let ended = self.ends.recv().expect("the loads keep a sender themselves");
        self.under_way -= 1;
        match ended {
            Ok(0) => Ok(()),
            Ok(bytes) => {
                progress.loaded(bytes);
                Ok(())
            }
            Err((layer, expert, error)) => {
                self.stop(StoreError::Read { layer, expert, source: Box::new(error) })
            }
        }
    }

    fn finish(&mut self, progress: &dyn LoadProgress) -> Result<(), StoreError> {
        while self.under_way > 0 {
            if progress.cancelled() {
                return self.stop(StoreError::Cancelled);
            }
            self.hear(progress)?;
        }
        Ok(())
    }

    /// Waits for what is under way, so that nothing of a failed claim goes on after it.
    fn stop(&mut self, error: StoreError) -> Result<(), StoreError> {
        while self.under_way > 0 {
            drop(self.ends.recv().expect("the loads keep a sender themselves"));
            self.under_way -= 1;
        }
        Err(error)
    }
}

/// Room for an expert that is to be pinned: what nobody claims goes first, then what the cache can best do without.
fn place(state: &mut LayerState, expert: u32) -> Option<Load<SlotMemory>> {
    if state.slots.loading(expert).is_some() {
        return None;
    }
    state.slots.place(expert).or_else(|| match state.slots.demand(expert) {
        Demand::Load(load) => Some(load),
        Demand::Full | Demand::Loading(_) => None,
        Demand::Hit(_) => unreachable!("the caller has looked"),
    })
}

/// Where the read of one pinned expert ends.
struct PinSink {
    layer: Arc<Layer>,
    counters: Arc<TierCounters>,
    told: u64,
    ended: Sender<Ended>,
}

impl ReadSink for PinSink {
    fn done(&self, done: ReadDone) {
        let ReadDone { job, outcome } = done;
        self.counters.read_ended(outcome.as_ref().ok());
        let ticket = Ticket::from_bits(job.token);
        let mut state = self.layer.lock();
        let ended = match outcome {
            Ok(_) => {
                let (expert, _) = state.slots.complete(ticket, job.memory);
                state.slots.set_pinned(expert, true);
                Ok(self.told)
            }
            Err(error) => {
                state.slots.fail(ticket, job.memory);
                Err((job.layer, job.expert, error))
            }
        };
        self.layer.changed(state);
        // The claim waits for every end.
        drop(self.ended.send(ended));
    }
}

#[cfg(test)]
mod tests;
