//! Moves and copies of experts that level what workers have to compute, by how often experts were used.
//!
//! Rows go to the first copy that serves, so a worker's load is the heat of the experts that it is the first choice for,
//! over its weight. One move at a time takes load from the most loaded worker: to a worker that holds a copy already,
//! where that levels as well, because it costs no bytes; else the expert itself moves. Deterministic, and bounded by the
//! number of moves.

use super::{Candidate, PlacedLayer, Placement, PlacementError, PlacementInput, able, check};

/// A gain below this share of the mean load is not worth reading a slab for.
const LEAST_GAIN: f64 = 0.001;

/// One change of a placement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Move {
    /// The layer.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
    /// Worker that was the first choice; none when a copy is added.
    pub from: Option<usize>,
    /// Worker that is the first choice now, or has the copy.
    pub to: usize,
    /// Bytes that the worker has to read: 0 when it held the expert already.
    pub bytes: u64,
    /// Rows of the expert lately.
    pub heat: f64,
}

/// A placement that levels better, and what leads to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Rebalance {
    /// In the order in which they were chosen: the first ones gain most.
    pub moves: Vec<Move>,
    /// With all moves made.
    pub placement: Placement,
    /// Expected load of the most loaded worker over the mean, loads by weight; 1 is level.
    pub imbalance_before: f64,
    /// The same with all moves made.
    pub imbalance_after: f64,
}

/// Levels a placement with at most `max_moves` changes. `placement` numbers its workers as `input.candidates` are.
///
/// No expert loses a copy, and none gets fewer failure domains than it had. Experts below `input.copies` get copies with
/// the changes that are left, hottest first, where there is room.
///
/// # Panics
/// The placement has another number of workers.
pub fn rebalance(
    placement: &Placement,
    input: &PlacementInput<'_>,
    max_moves: usize,
) -> Result<Rebalance, PlacementError> {
    let weights = check(input.candidates, input.copies)?;
    assert_eq!(placement.workers, input.candidates.len(), "workers and candidates are the same");
    #[expect(clippy::cast_precision_loss, reason = "weights are below 2^31 units")]
    let weights = weights.into_iter().map(|units| units as f64).collect();
    let mut leveller = Leveller::new(placement.clone(), input, weights);
    let imbalance_before = leveller.imbalance();
    let mut moves = Vec::new();
    while moves.len() < max_moves
        && let Some(change) = leveller.best()
    {
        leveller.apply(&change);
        moves.push(change);
    }
    let left = max_moves - moves.len();
    moves.extend(leveller.copy_hottest(left));
    let imbalance_after = leveller.imbalance();
    Ok(Rebalance { moves, placement: leveller.placement, imbalance_before, imbalance_after })
}

struct Leveller<'a> {
    placement: Placement,
    input: &'a PlacementInput<'a>,
    weights: Vec<f64>,
    /// Heat of the experts that each worker is the first choice for.
    loads: Vec<f64>,
    room: Vec<u64>,
    /// By index in the input's layers.
    able: Vec<Vec<usize>>,
    least_gain: f64,
}

impl<'a> Leveller<'a> {
    fn new(placement: Placement, input: &'a PlacementInput<'a>, weights: Vec<f64>) -> Self {
        let PlacementInput { layers, candidates, heat, .. } = *input;
        let mut loads = vec![0.0; candidates.len()];
        for (layer, expert, copies) in placement.experts() {
            loads[copies[0]] += heat.of(layer, expert);
        }
        let room = (0..candidates.len())
            .map(|worker| placement.room(layers, &candidates[worker], worker))
            .collect();
        let able = layers.iter().map(|l| able(layers, candidates, l.layer)).collect();
        let mean = loads.iter().sum::<f64>() / weights.iter().sum::<f64>();
        Self { placement, input, weights, loads, room, able, least_gain: mean * LEAST_GAIN }
    }

    fn share(&self, worker: usize) -> f64 {
        self.loads[worker] / self.weights[worker]
    }

    fn imbalance(&self) -> f64 {
        let mean = self.loads.iter().sum::<f64>() / self.weights.iter().sum::<f64>();
        let most = (0..self.loads.len()).map(|w| self.share(w)).fold(0.0, f64::max);
        if mean > 0.0 { most / mean } else { 1.0 }
    }

