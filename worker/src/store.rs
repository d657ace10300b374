//! Where experts live. The compute side asks for a lease and reads the slab; it does not know what is behind it.

mod ram;

use std::{fmt, ops::Deref, sync::Arc};

pub use ram::RamStore;

use crate::budget::BudgetTerm;

/// Experts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedLayer {
    /// Layer in the model.
    pub layer: u32,
    /// Experts, ascending, each once.
    pub experts: Vec<u32>,
}

/// Where a load has got to. Called from several threads.
pub trait LoadProgress: Sync {
    /// One more expert is resident.
    fn loaded(&self, bytes: u64);

    /// Whether nobody waits for the load any more.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Progress that nobody looks at.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl LoadProgress for NoProgress {
    fn loaded(&self, _bytes: u64) {}
}

/// Why experts are not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// They do not fit.
    #[error(
        "{experts} more experts take {needed} bytes beside {resident} resident bytes in use, but {term} allows {budget}"
    )]
    Budget {
        /// Experts that are missing.
        experts: u64,
        /// Bytes they take.
        needed: u64,
        /// Bytes that other assignments hold.
        resident: u64,
        /// Bytes allowed.
        budget: u64,
        /// Which limit says so.
        term: BudgetTerm,
    },
    /// The system gave no memory.
    #[error("mapping {bytes} bytes for experts of layer {layer}")]
    Map {
        /// Layer.
        layer: u32,
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A slab could not be read or is damaged.
    #[error("loading expert {expert} of layer {layer}: {source}")]
    Read {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// What was wrong.
        source: Box<shimmer_model::Error>,
    },
    /// The container has no such expert.
    #[error("the container has no expert {expert} in layer {layer}")]
    NoSuchExpert {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// The expert was never loaded.
    #[error("expert {expert} of layer {layer} is not resident")]
    NotResident {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// Nobody waits for the load any more.
    #[error("the load was cancelled")]
    Cancelled,
}

/// A set of experts that stays available until the claim is dropped.
pub trait Claim: Send + Sync + fmt::Debug {}

/// The tier seam.
pub trait ExpertStore: Send + Sync + fmt::Debug {
    /// Makes experts available and keeps them so while the claim lives. On an error nothing has changed.
    fn claim(
        &self,
        wanted: &[WantedLayer],
        progress: &dyn LoadProgress,
    ) -> Result<Box<dyn Claim>, StoreError>;

    /// The slab of a claimed expert, readable as long as the lease lives.
    fn lease(&self, layer: u32, expert: u32) -> Result<Lease, StoreError>;

    /// Bytes of slabs that are held now.
    fn resident_bytes(&self) -> u64;

    /// Whether somebody reads ahead, so that hints are worth sending.
    fn wants_hints(&self) -> bool {
        false
    }

    /// Takes note of claimed experts that a later layer will probably need, most likely first. Returns at once and changes
    /// nothing that can be seen but speed.
    fn hint(&self, _layer: u32, _experts: &[u32]) {}
}

/// Read access to one expert's slab.
#[derive(Clone)]
pub struct Lease {
    owner: Arc<dyn SlabMemory>,
    offset: usize,
    len: usize,
}

/// Memory that slabs lie in.
pub trait SlabMemory: Send + Sync {
    /// All of it.
    fn bytes(&self) -> &[u8];
}

impl Lease {
    /// A slab at a place of shared memory.
    pub fn new(owner: Arc<dyn SlabMemory>, offset: usize, len: usize) -> Self {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= owner.bytes().len()),
            "slab inside its memory"
        );
        Self { owner, offset, len }
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.offset..self.offset + self.len]
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
