//! What a rebalance moved stays where it is when the members change, as far as it can.
//!
//! Placement forgets: it is a function of the members. What was moved on purpose is told by comparing the placement in force
//! with the one that follows from the members that it was made of; those experts keep their holders if all of them are
//! still there.

use super::{Candidate, Placement, PlacementError, PlacementInput, rebalance::domains, slab_bytes};

impl Placement {
    /// As [`Self::plan`], after `before`, whose workers are numbered as `members` are. An expert that `before` has
    /// elsewhere than a plan for those members would keeps its holders, unless one of them is gone or has no room, or
    /// the expert would have fewer copies or failure domains than it can have.
    pub fn plan_after(
        input: &PlacementInput<'_>,
        before: &Self,
        members: &[Candidate],
    ) -> Result<Self, PlacementError> {
        let mut placement = Self::plan(input)?;
        let PlacementInput { layers, candidates, .. } = *input;
        let Ok(natural) = Self::plan(&PlacementInput { candidates: members, ..*input }) else {
            // Those members could not be placed on today: nothing tells what was moved.
            return Ok(placement);
        };
        let now: Vec<Option<usize>> = members
            .iter()
            .map(|member| candidates.iter().position(|candidate| candidate.id == member.id))
            .collect();
        let mut room: Vec<i128> = (0..candidates.len())
            .map(|worker| placement.room(layers, &candidates[worker], worker))
            .collect();
        for (layer, expert, holders) in before.experts() {
            if holders == natural.copies(layer, expert) {
                continue;
            }
            let has_file = |worker: &usize| !candidates[*worker].absent_layers.contains(&layer);
            let held: Option<Vec<usize>> =
                holders.iter().map(|&holder| now[holder].filter(has_file)).collect();
            let Some(held) = held else { continue };
            let fresh = placement.copies(layer, expert).to_vec();
            let bytes = i128::from(slab_bytes(layers, layer));
            let fits = |worker: &usize| fresh.contains(worker) || room[*worker] >= bytes;
            let spread = |copies: &[usize]| domains(candidates, copies.iter().copied());
            if held.len() < fresh.len() || spread(&held) < spread(&fresh) || !held.iter().all(fits)
            {
                continue;
            }
            held.iter().filter(|worker| !fresh.contains(worker)).for_each(|&w| room[w] -= bytes);
            fresh.iter().filter(|worker| !held.contains(worker)).for_each(|&w| room[w] += bytes);
            placement.copies[layer as usize][expert as usize] = held;
        }
        Ok(placement)
    }
}

#[cfg(test)]
mod tests {
    use shimmer_proto::membership::records::HeatRecord;

    use super::{super::rebalance::rebalance, *};
    use crate::{heat::HeatMap, placement::PlacedLayer};

    const LAYERS: [PlacedLayer; 2] = [
        PlacedLayer { layer: 0, experts: 32, slab_bytes: 1 },
        PlacedLayer { layer: 1, experts: 32, slab_bytes: 1 },
    ];

    fn cluster(ids: &[&str]) -> Vec<Candidate> {
        let named =
            |id: &&str| Candidate { id: (*id).to_owned(), weight: 1.0, ..Candidate::default() };
        ids.iter().map(named).collect()
    }

    fn skewed() -> HeatMap {
        let rows = |layer: u32| (layer, (0..32_u8).map(|e| 500.0 / f32::from(e + 1)).collect());
        [&HeatRecord { layers: vec![rows(0), rows(1)] }].into_iter().collect()
    }

    /// Experts whose holders in `after` are those in `before`, by name.
    fn same(
        before: &Placement,
        of: &[Candidate],
        after: &Placement,
        now: &[Candidate],
    ) -> Vec<bool> {
        let named = |copies: &[usize], of: &[Candidate]| -> Vec<String> {
            copies.iter().map(|&copy| of[copy].id.clone()).collect()
        };
        let pairs = before.experts().zip(after.experts());
        pairs.map(|((_, _, a), (_, _, b))| named(a, of) == named(b, now)).collect()
    }

    #[test]
    fn moves_survive_a_join_and_what_is_not_moved_follows_the_members() {
        let (heat, old) = (skewed(), cluster(&["a", "b", "c"]));
        let input = PlacementInput { layers: &LAYERS, candidates: &old, copies: 1, heat: &heat };
        let natural = Placement::plan(&input).unwrap();
        let moved = rebalance(&natural, &input, 10).unwrap().placement;
        let on_purpose = same(&natural, &old, &moved, &old).iter().filter(|same| !**same).count();
        assert!(on_purpose > 0);

        let new = cluster(&["a", "b", "c", "d"]);
        let input = PlacementInput { candidates: &new, ..input };
        let fresh = Placement::plan(&input).unwrap();
        let after = Placement::plan_after(&input, &moved, &old).unwrap();
        let kept = same(&moved, &old, &after, &new);
        let was_moved = same(&natural, &old, &moved, &old).into_iter().map(|same| !same);
        assert!(was_moved.zip(&kept).all(|(moved, &kept)| !moved || kept));
        let gained = |placement: &Placement| placement.shares()[3];
        assert!(gained(&after) > 0 && gained(&after) + on_purpose >= gained(&fresh));
        // Without moves it is the plan.
        assert_eq!(Placement::plan_after(&input, &natural, &old).unwrap(), fresh);
    }

    #[test]
    fn what_was_moved_to_a_worker_that_is_gone_is_placed_anew() {
        let (heat, old) = (skewed(), cluster(&["a", "b", "c"]));
        let input = PlacementInput { layers: &LAYERS, candidates: &old, copies: 1, heat: &heat };
        let moved = rebalance(&Placement::plan(&input).unwrap(), &input, 10).unwrap().placement;
        let new = cluster(&["a", "b"]);
        let input = PlacementInput { candidates: &new, ..input };
        let after = Placement::plan_after(&input, &moved, &old).unwrap();
        assert!(after.experts().all(|(_, _, copies)| copies.len() == 1 && copies[0] < 2));
    }

    #[test]
    fn what_has_no_room_or_no_file_any_more_is_placed_anew() {
        let (heat, old) = (skewed(), cluster(&["a", "b", "c"]));
        let input = PlacementInput { layers: &LAYERS, candidates: &old, copies: 1, heat: &heat };
        let natural = Placement::plan(&input).unwrap();
        let moved = rebalance(&natural, &input, 10).unwrap().placement;
        let mut new = old.clone();
        for (candidate, share) in new.iter_mut().zip(natural.shares()) {
            candidate.ram_budget_bytes = share as u64;
        }
        let input = PlacementInput { candidates: &new, ..input };
        let after = Placement::plan_after(&input, &moved, &old).unwrap();
        let limits = natural.shares();
        assert!(after.shares().iter().zip(&limits).all(|(share, limit)| share <= limit));
        let mut without = old.clone();
        without[0].absent_layers = vec![1];
        let input = PlacementInput { candidates: &without, ..input };
        let after = Placement::plan_after(&input, &moved, &old).unwrap();
        assert!(after.experts().all(|(layer, _, copies)| layer == 0 || !copies.contains(&0)));
    }
}
