//! Which worker owns which expert: weighted rendezvous hashing.
//!
//! Every expert draws one number per worker from a hash of (layer, expert, worker id), turns it into an exponential
//! variate with the worker's weight as its rate, and goes to the smallest. The shares are proportional to the weights,
//! a worker that joins or leaves moves only the experts that it gains or loses, and nothing depends on the order in
//! which workers are listed. The logarithm is computed in integers, so every platform places alike.
//!
//! Further copies go to the next bids on other hosts, hottest experts first, as far as there is memory for them beside what
//! a worker owns first. The first owners do not depend on the number of copies.
//!
//! A plain function of its arguments; it reads no clock and no socket.

mod bids;
mod kept;
pub mod rebalance;
pub mod record;

use shimmer_proto::limits::{MAX_COPIES, MAX_WORKERS};

use crate::heat::HeatMap;
use bids::Bid;

/// Smallest difference of weights that matters: weights are rounded to multiples of this fraction.
const WEIGHT_UNIT: f64 = 1.0 / 1024.0;
/// Largest weight.
const WEIGHT_MAX: f64 = 1_048_576.0;

/// A worker as placement sees it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidate {
    /// Name, unique in the cluster.
    pub id: String,
    /// Relative capacity, above 0.
    pub weight: f64,
    /// Layers that the worker cannot own experts of.
    pub absent_layers: Vec<u32>,
    /// What fails as one with it; a worker that does not say fails alone.
    pub host: String,
    /// Bytes of experts that it holds in memory at a time; 0 when that is not known, which counts as room for everything.
    pub ram_budget_bytes: u64,
}

impl Candidate {
    /// What fails as one with this worker.
    fn domain(&self) -> &str {
        if self.host.is_empty() { &self.id } else { &self.host }
    }
}

/// A layer with experts to place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlacedLayer {
    /// Index in the model.
    pub layer: u32,
    /// Number of routed experts.
    pub experts: u32,
    /// Bytes of one of them.
    pub slab_bytes: u64,
}

/// All that a placement depends on.
#[derive(Debug, Clone, Copy)]
pub struct PlacementInput<'a> {
    /// Layers with routed experts.
    pub layers: &'a [PlacedLayer],
    /// The workers.
    pub candidates: &'a [Candidate],
    /// Copies of an expert in all, where there are workers and memory for them.
    pub copies: usize,
    /// How often experts are used: the hottest are copied first.
    pub heat: &'a HeatMap,
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
    /// More workers than a cluster may have.
    #[error("{workers} workers, a cluster has at most {MAX_WORKERS}")]
    TooManyWorkers {
        /// How many there are.
        workers: usize,
    },
    /// A number of copies that cannot be had.
    #[error("{copies} copies of each expert are asked for, expected 1 to {MAX_COPIES}")]
    Copies {
        /// How many were asked for.
        copies: usize,
    },
}

/// The owners of every expert. Workers are named by their index in the list of candidates.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placement {
    /// By layer, empty for layers without routed experts; then by expert; first choice first.
    copies: Vec<Vec<Vec<usize>>>,
    workers: usize,
}

impl Placement {
    /// Places every expert of `layers` once, on one of `candidates`.
    pub fn compute(
        layers: &[PlacedLayer],
        candidates: &[Candidate],
    ) -> Result<Self, PlacementError> {
        Self::plan(&PlacementInput { layers, candidates, copies: 1, heat: &HeatMap::default() })
    }

    /// Places every expert, and copies as far as there is room.
    pub fn plan(input: &PlacementInput<'_>) -> Result<Self, PlacementError> {
        let PlacementInput { layers, candidates, copies, .. } = *input;
        let weights = check(candidates, copies)?;
        let mut placement = Self { copies: Vec::new(), workers: candidates.len() };
        let mut orders = Vec::new();
        for &PlacedLayer { layer, experts, .. } in layers {
            let able = able(layers, candidates, layer);
            if able.is_empty() && experts > 0 {
                return Err(PlacementError::NoCandidate { layer });
            }
            let id = |c: usize| candidates[c].id.as_str();
            let slot = placement.slot(layer);
            for expert in 0..experts {
                let mut bids: Vec<Bid> =
                    able.iter().map(|&c| Bid::new(layer, expert, c, id(c), weights[c])).collect();
                if copies == 1 {
                    let best = bids.iter().min_by(|a, b| a.compare(b, id));
                    slot.push(best.map(|bid| bid.candidate).into_iter().collect());
                } else {
                    bids.sort_unstable_by(|a, b| a.compare(b, id));
                    slot.push(vec![bids[0].candidate]);
                    let order = bids.iter().map(|bid| bid.candidate).collect();
                    orders.push(Order { layer, expert, order });
                }
            }
        }
        placement.copy_hottest(input, orders);
        Ok(placement)
    }

