//! The placement that stands in the store, checked against this coordinator's model.

use shimmer_proto::membership::{
    Snapshot,
    records::{PLACEMENT, PlacementRecord},
};

use crate::placement::{PlacedLayer, Placement, record::RecordError};

/// A placement that was decided for this model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    /// Revision of the store that wrote it.
    pub revision: u64,
    /// As it was written.
    pub record: PlacementRecord,
    /// Its workers are numbered as the record's are.
    pub placement: Placement,
}

/// A placement that is not in force here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecidedError {
    /// No placement record of this build.
    #[error(
        "the record {PLACEMENT} of the membership store cannot be read: {detail}; remove it, so that it is made again"
    )]
    Unreadable {
        /// What the parser said.
        detail: String,
    },
    /// A placement for another model, or one that cannot be.
    #[error("{error}")]
    Unfit {
        /// Revision of the store that wrote it.
        revision: u64,
        /// Its generation.
        generation: u64,
        /// What does not fit.
        error: RecordError,
    },
}

impl Decided {
    /// Reads the placement of a snapshot; none if there is none.
    pub fn read(
        snapshot: &Snapshot,
        container_digest: &str,
        layers: &[PlacedLayer],
    ) -> Result<Option<Self>, DecidedError> {
        let Some(entry) = snapshot.entries.get(PLACEMENT) else { return Ok(None) };
        let record: PlacementRecord = serde_json::from_str(&entry.value)
            .map_err(|error| DecidedError::Unreadable { detail: error.to_string() })?;
        let (revision, generation) = (entry.revision, record.generation);
        match Placement::from_record(&record, container_digest, layers) {
            Ok(placement) => Ok(Some(Self { revision, record, placement })),
            Err(error) => Err(DecidedError::Unfit { revision, generation, error }),
        }
    }
}
