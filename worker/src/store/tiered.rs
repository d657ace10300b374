//! Memory in slots, with the container's files behind it.
//!
//! Each layer has slots for one slab each: some hold experts that are never evicted, the others are a cache. If everything
//! that is claimed fits, all of it is pinned; then nothing is read after the claim, and no thread but those that compute
//! exists. Otherwise missing experts are read when work wants them, or before by prefetchers.
//!
//! While work runs on a layer, prefetchers change nothing there. Reads that they began before are not waited for, unless
//! the work wants that very expert or its slot: they write into memory that nobody else has.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use shimmer_model::Container;
use tokio::sync::watch;

use super::{
    Claim, ExpertStore, LoadProgress, Round, StoreError, WantedLayer,
    claim::{Replans, Shape},
    history::{History, Keeper},
    layer::Layer,
    round::TieredRound,
};
use crate::{
    Error,
    budget::RamBudget,
    guard::MemoryGuard,
    io::{ReadDone, ReadError, ReadJob, SlabReader},
    memory::SlotAllocator,
    prefetch::Pilots,
    residency::Rules,
    tier_counters::{TierCounters, TierSnapshot},
    tier_options::TierOptions,
};

/// Opens what slabs are read with. Called when experts have to be read and no reader is open.
pub struct OpenReader(pub Box<dyn Fn() -> Result<Arc<dyn SlabReader>, Error> + Send + Sync>);

impl fmt::Debug for OpenReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenReader")
    }
}

/// What a store is made of.
#[derive(Debug)]
pub struct TierSetup {
    /// Whose experts.
    pub container: Arc<Container>,
    /// How they are held.
    pub options: TierOptions,
    /// Memory for them.
    pub budget: RamBudget,
    /// What is counted.
    pub counters: Arc<TierCounters>,
    /// Where slots come from.
    pub allocator: SlotAllocator,
    /// What experts are read with.
    pub open: OpenReader,
    /// Asked between works whether the memory is still there. Stores of one process share it.
    pub guard: Option<Arc<MemoryGuard>>,
}

/// Memory with a drive behind it.
#[derive(Debug)]
pub struct TieredStore {
    shared: Arc<Shared>,
    _history: Option<Keeper>,
}

/// What the store shares with its claims, rounds and threads.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) container: Arc<Container>,
    pub(super) options: TierOptions,
    pub(super) budget: RamBudget,
    pub(crate) counters: Arc<TierCounters>,
    pub(super) allocator: SlotAllocator,
    /// How often experts were used, in earlier runs as well.
    pub(super) history: Option<History>,
    /// By layer; none for layers without routed experts.
    layers: Vec<Option<Arc<Layer>>>,
    open: OpenReader,
    /// Closed while everything is in memory.
    reader: Mutex<Option<Arc<dyn SlabReader>>>,
    /// Held while a claim is made and loaded; only lazy claims are made then.
    pub(super) claiming: Mutex<()>,
    /// Held while slots are given and taken, for moments.
    pub(super) shape: Mutex<Shape>,
    pub(super) replans: Replans,
    /// Threads that read ahead, while there is something to read.
    pilots: Mutex<Option<Pilots>>,
    /// Whether there are any.
    hints: watch::Sender<bool>,
    /// Whether claimed experts exist that need not be in memory.
    pub(super) tiered: AtomicBool,
    /// Watches the memory of the process.
    pub(super) guard: Option<Arc<MemoryGuard>>,
    /// Bytes of slots that the guard counts on.
    pub(super) promised: AtomicU64,
    /// Bytes of slots that the plan gives.
    pub(super) planned: AtomicU64,
    /// Works since the start, for the guard's turn.
    pub(super) works: AtomicU64,
}

