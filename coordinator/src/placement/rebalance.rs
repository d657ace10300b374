//! Moves and copies of experts that level what workers have to compute, by how often experts were used.
//!
//! The rows of an expert are spread over its copies, so each holder's load is the expert's heat over the number of copies;
//! a worker's share is its load over its weight. One change at a time takes load from the worker with the largest share: a
//! copy of it moves to another worker, or, where an expert has fewer copies than wanted, another worker gets one beside it.
//! Deterministic, and bounded by the number of changes.

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
    /// Worker that gives its copy away; none when a copy is added.
    pub from: Option<usize>,
    /// Worker that gets the copy.
    pub to: usize,
    /// Bytes that it has to read.
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
    /// Heat that each worker has to expect.
    loads: Vec<f64>,
    /// Bytes left; below 0 for workers that hold more than fits.
    room: Vec<i128>,
    /// By index in the input's layers.
    able: Vec<Vec<usize>>,
    least_gain: f64,
}

impl<'a> Leveller<'a> {
    fn new(placement: Placement, input: &'a PlacementInput<'a>, weights: Vec<f64>) -> Self {
        let PlacementInput { layers, candidates, .. } = *input;
        let room = (0..candidates.len())
            .map(|worker| placement.room(layers, &candidates[worker], worker))
            .collect();
        let able = layers.iter().map(|l| able(layers, candidates, l.layer)).collect();
        let mut leveller =
            Self { placement, input, weights, loads: Vec::new(), room, able, least_gain: 0.0 };
        leveller.loads = leveller.expected();
        leveller.least_gain = leveller.mean() * LEAST_GAIN;
        leveller
    }

    fn expected(&self) -> Vec<f64> {
        let mut loads = vec![0.0; self.weights.len()];
        for (layer, expert, copies) in self.placement.experts() {
            let each = self.input.heat.of(layer, expert) / count(copies.len());
            copies.iter().for_each(|&copy| loads[copy] += each);
        }
        loads
    }

    fn share(&self, worker: usize) -> f64 {
        self.loads[worker] / self.weights[worker]
    }

    fn mean(&self) -> f64 {
        self.loads.iter().sum::<f64>() / self.weights.iter().sum::<f64>()
    }

    fn imbalance(&self) -> f64 {
        let most = (0..self.loads.len()).map(|w| self.share(w)).fold(0.0, f64::max);
        if self.mean() > 0.0 { most / self.mean() } else { 1.0 }
    }

    /// The change that leaves the worker with the largest share and the one that it gives to with the smallest.
    fn best(&self) -> Option<Move> {
        let by_share = |a: &usize, b: &usize| self.share(*a).total_cmp(&self.share(*b));
        // The last of equals; any fixed choice will do.
        let giver = (0..self.loads.len()).max_by(by_share)?;
        let mut best: Option<(f64, Move)> = None;
        for (of_layer, able) in self.input.layers.iter().zip(&self.able) {
            let PlacedLayer { layer, experts, slab_bytes: bytes } = *of_layer;
            for expert in 0..experts {
                let copies = self.placement.copies(layer, expert);
                let heat = self.input.heat.of(layer, expert);
                if heat <= 0.0 || !copies.contains(&giver) {
                    continue;
                }
                // A move comes first: it takes no more memory than there was.
                let kinds = [Some(giver), None];
                let kinds = &kinds[..if copies.len() < self.input.copies { 2 } else { 1 }];
                for taker in able.iter().copied().filter(|taker| !copies.contains(taker)) {
                    for &from in kinds {
                        let after = self.after(giver, taker, heat, copies.len(), from.is_none());
                        let better = best.is_none_or(|(least, _)| after < least);
                        let gain = self.share(giver) - after;
                        // The dearest question last.
                        if better && gain > self.least_gain && self.may(copies, from, taker, bytes)
                        {
                            best =
                                Some((after, Move { layer, expert, from, to: taker, bytes, heat }));
                        }
                    }
                }
            }
        }
        best.map(|(_, change)| change)
    }

    /// The larger share of two workers when one of `copies` copies moves from one to the other, or one more is made there.
    fn after(&self, giver: usize, taker: usize, heat: f64, copies: usize, adds: bool) -> f64 {
        let before = heat / count(copies);
        let (kept, given) = if adds {
            let each = heat / count(copies + 1);
            (each, each)
        } else {
            (0.0, before)
        };
        let left = (self.loads[giver] - before + kept) / self.weights[giver];
        left.max((self.loads[taker] + given) / self.weights[taker])
    }

    /// Whether a worker may get a copy, in place of another one's or beside all.
    fn may(&self, copies: &[usize], from: Option<usize>, taker: usize, bytes: u64) -> bool {
        let candidates = self.input.candidates;
        let stay = copies.iter().copied().filter(|&copy| Some(copy) != from);
        self.room[taker] >= i128::from(bytes)
            && domains(candidates, stay.chain([taker]))
                >= domains(candidates, copies.iter().copied())
    }

    fn apply(&mut self, change: &Move) {
        let Move { layer, expert, from, to, bytes, heat } = *change;
        let copies = &mut self.placement.copies[layer as usize][expert as usize];
        let before = heat / count(copies.len());
        copies.iter().for_each(|&copy| self.loads[copy] -= before);
        match from.and_then(|from| copies.iter().position(|&copy| copy == from)) {
            Some(place) => copies[place] = to,
            None => copies.push(to),
        }
        let after = heat / count(copies.len());
        copies.iter().for_each(|&copy| self.loads[copy] += after);
        self.room[to] -= i128::from(bytes);
        if let Some(from) = from {
            self.room[from] += i128::from(bytes);
        }
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
                    .filter(|c| !held.contains(c) && self.room[*c] >= i128::from(bytes))
                    .min_by(|&a, &b| {
                        let by_share = self.share(a).total_cmp(&self.share(b));
                        spread(b).cmp(&spread(a)).then(by_share)
                    });
                if let Some(to) = to {
                    let change = Move { layer, expert, from: None, to, bytes, heat };
                    self.apply(&change);
                    moves.push(change);
                }
            }
        }
        moves
    }
}

#[expect(clippy::cast_precision_loss, reason = "an expert has a handful of copies")]
fn count(copies: usize) -> f64 {
    copies as f64
}

/// In how many failure domains workers are.
pub(super) fn domains(candidates: &[Candidate], workers: impl Iterator<Item = usize>) -> usize {
    let mut seen: Vec<&str> = workers.map(|worker| candidates[worker].domain()).collect();
    seen.sort_unstable();
    seen.dedup();
    seen.len()
}

#[cfg(test)]
mod tests;
