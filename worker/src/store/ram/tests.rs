use std::sync::atomic::AtomicU64;

use shimmer_kernels::WeightFormat;
use shimmer_model::tiny::Preset;

use super::*;
use crate::{budget::BudgetTerm, store::NoProgress, testing};

#[derive(Default)]
struct Counting {
    experts: AtomicU64,
    cancel_after: Option<u64>,
}

impl LoadProgress for Counting {
    fn loaded(&self, _bytes: u64) {
        self.experts.fetch_add(1, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancel_after.is_some_and(|limit| self.experts.load(Ordering::Relaxed) >= limit)
    }
}

fn wanted(layer: u32, experts: &[u32]) -> WantedLayer {
    WantedLayer { layer, experts: experts.to_vec() }
}

struct Bench {
    _dir: tempfile::TempDir,
    store: RamStore,
    container: Arc<Container>,
    slab: u64,
    /// Layers with experts.
    layers: Vec<u32>,
}

fn bench(slabs: u64) -> Bench {
    let (dir, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q8G64);
    let layers: Vec<u32> = container.config().moe_layers().map(|(layer, _)| layer).collect();
    let slab = container.expert_layout(layers[0]).unwrap().slab_bytes() as u64;
    let budget = RamBudget { bytes: slabs * slab, term: BudgetTerm::Setting };
    Bench {
        _dir: dir,
        store: RamStore::new(Arc::clone(&container), budget, 3),
        container,
        slab,
        layers,
    }
}

#[test]
fn leases_hold_the_slabs_of_the_container() {
    let Bench { _dir, store, container, slab, layers } = bench(16);
    let progress = Counting::default();
    let claim = store
        .claim(&[wanted(layers[0], &[1, 4]), wanted(layers[1], &[0, 2, 3])], &progress)
        .unwrap();
    assert_eq!(progress.experts.load(Ordering::Relaxed), 5);
    assert_eq!(store.resident_bytes(), 5 * slab);
    for (layer, expert) in [(layers[0], 1), (layers[0], 4), (layers[1], 3)] {
        let mut expected = vec![0; usize::try_from(slab).unwrap()];
        container.read_expert(layer, expert, &mut expected).unwrap();
        assert_eq!(&*store.lease(layer, expert).unwrap(), &expected[..]);
    }
    let absent = store.lease(layers[0], 0).unwrap_err();
    assert!(matches!(absent, StoreError::NotResident { expert: 0, .. }));
    drop(claim);
}

#[test]
fn what_is_resident_is_not_read_again() {
    let Bench { _dir, store, slab, layers, .. } = bench(16);
    let one = store.claim(&[wanted(layers[0], &[0, 1])], &Counting::default()).unwrap();
    let progress = Counting::default();
    let two = store.claim(&[wanted(layers[0], &[1, 2])], &progress).unwrap();
    assert_eq!(store.resident_bytes(), 3 * slab);
    // Progress counts what is there as well as what was read.
    assert_eq!(progress.experts.load(Ordering::Relaxed), 2);
    drop((one, two));
    assert_eq!(store.resident_bytes(), 3 * slab, "kept for a coordinator that comes back");
}

#[test]
fn the_budget_is_kept_and_named() {
    let Bench { _dir, store, layers, .. } = bench(3);
    let held = store.claim(&[wanted(layers[0], &[0, 1])], &NoProgress).unwrap();
    let error = store.claim(&[wanted(layers[1], &[0, 1])], &NoProgress).unwrap_err();
    assert!(matches!(error, StoreError::Budget { experts: 2, .. }));
    assert!(error.to_string().contains("--ram allows"), "{error}");
    drop(held);
    let _later = store.claim(&[wanted(layers[1], &[0, 1])], &NoProgress).unwrap();
    assert!(store.lease(layers[0], 0).is_err(), "the unclaimed experts made room");
}

#[test]
fn a_lease_outlives_its_claim() {
    let Bench { _dir, store, layers, .. } = bench(2);
    let claim = store.claim(&[wanted(layers[0], &[0])], &NoProgress).unwrap();
    let lease = store.lease(layers[0], 0).unwrap();
    let before = lease.to_vec();
    drop(claim);
    assert!(
        store.claim(&[wanted(layers[1], &[0, 1])], &NoProgress).is_err(),
        "leased memory is in use"
    );
    assert_eq!(&*lease, &before[..]);
}

#[test]
fn a_failed_load_changes_nothing() {
    let Bench { _dir, store, layers, container, .. } = bench(16);
    let cancel = Counting { cancel_after: Some(1), ..Counting::default() };
    let error = store.claim(&[wanted(layers[0], &[0, 1, 2, 3, 4, 5])], &cancel).unwrap_err();
    assert!(matches!(error, StoreError::Cancelled));
    let error = store.claim(&[wanted(layers[0], &[0, 99])], &NoProgress).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchExpert { expert: 99, .. }));
    assert_eq!(store.resident_bytes(), 0);

    let entry = container.expert_entry(layers[0], 3).unwrap();
    let path = container.dir().join(&entry.file);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[usize::try_from(entry.offset).unwrap() + 100] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = store.claim(&[wanted(layers[0], &[2, 3])], &NoProgress).unwrap_err();
    assert!(
        error.to_string().starts_with(&format!("loading expert 3 of layer {}", layers[0])),
        "{error}"
    );
    assert_eq!(store.resident_bytes(), 0);
}
