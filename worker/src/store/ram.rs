//! All experts in memory: one huge-page arena per layer and load, with a fixed stride, so that mappings stay few.
//!
//! An arena belongs to the claims that use it. When none does it stays as a cache, so that a coordinator that comes back
//! finds its experts; it is dropped when another claim needs the room.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use shimmer_kernels::Arena;
use shimmer_model::Container;

use super::{Claim, ExpertStore, Lease, LoadProgress, SlabMemory, StoreError, WantedLayer};
use crate::budget::RamBudget;

/// The experts of a layer that came with one load.
struct Batch {
    layer: u32,
    experts: Vec<u32>,
    stride: usize,
    arena: Arena,
}

impl Batch {
    fn total_bytes(&self) -> u64 {
        self.arena.len() as u64
    }
}

impl SlabMemory for Batch {
    fn bytes(&self) -> &[u8] {
        self.arena.as_slice()
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("layer", &self.layer)
            .field("experts", &self.experts.len())
            .finish_non_exhaustive()
    }
}

/// Keeps batches in use.
#[derive(Debug)]
struct RamClaim {
    _batches: Vec<Arc<Batch>>,
}

impl Claim for RamClaim {}

/// The batch that holds an expert, and which of its slabs it is.
type Place = (Arc<Batch>, usize);

#[derive(Debug, Default)]
struct Resident {
    batches: Vec<Arc<Batch>>,
    /// By layer and expert: the batch that holds the expert, and its place there.
    table: Vec<Vec<Option<Place>>>,
}

impl Resident {
    fn find(&self, layer: u32, expert: u32) -> Option<&Place> {
        self.table.get(layer as usize)?.get(expert as usize)?.as_ref()
    }

    fn bytes(&self) -> u64 {
        self.batches.iter().map(|batch| batch.total_bytes()).fold(0, u64::saturating_add)
    }

    /// A batch that nobody claims or leases is held by `batches` once and by the table once for each of its experts.
    fn in_use(batch: &Arc<Batch>) -> bool {
        Arc::strong_count(batch) > 1 + batch.experts.len()
    }

    fn insert(&mut self, batch: &Arc<Batch>) {
        let layer = batch.layer as usize;
        if self.table.len() <= layer {
            self.table.resize(layer + 1, Vec::new());
        }
        for (slot, &expert) in batch.experts.iter().enumerate() {
            let experts = &mut self.table[layer];
            if experts.len() <= expert as usize {
                experts.resize(expert as usize + 1, None);
            }
            experts[expert as usize] = Some((Arc::clone(batch), slot));
        }
        self.batches.push(Arc::clone(batch));
    }

    fn remove(&mut self, index: usize) -> u64 {
        let batch = self.batches.swap_remove(index);
        for &expert in &batch.experts {
            self.table[batch.layer as usize][expert as usize] = None;
        }
        batch.total_bytes()
    }

    /// Drops unused batches until `needed` more bytes fit, keeping those that `keep` names. The bytes still held.
    fn make_room(&mut self, needed: u64, budget: u64, keep: &BTreeSet<*const Batch>) -> u64 {
        let mut held = self.bytes();
        let mut index = 0;
        while held.saturating_add(needed) > budget && index < self.batches.len() {
            let batch = &self.batches[index];
            if Self::in_use(batch) || keep.contains(&Arc::as_ptr(batch)) {
                index += 1;
            } else {
                held -= self.remove(index);
            }
        }
        held
    }
}

/// The store without a disk tier.
#[derive(Debug)]
pub struct RamStore {
    container: Arc<Container>,
    budget: RamBudget,
    load_threads: usize,
    resident: RwLock<Resident>,
    /// One load at a time: a second claim of the same experts must find them, not read them again.
    loading: Mutex<()>,
}

impl RamStore {
    /// A store without experts.
    pub fn new(container: Arc<Container>, budget: RamBudget, load_threads: usize) -> Self {
        Self {
            container,
            budget,
            load_threads: load_threads.max(1),
            resident: RwLock::default(),
            loading: Mutex::default(),
        }
    }

    /// Splits what is wanted into batches that hold some of it, and experts that are missing.
    fn survey(&self, wanted: &[WantedLayer]) -> (Vec<Arc<Batch>>, Vec<WantedLayer>) {
        let resident = self.resident.read().unwrap_or_else(PoisonError::into_inner);
        let mut present: Vec<Arc<Batch>> = Vec::new();
        let mut missing = Vec::new();
        for WantedLayer { layer, experts } in wanted {
            let mut absent = Vec::new();
            for &expert in experts {
                match resident.find(*layer, expert) {
                    None => absent.push(expert),
                    Some((batch, _)) if present.iter().any(|known| Arc::ptr_eq(known, batch)) => {}
                    Some((batch, _)) => present.push(Arc::clone(batch)),
                }
            }
            if !absent.is_empty() {
                missing.push(WantedLayer { layer: *layer, experts: absent });
            }
        }
        (present, missing)
    }

