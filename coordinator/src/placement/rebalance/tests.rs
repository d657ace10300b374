use proptest::prelude::*;
use shimmer_proto::membership::records::HeatRecord;

use super::*;
use crate::heat::HeatMap;

const EXPERTS: u32 = 32;

fn layers() -> Vec<PlacedLayer> {
    (0..4).map(|layer| PlacedLayer { layer, experts: EXPERTS, slab_bytes: 10 }).collect()
}

fn cluster(workers: usize, hosts: usize) -> Vec<Candidate> {
    let on = |index: usize| Candidate {
        id: format!("w{index}"),
        weight: [1.0, 2.0, 0.5][index % 3],
        host: format!("h{}", index % hosts),
        ..Candidate::default()
    };
    (0..workers).map(on).collect()
}

/// Heat that falls with the rank of an expert as 1 / rank; which expert has which rank differs by layer and seed.
fn skewed(seed: u64) -> HeatMap {
    let of_layer = |layer: u32| {
        let rank = |expert: u32| {
            let mixed = (u64::from(expert) + seed + u64::from(layer) * 5).wrapping_mul(7)
                % u64::from(EXPERTS);
            1000.0 / (mixed as f32 + 1.0)
        };
        (layer, (0..EXPERTS).map(rank).collect())
    };
    [&HeatRecord { layers: (0..4).map(of_layer).collect() }].into_iter().collect()
}

fn levelled(
    candidates: &[Candidate],
    copies: usize,
    heat: &HeatMap,
    most: usize,
) -> (Placement, Rebalance) {
    let input = PlacementInput { layers: &layers(), candidates, copies, heat };
    let before = Placement::plan(&input).unwrap();
    let after = rebalance(&before, &input, most).unwrap();
    assert_eq!(
        after,
        rebalance(&before, &input, most).unwrap(),
        "the same question, the same answer"
    );
    (before, after)
}

#[test]
fn a_skewed_load_becomes_level() {
    for (workers, copies) in [(2, 1), (3, 1), (5, 2), (8, 1), (8, 3)] {
        let (_, after) = levelled(&cluster(workers, workers), copies, &skewed(3), 64);
        assert!(
            after.imbalance_after < 1.05,
            "{workers} workers, {copies} copies: {} -> {} by {} moves",
            after.imbalance_before,
            after.imbalance_after,
            after.moves.len()
        );
    }
}

#[test]
fn without_heat_nothing_moves_but_missing_copies_are_made() {
    let candidates = cluster(3, 3);
    let none = HeatMap::default();
    let (before, after) = levelled(&candidates, 1, &none, 100);
    assert_eq!((after.moves.len(), &after.placement), (0, &before));
    assert_eq!((after.imbalance_before, after.imbalance_after), (1.0, 1.0));
    let input =
        PlacementInput { layers: &layers(), candidates: &candidates, copies: 2, heat: &none };
    let after = rebalance(&before, &input, 10).unwrap();
    assert_eq!(after.moves.len(), 10);
    assert!(after.moves.iter().all(|m| m.from.is_none() && m.bytes == 10));
}

#[test]
fn a_full_worker_gets_nothing() {
    let mut candidates = cluster(2, 2);
    candidates[1].ram_budget_bytes = 40;
    let input =
        PlacementInput { layers: &layers(), candidates: &candidates, copies: 1, heat: &skewed(1) };
    let before = Placement::plan(&input).unwrap();
    let after = rebalance(&before, &input, 50).unwrap();
    assert!(after.moves.iter().all(|m| m.to == 0), "{:?}", after.moves);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_rule_is_kept(
        workers in 2..10_usize, hosts in 1..5_usize, copies in 1..4_usize, seed in 0..50_u64, most in 0..40_usize,
    ) {
        let candidates = cluster(workers, hosts);
        let (before, after) = levelled(&candidates, copies, &skewed(seed), most);
        prop_assert!(after.moves.len() <= most);
        prop_assert!(after.imbalance_after <= after.imbalance_before);
        for ((_, _, a), (_, _, b)) in before.experts().zip(after.placement.experts()) {
            prop_assert!(b.len() >= a.len() && b.len() <= copies.max(a.len()));
            prop_assert!((1..b.len()).all(|place| !b[..place].contains(&b[place])));
            let spread = |copies: &[usize]| domains(&candidates, copies.iter().copied());
            prop_assert!(spread(b) >= spread(a));
        }
        // The moves lead from the one to the other.
        let mut replayed = before;
        for &Move { layer, expert, from, to, .. } in &after.moves {
            let copies = &mut replayed.copies[layer as usize][expert as usize];
            match from {
                Some(from) => *copies.iter_mut().find(|copy| **copy == from).unwrap() = to,
                None => copies.push(to),
            }
        }
        prop_assert_eq!(replayed, after.placement);
    }

    /// With moves to spare, the excess of the most loaded worker falls to less than a fifth of what it was.
    #[test]
    fn a_rebalance_is_worth_it(workers in 2..9_usize, seed in 0..50_u64) {
        let (_, after) = levelled(&cluster(workers, workers), 1, &skewed(seed), 128);
        let (before, after) = (after.imbalance_before - 1.0, after.imbalance_after - 1.0);
        prop_assert!(after < before / 5.0 || after < 0.02, "{before} -> {after}");
    }
}
