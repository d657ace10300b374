//! A placement as the membership store keeps it: checked when it comes in, because anybody may have written it.

use shimmer_proto::{
    identity::shown,
    limits::{MAX_COPIES, MAX_WORKERS},
    membership::records::{LayerRecord, PlacementRecord},
};

use super::{PlacedLayer, Placement};

/// Longest id of a member, bytes.
pub const MAX_ID_BYTES: usize = 64;

/// A placement record that cannot be one of this model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Generations begin at 1.
    #[error("placement: generation 0, expected 1 or more")]
    Generation,
    /// The record is for another container.
    #[error(
        "placement of generation {generation} is for container {}, expected {}",
        shown(found),
        shown(expected)
    )]
    Container {
        /// The record's generation.
        generation: u64,
        /// What it is for.
        found: String,
        /// What it should be for.
        expected: String,
    },
    /// No workers, or too many.
    #[error("placement: {workers} workers, expected 1 to {MAX_WORKERS}")]
    Workers {
        /// How many it names.
        workers: usize,
    },
    /// A name that nobody has, or names that are not ascending.
    #[error(
        "placement: worker id {} is empty, longer than {MAX_ID_BYTES} bytes or not above the one before it",
        shown(id)
    )]
    WorkerId {
        /// The name.
        id: String,
    },
    /// The layers are not those of the model that have experts.
    #[error("placement: {} stands where {} is expected", layer(*found), layer(*expected))]
    Layers {
        /// What is there.
        found: Option<u32>,
        /// What should be.
        expected: Option<u32>,
    },
    /// A layer has another number of experts.
    #[error("placement: layer {layer} has {found} experts, expected {expected}")]
    Experts {
        /// The layer.
        layer: u32,
        /// Experts in the record.
        found: usize,
        /// Experts in the model.
        expected: u32,
    },
    /// An expert that nobody holds, or too many do.
    #[error(
        "placement: expert {expert} of layer {layer} has {copies} copies, expected 1 to {MAX_COPIES}"
    )]
    Copies {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: usize,
        /// Its copies.
        copies: usize,
    },
    /// A place behind the last worker.
    #[error("placement: expert {expert} of layer {layer} is placed on worker {place} of {workers}")]
    Place {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: usize,
        /// The place, from 0.
        place: u16,
        /// Number of workers.
        workers: usize,
    },
    /// Two copies at one worker.
    #[error("placement: expert {expert} of layer {layer} is placed twice on worker {place}")]
    Twice {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: usize,
        /// The place, from 0.
        place: u16,
    },
}

fn layer(layer: Option<u32>) -> String {
    layer.map_or_else(|| "the end of the layers".to_owned(), |layer| format!("layer {layer}"))
}

/// What a record says beside who holds what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    /// See [`PlacementRecord::generation`].
    pub generation: u64,
    /// See [`PlacementRecord::container_digest`].
    pub container_digest: String,
    /// See [`PlacementRecord::leader`].
    pub leader: String,
    /// See [`PlacementRecord::leader_revision`].
    pub leader_revision: u64,
    /// See [`PlacementRecord::reason`].
    pub reason: String,
}

impl Placement {
    /// Reads a record; the placement's workers are numbered as [`PlacementRecord::workers`] is.
    pub fn from_record(
        record: &PlacementRecord,
        container_digest: &str,
        layers: &[PlacedLayer],
    ) -> Result<Self, RecordError> {
        let generation = record.generation;
        if generation == 0 {
            return Err(RecordError::Generation);
        }
        if record.container_digest != container_digest {
            let (found, expected) = (record.container_digest.clone(), container_digest.to_owned());
            return Err(RecordError::Container { generation, found, expected });
        }
        let workers = record.workers.len();
        if !(1..=MAX_WORKERS).contains(&workers) {
            return Err(RecordError::Workers { workers });
        }
        let mut before = "";
        for id in &record.workers {
            if id.len() > MAX_ID_BYTES || id.as_str() <= before {
                return Err(RecordError::WorkerId { id: id.clone() });
            }
            before = id;
        }
        let mut expected = layers.iter().filter(|l| l.experts > 0);
        let mut found = record.layers.iter();
        let mut placement = Self { copies: Vec::new(), workers };
        loop {
            let (expected, found) = match (expected.next(), found.next()) {
                (None, None) => return Ok(placement),
                (Some(e), Some(f)) if e.layer == f.layer => (e, f),
                (e, f) => {
                    let (found, expected) = (f.map(|f| f.layer), e.map(|e| e.layer));
                    return Err(RecordError::Layers { found, expected });
                }
            };
            *placement.slot(found.layer) = read_layer(found, expected.experts, workers)?;
        }
    }

    /// Writes the record of a placement on workers with these names, in any order.
    ///
    /// # Panics
    /// There is not one name for each worker.
    pub fn to_record(&self, ids: &[String], header: RecordHeader) -> PlacementRecord {
        assert_eq!(ids.len(), self.workers, "every worker has a name");
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by(|&a, &b| ids[a].cmp(&ids[b]));
        let mut places = vec![0; ids.len()];
        for (place, &worker) in (0_u16..).zip(&order) {
            places[worker] = place;
        }
        let placed = |copies: &Vec<usize>| copies.iter().map(|&worker| places[worker]).collect();
        let layers = (0..).zip(&self.copies).filter(|(_, experts)| !experts.is_empty());
        let RecordHeader { generation, container_digest, leader, leader_revision, reason } = header;
        PlacementRecord {
            generation,
            container_digest,
            leader,
            leader_revision,
            reason,
            workers: order.into_iter().map(|worker| ids[worker].clone()).collect(),
            layers: layers
                .map(|(layer, experts)| LayerRecord {
                    layer,
                    copies: experts.iter().map(placed).collect(),
                })
                .collect(),
        }
    }
}

fn read_layer(
    record: &LayerRecord,
    experts: u32,
    workers: usize,
) -> Result<Vec<Vec<usize>>, RecordError> {
    let LayerRecord { layer, copies } = record;
    let layer = *layer;
    if copies.len() != experts as usize {
        return Err(RecordError::Experts { layer, found: copies.len(), expected: experts });
    }
    for (expert, places) in copies.iter().enumerate() {
        if !(1..=MAX_COPIES).contains(&places.len()) {
            return Err(RecordError::Copies { layer, expert, copies: places.len() });
        }
        for (index, &place) in places.iter().enumerate() {
            if usize::from(place) >= workers {
                return Err(RecordError::Place { layer, expert, place, workers });
            }
            if places[..index].contains(&place) {
                return Err(RecordError::Twice { layer, expert, place });
            }
        }
    }
    Ok(copies.iter().map(|places| places.iter().map(|&p| usize::from(p)).collect()).collect())
}

#[cfg(test)]
mod tests;
