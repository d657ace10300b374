//! Experts onto tiers, by one total order.

use std::cmp::Reverse;

/// Names an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId {
    /// Layer in the model.
    pub layer: u32,
    /// Expert of the layer.
    pub expert: u32,
}

/// An expert that wants a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Which one.
    pub id: ExpertId,
    /// Its own size: layers may differ.
    pub bytes: u64,
    /// How often it was used.
    pub usage: u64,
}

/// Room on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpu {
    /// Bytes that the user wants on it for experts; absent takes what is free.
    pub requested: Option<u64>,
    /// Bytes that were measured free.
    pub free: u64,
    /// Bytes of those that are kept for everything else on the device.
    pub reserve: u64,
    /// Bytes that the device's allocator adds to each expert.
    pub overhead: u64,
}

impl Gpu {
    /// Bytes for experts.
    pub fn room(&self) -> u64 {
        let free = self.free.saturating_sub(self.reserve);
        self.requested.map_or(free, |requested| requested.min(free))
    }
}

/// Experts by tier, each tier in the order in which it was filled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placed {
    /// For each GPU what lies on it.
    pub gpus: Vec<Vec<ExpertId>>,
    /// For each GPU the bytes taken, overhead included.
    pub gpu_bytes: Vec<u64>,
    /// Pinned in RAM.
    pub pinned: Vec<ExpertId>,
    /// Bytes of those.
    pub pinned_bytes: u64,
    /// Read when needed.
    pub rest: Vec<ExpertId>,
}

/// Fills the tiers, the most used experts first; among equals the lower layer, then the lower expert.
///
/// Experts go to the GPU with the fewest bytes that still has room. `pin_bytes` counts what stays in RAM only: the copy of
/// an expert in VRAM is released, so it takes nothing from the pinned ones. An expert that does not fit a tier does not end
/// it, since a later and smaller one may.
pub fn place(mut candidates: Vec<Candidate>, gpus: &[Gpu], pin_bytes: u64) -> Placed {
    candidates.sort_unstable_by_key(|candidate| (Reverse(candidate.usage), candidate.id));
    let mut placed = Placed {
        gpus: vec![Vec::new(); gpus.len()],
        gpu_bytes: vec![0; gpus.len()],
        ..Placed::default()
    };
    for Candidate { id, bytes, .. } in candidates {
        let fits = |&index: &usize| {
            let taken = placed.gpu_bytes[index].saturating_add(bytes);
            taken.saturating_add(gpus[index].overhead) <= gpus[index].room()
        };
        let emptiest = (0..gpus.len()).filter(fits).min_by_key(|&index| placed.gpu_bytes[index]);
        if let Some(index) = emptiest {
            placed.gpus[index].push(id);
            placed.gpu_bytes[index] += bytes + gpus[index].overhead;
        } else if placed.pinned_bytes.saturating_add(bytes) <= pin_bytes {
            placed.pinned.push(id);
            placed.pinned_bytes += bytes;
        } else {
            placed.rest.push(id);
        }
    }
    placed
}

#[cfg(test)]
mod tests;
