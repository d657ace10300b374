//! Which worker owns which expert: weighted rendezvous hashing.
//!
//! Every expert draws one number per worker from a hash of (layer, expert, worker id), turns it into an exponential
//! variate with the worker's weight as its rate, and goes to the smallest. The shares are proportional to the weights,
//! a worker that joins or leaves moves only the experts that it gains or loses, and nothing depends on the order in
//! which workers are listed. The logarithm is computed in integers, so every platform places alike.
//!
//! A plain function of its arguments; it reads no clock and no socket.

use std::cmp::Ordering;

/// Smallest difference of weights that matters: weights are rounded to multiples of this fraction.
const WEIGHT_UNIT: f64 = 1.0 / 1024.0;
/// Largest weight.
const WEIGHT_MAX: f64 = 1_048_576.0;

/// A worker as placement sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Name, unique in the cluster.
    pub id: String,
    /// Relative capacity, above 0.
    pub weight: f64,
    /// Layers that the worker cannot own experts of.
    pub absent_layers: Vec<u32>,
}

/// A layer with experts to place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedLayer {
    /// Index in the model.
    pub layer: u32,
    /// Number of routed experts.
    pub experts: u32,
}

/// Why there is no placement.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlacementError {
    /// Two workers have one name.
    #[error("worker id {id} is used by two workers")]
    DuplicateId {
        /// The name.
        id: String,
    },
    /// A weight that is no share.
    #[error("worker {id} has weight {weight}, expected a number above 0 and up to {WEIGHT_MAX}")]
    Weight {
        /// The worker.
        id: String,
        /// Its weight.
        weight: f64,
    },
    /// Nobody can own a layer.
    #[error("no worker has the experts of layer {layer}")]
    NoCandidate {
        /// The layer.
        layer: u32,
    },
}

/// The owner of every expert. Workers are named by their index in the list of candidates.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placement {
    /// By layer, empty for layers without routed experts; then by expert; first choice first.
    copies: Vec<Vec<Vec<usize>>>,
    workers: usize,
}

impl Placement {
    /// Places every expert of `layers` on one of `candidates`.
    pub fn compute(
        layers: &[PlacedLayer],
        candidates: &[Candidate],
    ) -> Result<Self, PlacementError> {
        let weights = candidates.iter().map(weight_units).collect::<Result<Vec<_>, _>>()?;
        for (index, candidate) in candidates.iter().enumerate() {
            if candidates[..index].iter().any(|other| other.id == candidate.id) {
                return Err(PlacementError::DuplicateId { id: candidate.id.clone() });
            }
        }
        let mut copies: Vec<Vec<Vec<usize>>> = Vec::new();
        for &PlacedLayer { layer, experts } in layers {
            let able: Vec<usize> = (0..candidates.len())
                .filter(|&c| !candidates[c].absent_layers.contains(&layer))
                .collect();
            if able.is_empty() && experts > 0 {
                return Err(PlacementError::NoCandidate { layer });
            }
            let place = |expert| {
                let bids =
                    able.iter().map(|&c| Bid::new(layer, expert, c, &candidates[c].id, weights[c]));
                let best = bids.min_by(|a, b| a.compare(b, candidates));
                best.map(|bid| bid.candidate).into_iter().collect()
            };
            let slot = layer as usize;
            if copies.len() <= slot {
                copies.resize(slot + 1, Vec::new());
            }
            copies[slot] = (0..experts).map(place).collect();
        }
        Ok(Self { copies, workers: candidates.len() })
    }

    /// Who holds an expert, first choice first; nobody for an expert that does not exist.
    pub fn copies(&self, layer: u32, expert: u32) -> &[usize] {
        let of_layer = self.copies.get(layer as usize);
        of_layer.and_then(|experts| experts.get(expert as usize)).map_or(&[], Vec::as_slice)
    }

    /// First choice for one expert; none for an expert that does not exist.
    pub fn owner(&self, layer: u32, expert: u32) -> Option<usize> {
        self.copies(layer, expert).first().copied()
    }

    /// Experts of one worker by layer, ascending; layers without one are left out.
    pub fn owned_by(&self, worker: usize) -> Vec<(u32, Vec<u32>)> {
        let of_layer = |copies: &Vec<Vec<usize>>| -> Vec<u32> {
            let held = (0..).zip(copies).filter(|(_, copies)| copies.contains(&worker));
            held.map(|(expert, _)| expert).collect()
        };
        (0..)
            .zip(&self.copies)
            .map(|(layer, owners)| (layer, of_layer(owners)))
            .filter(|(_, e)| !e.is_empty())
            .collect()
    }

    /// Number of experts of each worker, copies included.
    pub fn shares(&self) -> Vec<usize> {
        let mut shares = vec![0; self.workers];
        for &owner in self.copies.iter().flatten().flatten() {
            shares[owner] += 1;
        }
        shares
    }
}

/// One worker's claim on one expert: the smallest `cost / weight` wins.
struct Bid {
    candidate: usize,
    /// Minus the binary logarithm of a uniform number in (0, 1], in units of 2^-32.
    cost: u64,
    weight: u64,
}

impl Bid {
    fn new(layer: u32, expert: u32, candidate: usize, id: &str, weight: u64) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(b"shimmer placement 1")
            .update(&layer.to_le_bytes())
            .update(&expert.to_le_bytes());
        hash.update(id.as_bytes());
        let mut uniform = [0; 8];
        hash.finalize_xof().fill(&mut uniform);
        Self { candidate, cost: minus_log2(u64::from_le_bytes(uniform)), weight }
    }

    fn compare(&self, other: &Self, candidates: &[Candidate]) -> Ordering {
        let left = u128::from(self.cost) * u128::from(other.weight);
        let right = u128::from(other.cost) * u128::from(self.weight);
        left.cmp(&right)
            .then_with(|| candidates[self.candidate].id.cmp(&candidates[other.candidate].id))
    }
}

/// `-log2(bits / 2^64)` in units of 2^-32, by repeated squaring of the mantissa.
fn minus_log2(bits: u64) -> u64 {
    const FRACTION_BITS: u32 = 32;
    let bits = bits.max(1);
    let shift = bits.leading_zeros();
    // The mantissa in [1, 2) with 63 fraction bits.
    let mut mantissa = u128::from(bits << shift);
    let mut log = u64::from(63 - shift);
    for _ in 0..FRACTION_BITS {
        mantissa = (mantissa * mantissa) >> 63;
        log <<= 1;
        if mantissa >> 64 != 0 {
            mantissa >>= 1;
            log |= 1;
        }
    }
    (64 << FRACTION_BITS) - log
}

fn weight_units(candidate: &Candidate) -> Result<u64, PlacementError> {
    let Candidate { id, weight, .. } = candidate;
    if !(*weight > 0.0 && *weight <= WEIGHT_MAX) {
        return Err(PlacementError::Weight { id: id.clone(), weight: *weight });
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive and below 2^31 by the check above"
    )]
    let units = (weight / WEIGHT_UNIT).round() as u64;
    Ok(units.max(1))
}

#[cfg(test)]
mod tests;