impl TieredStore {
    /// A store without experts.
    ///
    /// # Errors
    /// The container's files or the usage history cannot be opened as the settings say.
    pub fn new(setup: TierSetup) -> Result<Self, Error> {
        let TierSetup { container, options, budget, counters, allocator, open, guard } = setup;
        let rules = Rules { policy: options.policy, guard: options.evict_guard };
        let model = container.config();
        let mut layers = vec![None; model.layers.len()];
        for (layer, experts) in model.moe_layers() {
            let stride = container.expert_layout(layer)?.slab_bytes();
            layers[layer as usize] = Some(Layer::new(layer, experts, stride, rules));
        }
        let reader = Mutex::new(Some(open.0()?));
        let history = match &options.usage {
            Some(file) => Some(History::open(file.clone(), container.digest())?),
            None => None,
        };
        let shared = Shared {
            container,
            options,
            budget,
            counters,
            allocator,
            history,
            layers,
            open,
            reader,
            claiming: Mutex::default(),
            shape: Mutex::default(),
            replans: Replans::default(),
            pilots: Mutex::default(),
            hints: watch::Sender::new(false),
            tiered: AtomicBool::new(false),
            guard,
            promised: AtomicU64::new(0),
            planned: AtomicU64::new(0),
            works: AtomicU64::new(0),
        };
        let shared = Arc::new(shared);
        let keeper = Keeper::start(&shared)?;
        Ok(Self { shared, _history: keeper })
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn layer(&self, layer: u32) -> &Arc<Layer> {
        self.shared.layer(layer).expect("work names layers that have experts")
    }
}

impl ExpertStore for TieredStore {
    fn claim(
        &self,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<Box<dyn Claim>, StoreError> {
        let _one_at_a_time = self.shared.claiming.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.cancelled() {
            return Err(StoreError::Cancelled);
        }
        let claim = self.shared.claim(wanted, progress)?;
        self.shared.follow_plan()?;
        Ok(Box::new(claim))
    }

    fn adopt(&self, wanted: &WantedLayer) -> Result<Box<dyn Claim>, StoreError> {
        Ok(Box::new(self.shared.adopt(wanted)?))
    }

    fn round<'a>(&'a self, layer: u32, experts: &'a [u32]) -> Box<dyn Round + 'a> {
        Box::new(TieredRound::open(&self.shared, self.layer(layer), experts))
    }

    fn ready_round<'a>(&'a self, layer: u32, experts: &'a [u32]) -> Option<Box<dyn Round + 'a>> {
        let round = TieredRound::open_ready(&self.shared, self.layer(layer), experts)?;
        Some(Box::new(round))
    }

    fn is_ready(&self, layer: u32, experts: &[u32]) -> bool {
        let Some(layer) = self.shared.layer(layer) else { return true };
        let state = layer.lock();
        experts.iter().all(|&expert| expert >= layer.experts || state.slots.is_resident(expert))
    }

    fn wants_hints(&self) -> watch::Receiver<bool> {
        self.shared.hints.subscribe()
    }

    fn hint(&self, layer: u32, experts: &[u32]) {
        let Some(layer) = self.shared.layer(layer) else { return };
        if let Some(pilots) = &*self.shared.pilots() {
            let state = layer.lock();
            let time = state.slots.time();
            // Most hints of a warm cache end here: waking a thread to drop them takes longer than the work that it helps.
            let wanted: Vec<u32> = experts
                .iter()
                .copied()
                .filter(|&expert| match state.slots.prefetch_refused(expert) {
                    Some(skip) => {
                        self.shared.skipped(skip);
                        false
                    }
                    None => true,
                })
                .collect();
            drop(state);
            pilots.hint(&self.shared.counters, layer.layer, time, &wanted);
        }
    }

    fn shrink(&self, bytes: u64) -> u64 {
        self.shared.shrink(bytes)
    }

    fn save_usage(&self) {
        self.shared.save_usage();
    }

    fn resident_bytes(&self) -> u64 {
        self.shared.layers().map(|layer| layer.bytes(layer.lock().slots.counts().resident)).sum()
    }

    fn snapshot(&self) -> TierSnapshot {
        let mut snapshot = self.shared.counters.snapshot();
        let memory = self.shared.allocator.snapshot();
        snapshot.mappings = memory.mappings;
        snapshot.locked_bytes = memory.locked_bytes;
        snapshot.placement_refused = memory.placement_refused;
        let pages = self.shared.allocator.recent_survey();
        snapshot.huge_bytes = pages.huge_bytes;
        snapshot.off_node_pages = pages.off_node_pages;
        for layer in self.shared.layers() {
            let counts = layer.lock().slots.counts();
            snapshot.experts_resident += counts.resident as u64;
            snapshot.experts_pinned += counts.pinned as u64;
            snapshot.slots += counts.cap as u64;
            snapshot.slots_free += counts.free as u64;
            snapshot.slot_bytes += layer.bytes(counts.cap);
        }
        snapshot
    }
}

impl Drop for TieredStore {
    fn drop(&mut self) {
        self.shared.replans.close();
        let pilots = self.shared.pilots().take();
        drop(pilots);
    }
}

impl Shared {
    fn pilots(&self) -> MutexGuard<'_, Option<Pilots>> {
        self.pilots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts or ends what only a store needs that reads while it serves. The caller holds `claiming`.
    pub(super) fn follow_plan(self: &Arc<Self>) -> Result<(), StoreError> {
        let tiered = self.tiered.load(Relaxed);
        let wanted = tiered && self.options.pilot_workers > 0;
        let mut pilots = self.pilots();
        if wanted && pilots.is_none() {
            let shared = Arc::clone(self);
            let follow = move |hint| shared.follow(hint);
            *pilots = Some(Pilots::start(self.options.pilot_workers, follow)?);
        }
        let idle = if wanted { None } else { pilots.take() };
        drop(pilots);
        drop(idle);
        self.hints.send_if_modified(|told| std::mem::replace(told, wanted) != wanted);
        if !tiered {
            self.close_reader();
        }
        Ok(())
    }

    /// A layer that has experts.
    pub(super) fn layer(&self, layer: u32) -> Option<&Arc<Layer>> {
        self.layers.get(layer as usize)?.as_ref()
    }

    /// All layers that have experts.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Arc<Layer>> {
        self.layers.iter().flatten()
    }

    /// The reader; opens one if there is none. A failure is logged here.
    pub(super) fn reader(&self) -> Result<Arc<dyn SlabReader>, StoreError> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = &*reader {
            return Ok(Arc::clone(open));
        }
        let opened = self.open.0().map_err(|error| {
            tracing::error!(%error, "opening the container's expert files");
            StoreError::Reader(Box::new(error))
        })?;
        Ok(Arc::clone(reader.insert(opened)))
    }

    /// Reads on the calling thread; without a reader the job has failed.
    pub(super) fn read_here(&self, job: ReadJob) -> ReadDone {
        match self.reader() {
            Ok(reader) => reader.read_here(job),
            Err(_logged) => closed(job),
        }
    }

    #[cfg(test)]
    pub(super) fn has_reader(&self) -> bool {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Ends the reader's threads, once the last read has ended.
    fn close_reader(&self) {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(reader);
    }
}

/// The end of a job that nobody can read.
pub(super) fn closed(job: ReadJob) -> ReadDone {
    let (layer, expert) = (job.layer, job.expert);
    ReadDone { job, outcome: Err(ReadError::Closed { layer, expert }) }
}

#[cfg(test)]
mod tests;
