//! A store over a tiny container, with readers that can be held up and made to fail.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use shimmer_kernels::WeightFormat;
use shimmer_model::{Container, tiny::Preset};
use tempfile::TempDir;

use super::{
    Claim, ExpertStore as _, NoProgress, OpenReader, ReadyExpert, Round, StoreError, TierSetup,
    TieredStore, WantedLayer,
};
use crate::{
    budget::{BudgetTerm, RamBudget},
    io::{ReadDone, ReadError, ReadJob, ReadReport, ReadSink, SlabReader},
    memory::{MemoryOptions, SlotAllocator},
    testing,
    tier_options::{IoBackend, TierOptions},
};

/// For anything that happens in a moment.
const SOON: Duration = Duration::from_secs(20);

/// Reads from the container on threads of its own, as the test says.
#[derive(Debug)]
pub(crate) struct TestReader {
    container: Arc<Container>,
    state: Mutex<ReaderState>,
    changed: Condvar,
    pub(crate) reads: AtomicU64,
}

#[derive(Debug, Default)]
struct ReaderState {
    /// Experts whose reads fail.
    broken: BTreeSet<(u32, u32)>,
    /// Whether reads wait to be let through.
    held: bool,
    /// Reads that may pass although others are held.
    passed: BTreeSet<(u32, u32)>,
    waiting: BTreeSet<(u32, u32)>,
}