    /// Adds the second copy of every expert for which there is room, then the third, the hottest experts first.
    fn copy_hottest(&mut self, input: &PlacementInput<'_>, mut orders: Vec<Order>) {
        let PlacementInput { layers, candidates, copies, heat } = *input;
        let slab = |layer| slab_bytes(layers, layer);
        let mut room: Vec<i128> = (0..candidates.len())
            .map(|worker| self.room(layers, &candidates[worker], worker))
            .collect();
        // Stable: experts of equal heat stay in their order.
        let heat = |order: &Order| heat.of(order.layer, order.expert);
        orders.sort_by(|a, b| heat(b).total_cmp(&heat(a)));
        for _ in 1..copies {
            for Order { layer, expert, order } in &orders {
                let bytes = i128::from(slab(*layer));
                let held = &mut self.copies[*layer as usize][*expert as usize];
                let fits = |c: usize| !held.contains(&c) && room[c] >= bytes;
                let elsewhere = |c: usize| {
                    held.iter().all(|&h| candidates[h].domain() != candidates[c].domain())
                };
                let mut able = order.iter().copied().filter(|&c| fits(c));
                let picked = able.clone().find(|&c| elsewhere(c)).or_else(|| able.next());
                if let Some(worker) = picked {
                    room[worker] -= bytes;
                    held.push(worker);
                }
            }
        }
    }

    /// Bytes that a worker has left beside what it holds; below 0 if it holds more than fits, and reads in turns.
    fn room(&self, layers: &[PlacedLayer], candidate: &Candidate, worker: usize) -> i128 {
        if candidate.ram_budget_bytes == 0 {
            return i128::from(u64::MAX);
        }
        let held = self.owned_by(worker);
        let bytes = |(layer, experts): &(u32, Vec<u32>)| {
            i128::from(slab_bytes(layers, *layer)) * experts.len() as i128
        };
        i128::from(candidate.ram_budget_bytes) - held.iter().map(bytes).sum::<i128>()
    }

    fn slot(&mut self, layer: u32) -> &mut Vec<Vec<usize>> {
        let slot = layer as usize;
        if self.copies.len() <= slot {
            self.copies.resize(slot + 1, Vec::new());
        }
        &mut self.copies[slot]
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

    /// Every expert with who holds it, by layer, then by expert.
    pub fn experts(&self) -> impl Iterator<Item = (u32, u32, &[usize])> {
        (0..).zip(&self.copies).flat_map(|(layer, experts)| {
            (0..).zip(experts).map(move |(expert, copies)| (layer, expert, copies.as_slice()))
        })
    }

    /// Number of workers that experts can be placed on.
    pub fn workers(&self) -> usize {
        self.workers
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

    /// The same placement with other numbers for its workers: `seats` has the new number of each. Numbers are below
    /// `workers` and differ.
    ///
    /// # Panics
    /// They do not, or there is none for a worker.
    #[must_use]
    pub fn reseated(&self, seats: &[usize], workers: usize) -> Self {
        assert_eq!(seats.len(), self.workers, "every worker has a seat");
        for (index, seat) in seats.iter().enumerate() {
            assert!(*seat < workers, "seat {seat} of {workers}");
            assert!(!seats[..index].contains(seat), "seat {seat} is taken twice");
        }
        let mut reseated = Self { workers, ..self.clone() };
        for worker in reseated.copies.iter_mut().flatten().flatten() {
            *worker = seats[*worker];
        }
        reseated
    }
}

/// Everybody who could hold an expert, best bid first.
struct Order {
    layer: u32,
    expert: u32,
    order: Vec<usize>,
}

/// Checks the workers and gives their weights in whole units.
fn check(candidates: &[Candidate], copies: usize) -> Result<Vec<u64>, PlacementError> {
    if !(1..=MAX_COPIES).contains(&copies) {
        return Err(PlacementError::Copies { copies });
    }
    if candidates.len() > MAX_WORKERS {
        return Err(PlacementError::TooManyWorkers { workers: candidates.len() });
    }
    let weights = candidates.iter().map(weight_units).collect::<Result<Vec<_>, _>>()?;
    for (index, candidate) in candidates.iter().enumerate() {
        if candidates[..index].iter().any(|other| other.id == candidate.id) {
            return Err(PlacementError::DuplicateId { id: candidate.id.clone() });
        }
    }
    Ok(weights)
}

/// Who can own experts of a layer. A worker whose memory does not take one expert of each of its layers would refuse
/// them all, so it is asked only where nobody else can.
fn able(layers: &[PlacedLayer], candidates: &[Candidate], layer: u32) -> Vec<usize> {
    let has = |c: &usize| !candidates[*c].absent_layers.contains(&layer);
    let is_roomy = |c: &usize| {
        let Candidate { absent_layers, ram_budget_bytes, .. } = &candidates[*c];
        let of = layers.iter().filter(|l| l.experts > 0 && !absent_layers.contains(&l.layer));
        let least = of.map(|l| l.slab_bytes).fold(0, u64::saturating_add);
        *ram_budget_bytes == 0 || *ram_budget_bytes >= least
    };
    let able: Vec<usize> = (0..candidates.len()).filter(has).collect();
    let roomy: Vec<usize> = able.iter().copied().filter(is_roomy).collect();
    if roomy.is_empty() { able } else { roomy }
}

fn slab_bytes(layers: &[PlacedLayer], layer: u32) -> u64 {
    layers.iter().find(|l| l.layer == layer).map_or(0, |l| l.slab_bytes)
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
