use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shimmer_kernels::WeightFormat;
use shimmer_model::tiny::Preset;

use super::*;
use crate::{
    Error, TierCounters, TierOptions,
    budget::{BudgetTerm, RamBudget},
    guard::{Guard, MemoryGuard, Probe, Reading},
    io::open_reader,
    memory::{MemoryOptions, SlotAllocator},
    store::{ExpertStore, NoProgress, OpenReader, TierSetup, TieredStore, WantedLayer},
    testing,
};

/// Headroom as the test sets it.
#[derive(Debug)]
struct Told(Arc<AtomicU64>);

impl Probe for Told {
    fn read(&self) -> Reading {
        Reading { anonymous: None, headroom: Some(self.0.load(Relaxed)) }
    }
}

/// Something outside takes all memory and gives it back: the cache shrinks to a slot per layer, grows again, and every
/// slab that was handed out meanwhile was the container's.
#[test]
fn the_cache_shrinks_under_pressure_and_grows_back() {
    const KEPT_FREE: u64 = 1 << 20;
    let (_dir, container) = testing::container(Preset::Glm4Moe, WeightFormat::Q8G64);
    let options = TierOptions { cap: Some(4), pilot_workers: 0, ..TierOptions::default() };
    let counters = Arc::new(TierCounters::default());
    let open = {
        let (container, options) = (Arc::clone(&container), options.clone());
        let counters = Arc::clone(&counters);
        let open = move || -> Result<_, Error> { open_reader(&container, &options, &counters) };
        OpenReader(Box::new(open))
    };
    let headroom = Arc::new(AtomicU64::new(KEPT_FREE));
    let probe = Box::new(Told(Arc::clone(&headroom)));
    let guard = Arc::new(MemoryGuard::with(Guard::new(0, KEPT_FREE), probe));
    let budget = RamBudget { bytes: 1 << 30, term: BudgetTerm::Host };
    let allocator = SlotAllocator::new(MemoryOptions::default());
    let store = TieredStore::new(TierSetup {
        container: Arc::clone(&container),
        options,
        budget,
        counters,
        allocator,
        open,
        guard: Some(guard),
    })
    .unwrap();
    let wanted: Vec<WantedLayer> = container
        .config()
        .moe_layers()
        .map(|(layer, experts)| WantedLayer { layer, experts: (0..experts).collect() })
        .collect();
    let _claim = store.claim(&wanted, &NoProgress).unwrap();
    let mut slab = vec![0; container.expert_layout(1).unwrap().slab_bytes()];
    let mut work = |round: u32| {
        let experts = [round * 5 % 16, round * 5 % 16 + round % 2 * 16].map(|expert| expert % 16);
        let experts = if experts[0] == experts[1] { &experts[..1] } else { &experts[..] };
        let mut round = store.round(1, experts);
        let (mut ready, mut seen) = (Vec::new(), 0);
        while seen < experts.len() {
            round.next(&mut ready).unwrap();
            for expert in ready.drain(..) {
                container.read_expert(1, experts[expert.item], &mut slab).unwrap();
                assert!(slab[..] == expert.lease[..], "a slab that is not the container's");
                seen += 1;
            }
        }
    };
    let layers = wanted.len() as u64;
    let mut run_until = |slots: u64| {
        let limit = 40_000;
        let reached = (0..limit).find(|&round| {
            work(round);
            store.snapshot().slots == slots
        });
        assert!(reached.is_some(), "{:?} instead of {slots} slots", store.snapshot());
    };
    run_until(4 * layers);
    headroom.store(0, Relaxed);
    run_until(layers);
    headroom.store(1 << 30, Relaxed);
    run_until(4 * layers);
    assert!(store.snapshot().guard_shrinks > 0);
}