impl TestReader {
    fn change(&self, change: impl FnOnce(&mut ReaderState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Makes the reads of an expert fail from now on, or succeed again.
    pub(crate) fn set_broken(&self, layer: u32, expert: u32, broken: bool) {
        self.change(|state| {
            if broken {
                state.broken.insert((layer, expert));
            } else {
                state.broken.remove(&(layer, expert));
            }
        });
    }

    /// Holds up reads until [`Self::pass`] or [`Self::release`].
    pub(crate) fn hold(&self) {
        self.change(|state| state.held = true);
    }

    /// Lets the next read of an expert end.
    pub(crate) fn pass(&self, layer: u32, expert: u32) {
        self.change(|state| {
            state.passed.insert((layer, expert));
        });
    }

    /// Lets all reads end.
    pub(crate) fn release(&self) {
        self.change(|state| state.held = false);
    }

    /// Waits until these reads are held up.
    pub(crate) fn wait_held(&self, layer: u32, experts: &[u32]) {
        let mut state = self.state.lock().unwrap();
        let deadline = Instant::now() + SOON;
        while !experts.iter().all(|&expert| state.waiting.contains(&(layer, expert))) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(left > Duration::ZERO, "{experts:?} wanted, {:?} are read", state.waiting);
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    fn read(&self, mut job: ReadJob) -> ReadDone {
        let key = (job.layer, job.expert);
        let mut state = self.state.lock().unwrap();
        state.waiting.insert(key);
        self.changed.notify_all();
        while state.held && !state.passed.remove(&key) {
            state = self.changed.wait(state).unwrap();
        }
        state.waiting.remove(&key);
        let broken = state.broken.contains(&key);
        drop(state);
        self.reads.fetch_add(1, Relaxed);
        // What a failed read leaves behind must never be seen.
        job.memory.fill(0xee);
        if broken {
            let (layer, expert) = key;
            return ReadDone { job, outcome: Err(ReadError::Closed { layer, expert }) };
        }
        self.container.read_expert(job.layer, job.expert, &mut job.memory).unwrap();
        let bytes = job.memory.len() as u64;
        let report = ReadReport { bytes, service: Duration::from_micros(1), direct: false };
        ReadDone { job, outcome: Ok(report) }
    }
}

/// The store's handle on a reader that the test keeps.
#[derive(Debug)]
struct Handle(Arc<TestReader>);

impl SlabReader for Handle {
    fn submit(&self, jobs: Vec<ReadJob>, sink: &Arc<dyn ReadSink>) {
        for job in jobs {
            let (reader, sink) = (Arc::clone(&self.0), Arc::clone(sink));
            thread::spawn(move || sink.done(reader.read(job)));
        }
    }

    fn read_here(&self, job: ReadJob) -> ReadDone {
        self.0.read(job)
    }

    fn backend(&self) -> IoBackend {
        IoBackend::Buffered
    }
}

/// A store and what it stands on.
pub(crate) struct Bench {
    pub(crate) store: TieredStore,
    pub(crate) reader: Arc<TestReader>,
    pub(crate) container: Arc<Container>,
    /// Bytes of a slab.
    pub(crate) slab: u64,
    /// Layers with experts.
    pub(crate) layers: Vec<u32>,
    _dir: TempDir,
}

impl Bench {
    /// A store with memory for so many experts.
    pub(crate) fn new(slabs: u64, options: TierOptions) -> Self {
        Self::with(slabs, options, |_| ())
    }

    /// As [`Self::new`], over something else.
    pub(crate) fn with(
        slabs: u64,
        options: TierOptions,
        change: impl FnOnce(&mut TierSetup),
    ) -> Self {
        let (dir, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q8G64);
        let layers: Vec<u32> = container.config().moe_layers().map(|(layer, _)| layer).collect();
        let slab = container.expert_layout(layers[0]).unwrap().slab_bytes() as u64;
        let reader = Arc::new(TestReader {
            container: Arc::clone(&container),
            state: Mutex::default(),
            changed: Condvar::new(),
            reads: AtomicU64::new(0),
        });
        let opened = Arc::clone(&reader);
        let open =
            OpenReader(Box::new(move || Ok(Arc::new(Handle(Arc::clone(&opened))) as Arc<_>)));
        let budget = RamBudget { bytes: slabs * slab, term: BudgetTerm::Setting };
        let allocator = SlotAllocator::new(MemoryOptions::default());
        let mut setup = TierSetup {
            container: Arc::clone(&container),
            options,
            budget,
            counters: Arc::default(),
            allocator,
            open,
            guard: None,
        };
        change(&mut setup);
        let store = TieredStore::new(setup).unwrap();
        Self { store, reader, container, slab, layers, _dir: dir }
    }

    /// The first `experts` experts of the first `layers` layers.
    pub(crate) fn wanted(&self, layers: usize, experts: u32) -> Vec<WantedLayer> {
        let wanted = |&layer| WantedLayer { layer, experts: (0..experts).collect() };
        self.layers[..layers].iter().map(wanted).collect()
    }

    pub(crate) fn claim(&self, layers: usize, experts: u32) -> Box<dyn Claim> {
        self.store.claim(&self.wanted(layers, experts), &NoProgress).unwrap()
    }

    /// Takes experts until one call gives none; checks their bytes. Experts in the order in which they came.
    pub(crate) fn run(&self, layer: u32, experts: &[u32]) -> Result<Vec<u32>, StoreError> {
        let mut round = self.store.round(layer, experts);
        let mut order = Vec::new();
        loop {
            let ready = self.take(&mut *round, layer, experts)?;
            if ready.is_empty() {
                return Ok(order);
            }
            order.extend(ready);
        }
    }

    /// What the next call of a round gives, after its bytes were checked.
    pub(crate) fn take(
        &self,
        round: &mut dyn Round,
        layer: u32,
        experts: &[u32],
    ) -> Result<Vec<u32>, StoreError> {
        let mut ready = Vec::new();
        round.next(&mut ready)?;
        Ok(ready.into_iter().map(|ready| self.checked(layer, experts, &ready)).collect())
    }

    fn checked(&self, layer: u32, experts: &[u32], ready: &ReadyExpert) -> u32 {
        let expert = experts[ready.item];
        let entry = self.container.expert_entry(layer, expert).unwrap();
        let found = blake3::hash(&ready.lease).to_hex();
        assert_eq!(found.as_str(), entry.blake3, "expert {expert} of layer {layer}");
        expert
    }

    /// Waits until something that another thread does has come about.
    pub(crate) fn wait_for(&self, what: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + SOON;
        while !what(self) {
            assert!(Instant::now() < deadline, "it never came about");
            thread::yield_now();
        }
    }

    /// Slots that a layer may have.
    pub(crate) fn cap(&self, layer: u32) -> usize {
        self.store.shared().layer(layer).unwrap().lock().slots.cap()
    }

    /// Every slot is free or idle, and none is lost: what is attached is what may be.
    pub(crate) fn check_idle(&self) {
        let deadline = Instant::now() + SOON;
        for layer in self.store.shared().layers() {
            let mut state = layer.lock();
            // Reads that nobody waits for may still be ending.
            while state.slots.counts().reserved > 0 {
                state = layer.wait_until(state, deadline).expect("reads end");
            }
            let counts = state.slots.counts();
            let number = layer.layer;
            assert_eq!(counts.leased, 0, "layer {number}: {counts:?}");
            assert_eq!(counts.free + counts.resident, counts.cap, "layer {number}: {counts:?}");
            assert_eq!(state.slots.attached(), counts.cap, "layer {number}: {counts:?}");
            assert!(state.queue.is_empty(), "layer {number}: {:?}", state.queue);
        }
    }
}