    fn stride(&self, layer: u32, experts: &[u32]) -> Result<usize, StoreError> {
        let unknown = |expert| StoreError::NoSuchExpert { layer, expert };
        let last = experts.last().copied().unwrap_or(0);
        let layout = self.container.expert_layout(layer).map_err(|_| unknown(last))?;
        match experts.iter().find(|&&expert| self.container.expert_entry(layer, expert).is_err()) {
            Some(&expert) => Err(unknown(expert)),
            None => Ok(layout.slab_bytes()),
        }
    }

    /// Reads experts of several layers into new arenas, on several threads.
    fn read(
        &self,
        missing: Vec<(WantedLayer, usize)>,
        progress: &dyn LoadProgress,
    ) -> Result<Vec<Arc<Batch>>, StoreError> {
        let mut batches = Vec::with_capacity(missing.len());
        for (WantedLayer { layer, experts }, stride) in missing {
            let bytes = stride * experts.len();
            let arena =
                Arena::new(bytes).map_err(|source| StoreError::Map { layer, bytes, source })?;
            batches.push(Batch { layer, experts, stride, arena });
        }
        let slots = batches.iter_mut().flat_map(|batch| {
            let layer = batch.layer;
            let slabs = batch.arena.as_mut_slice().chunks_exact_mut(batch.stride);
            batch.experts.iter().zip(slabs).map(move |(&expert, slab)| (layer, expert, slab))
        });
        let slots = Mutex::new(slots);
        let failure = Mutex::new(None);
        let stop = AtomicBool::new(false);
        let fail = |error| {
            stop.store(true, Ordering::Relaxed);
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        };
        let work = || {
            while !stop.load(Ordering::Relaxed) {
                if progress.cancelled() {
                    return fail(StoreError::Cancelled);
                }
                let next = slots.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((layer, expert, slab)) = next else { return };
                match self.container.read_expert(layer, expert, slab) {
                    Ok(()) => progress.loaded(slab.len() as u64),
                    Err(source) => {
                        return fail(StoreError::Read { layer, expert, source: Box::new(source) });
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.load_threads {
                scope.spawn(work);
            }
            work();
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(batches.into_iter().map(Arc::new).collect()),
        }
    }
}

impl ExpertStore for RamStore {
    fn claim(
        &self,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<Box<dyn Claim>, StoreError> {
        let _one_at_a_time = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut batches, missing) = self.survey(wanted);
        let missing = missing
            .into_iter()
            .map(|layer| self.stride(layer.layer, &layer.experts).map(|stride| (layer, stride)))
            .collect::<Result<Vec<_>, _>>()?;
        let experts: u64 = missing.iter().map(|(layer, _)| layer.experts.len() as u64).sum();
        let needed = missing
            .iter()
            .map(|(layer, stride)| (layer.experts.len() as u64).saturating_mul(*stride as u64))
            .fold(0, u64::saturating_add);
        let keep = batches.iter().map(Arc::as_ptr).collect();
        let RamBudget { bytes: budget, term } = self.budget;
        let held = {
            let mut resident = self.resident.write().unwrap_or_else(PoisonError::into_inner);
            resident.make_room(needed, budget, &keep)
        };
        if held.saturating_add(needed) > budget {
            return Err(StoreError::Budget { experts, needed, resident: held, budget, term });
        }
        for (layer, expert) in
            wanted.iter().flat_map(|w| w.experts.iter().map(move |&expert| (w.layer, expert)))
        {
            let resident = self.resident.read().unwrap_or_else(PoisonError::into_inner);
            if let Some((batch, _)) = resident.find(layer, expert) {
                progress.loaded(batch.stride as u64);
            }
        }
        let loaded = self.read(missing, progress)?;
        let mut resident = self.resident.write().unwrap_or_else(PoisonError::into_inner);
        for batch in &loaded {
            resident.insert(batch);
        }
        batches.extend(loaded);
        Ok(Box::new(RamClaim { _batches: batches }))
    }

    fn lease(&self, layer: u32, expert: u32) -> Result<Lease, StoreError> {
        let resident = self.resident.read().unwrap_or_else(PoisonError::into_inner);
        let (batch, slot) =
            resident.find(layer, expert).ok_or(StoreError::NotResident { layer, expert })?;
        let memory: Arc<dyn SlabMemory> = Arc::<Batch>::clone(batch);
        Ok(Lease::new(memory, slot * batch.stride, batch.stride))
    }

    fn resident_bytes(&self) -> u64 {
        self.resident.read().unwrap_or_else(PoisonError::into_inner).bytes()
    }
}

#[cfg(test)]
mod tests;
