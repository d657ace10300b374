//! Why experts cannot be had.

use crate::{io::ReadError, placement::PlanError};

/// Why experts are not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// They do not fit as the settings say.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Other work did not give its memory back in time.
    #[error(
        "works under way hold {held} bytes of layer {layer} beyond the {wanted} that its plan leaves"
    )]
    InUse {
        /// Layer.
        layer: u32,
        /// Bytes of its slots.
        held: u64,
        /// Bytes that it should have.
        wanted: u64,
    },
    /// Every layer needs the slots that it has.
    #[error("no layer can do without the {bytes} bytes that an expert of layer {layer} takes")]
    NoSlot {
        /// Layer.
        layer: u32,
        /// Bytes of a slot.
        bytes: u64,
    },
    /// The system gave no memory.
    #[error("mapping {bytes} bytes for experts of layer {layer}")]
    Map {
        /// Layer.
        layer: u32,
        /// Bytes asked for.
        bytes: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// The files could not be opened, or threads that read them not started.
    #[error("opening the container's expert files")]
    Reader(#[source] Box<crate::Error>),
    /// Threads that read ahead could not be started.
    #[error("starting {threads} threads to read ahead")]
    Pilots {
        /// How many.
        threads: u8,
        /// What the system said.
        source: std::io::Error,
    },
    /// A slab could not be read from any copy, or is damaged in all of them.
    #[error("{source}")]
    Read {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// What was wrong.
        source: Box<ReadError>,
    },
    /// The container has no such expert.
    #[error("the container has no expert {expert} in layer {layer}")]
    NoSuchExpert {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// Nobody waits for the load any more.
    #[error("the load was cancelled")]
    Cancelled,
}

impl StoreError {
    /// The expert that the error is about.
    pub fn expert(&self) -> Option<u32> {
        match self {
            Self::Read { expert, .. } | Self::NoSuchExpert { expert, .. } => Some(*expert),
            _ => None,
        }
    }
}