    /// The change that leaves the most loaded worker and the one that it gives to with the smallest share.
    fn best(&self) -> Option<Move> {
        let by_share = |a: &usize, b: &usize| self.share(*a).total_cmp(&self.share(*b));
        // The last of equals; any fixed choice will do.
        let giver = (0..self.loads.len()).max_by(by_share)?;
        let mut best: Option<(f64, Move)> = None;
        for (of_layer, able) in self.input.layers.iter().zip(&self.able) {
            for expert in 0..of_layer.experts {
                let copies = self.placement.copies(of_layer.layer, expert);
                let heat = self.input.heat.of(of_layer.layer, expert);
                if copies.first() != Some(&giver) || heat <= 0.0 {
                    continue;
                }
                for taker in able.iter().copied().filter(|&taker| taker != giver) {
                    let held = copies.contains(&taker);
                    let after = self.after(giver, taker, heat);
                    let gain = self.share(giver) - after;
                    // Bytes cost: a promotion is taken before a move that levels no better.
                    let better = best.is_none_or(|(least, change)| {
                        after < least || (after == least && held && change.bytes > 0)
                    });
                    // The dearest question last.
                    if gain > self.least_gain && better && self.may(copies, of_layer, taker) {
                        let bytes = if held { 0 } else { of_layer.slab_bytes };
                        let (layer, from) = (of_layer.layer, Some(giver));
                        best = Some((after, Move { layer, expert, from, to: taker, bytes, heat }));
                    }
                }
            }
        }
        best.map(|(_, change)| change)
    }

    /// The larger share of two workers when one gives so much heat to the other.
    fn after(&self, giver: usize, taker: usize, heat: f64) -> f64 {
        let given = (self.loads[giver] - heat) / self.weights[giver];
        given.max((self.loads[taker] + heat) / self.weights[taker])
    }

    /// Whether a worker may become the first choice of an expert in place of the present one.
    fn may(&self, copies: &[usize], layer: &PlacedLayer, taker: usize) -> bool {
        if copies.contains(&taker) {
            return true;
        }
        let candidates = self.input.candidates;
        let after = copies[1..].iter().copied().chain([taker]);
        self.room[taker] >= layer.slab_bytes
            && domains(candidates, after) >= domains(candidates, copies.iter().copied())
    }

    fn apply(&mut self, change: &Move) {
        let Move { layer, expert, to, bytes, heat, .. } = *change;
        let copies = &mut self.placement.copies[layer as usize][expert as usize];
        let from = copies[0];
        if let Some(place) = copies.iter().position(|&copy| copy == to) {
            copies.swap(0, place);
        } else {
            copies[0] = to;
            self.room[to] -= bytes;
            self.room[from] = self.room[from].saturating_add(bytes);
        }
        self.loads[from] -= heat;
        self.loads[to] += heat;
    }

    /// Adds copies where there are fewer than wanted: second ones first, hottest experts first, to the worker of another
    /// failure domain with the least load.
    fn copy_hottest(&mut self, most: usize) -> Vec<Move> {
        let PlacementInput { layers, candidates, copies: wanted, heat } = *self.input;
        let mut experts: Vec<(usize, u32, f64)> = (0..layers.len())
            .flat_map(|place| (0..layers[place].experts).map(move |expert| (place, expert)))
            .map(|(place, expert)| (place, expert, heat.of(layers[place].layer, expert)))
            .collect();
        experts.sort_by(|a, b| b.2.total_cmp(&a.2));
        let mut moves = Vec::new();
        for copies_so_far in 1..wanted {
            for &(place, expert, heat) in &experts {
                let PlacedLayer { layer, slab_bytes: bytes, .. } = layers[place];
                let held = self.placement.copies(layer, expert);
                if moves.len() == most || held.len() != copies_so_far {
                    continue;
                }
                let spread = |c: usize| domains(candidates, held.iter().copied().chain([c]));
                let to = self.able[place]
                    .iter()
                    .copied()
                    .filter(|c| !held.contains(c) && self.room[*c] >= bytes)
                    .min_by(|&a, &b| {
                        let by_share = self.share(a).total_cmp(&self.share(b));
                        spread(b).cmp(&spread(a)).then(by_share)
                    });
                if let Some(to) = to {
                    self.room[to] -= bytes;
                    self.placement.copies[layer as usize][expert as usize].push(to);
                    moves.push(Move { layer, expert, from: None, to, bytes, heat });
                }
            }
        }
        moves
    }
}

/// In how many failure domains workers are.
fn domains(candidates: &[Candidate], workers: impl Iterator<Item = usize>) -> usize {
    let mut seen: Vec<&str> = workers.map(|worker| candidates[worker].domain()).collect();
    seen.sort_unstable();
    seen.dedup();
    seen.len()
}

#[cfg(test)]
mod tests;
