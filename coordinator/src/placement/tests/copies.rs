use std::collections::BTreeSet;

use proptest::prelude::*;
use shimmer_proto::membership::records::HeatRecord;

use super::*;

/// Workers on `hosts` hosts, with weights that differ and no known budget.
fn cluster(workers: usize, hosts: usize) -> Vec<Candidate> {
    let on = |index: usize| Candidate {
        host: format!("h{}", index % hosts),
        ..worker(format!("w{index}"), [1.0, 2.5, 0.5, 4.0][index % 4])
    };
    (0..workers).map(on).collect()
}

fn plan(
    layers: &[PlacedLayer],
    candidates: &[Candidate],
    copies: usize,
    heat: &HeatMap,
) -> Placement {
    Placement::plan(&PlacementInput { layers, candidates, copies, heat }).unwrap()
}

/// Holders of every expert by name.
fn holders(placement: &Placement, candidates: &[Candidate]) -> Vec<BTreeSet<String>> {
    let named = |copies: &[usize]| copies.iter().map(|&c| candidates[c].id.clone()).collect();
    placement.experts().map(|(_, _, copies)| named(copies)).collect()
}

fn hosts(candidates: &[Candidate], copies: &[usize]) -> usize {
    copies.iter().map(|&c| &candidates[c].host).collect::<BTreeSet<_>>().len()
}

fn heat(layer: u32, rows: &[f32]) -> HeatMap {
    [&HeatRecord { layers: vec![(layer, rows.to_vec())] }].into_iter().collect()
}

#[test]
fn further_copies_leave_the_first_as_it_was() {
    let candidates = cluster(7, 3);
    let one = Placement::compute(&layers(4, 16), &candidates).unwrap();
    for copies in 2..=MAX_COPIES {
        let more = plan(&layers(4, 16), &candidates, copies, &HeatMap::default());
        assert!(one.experts().zip(more.experts()).all(|(a, b)| a.2[0] == b.2[0]));
        assert!(more.experts().all(|(_, _, held)| held.len() == copies.min(7)));
    }
}

#[test]
fn room_goes_to_the_hottest() {
    // Two workers of one expert beside their own: 4 experts of 10 bytes, one layer.
    let mut candidates = cluster(2, 2);
    candidates.iter_mut().for_each(|c| c.weight = 1.0);
    let one = Placement::compute(&layers(1, 8), &candidates).unwrap();
    for (candidate, share) in candidates.iter_mut().zip(one.shares()) {
        candidate.ram_budget_bytes = 10 * (share as u64 + 1);
    }
    let rows = [0.0, 5.0, 1.0, 9.0, 2.0, 9.0, 0.5, 3.0];
    let placed = plan(&layers(1, 8), &candidates, 2, &heat(0, &rows));
    for worker in 0..2 {
        let others = (0..8).filter(|&e| one.owner(0, e) != Some(worker));
        let hottest =
            others.max_by(|&a, &b| rows[a as usize].total_cmp(&rows[b as usize]).then(b.cmp(&a)));
        let copied: Vec<u32> =
            (0..8).filter(|&e| placed.copies(0, e).get(1) == Some(&worker)).collect();
        assert_eq!(copied, hottest.into_iter().collect::<Vec<_>>(), "worker {worker}");
    }
}

#[test]
fn a_worker_without_room_for_a_layer_each_is_asked_last() {
    let mut candidates = cluster(3, 3);
    // One expert of each of four layers takes 40 bytes.
    candidates[1].ram_budget_bytes = 39;
    let placed = plan(&layers(4, 8), &candidates, 3, &HeatMap::default());
    assert_eq!(placed.shares()[1], 0);
    assert!(placed.experts().all(|(_, _, copies)| copies.len() == 2));
    candidates.iter_mut().for_each(|c| c.ram_budget_bytes = 39);
    let placed = plan(&layers(4, 8), &candidates, 1, &HeatMap::default());
    assert!(placed.shares().iter().all(|&share| share > 0), "nobody else can: {placed:?}");
}

#[test]
fn impossible_wishes_are_refused_by_name() {
    let refusal = |candidates: &[Candidate], copies| {
        let heat = HeatMap::default();
        let input = PlacementInput { layers: &layers(1, 1), candidates, copies, heat: &heat };
        Placement::plan(&input).unwrap_err().to_string()
    };
    let expected = "0 copies of each expert are asked for, expected 1 to 8";
    assert_eq!(refusal(&cluster(2, 1), 0), expected);
    assert!(refusal(&cluster(2, 1), 9).starts_with("9 copies"));
    assert_eq!(refusal(&cluster(65, 1), 1), "65 workers, a cluster has at most 64");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every count of workers, hosts, experts and copies: nobody twice, as many as can be, on as many hosts as can be.
    #[test]
    fn any_number_of_workers_is_placed_on(
        workers in 1..=MAX_WORKERS, on in 1..8_usize, experts in 1..12_u32, copies in 1..=MAX_COPIES,
    ) {
        let candidates = cluster(workers, on);
        let placed = plan(&layers(2, experts), &candidates, copies, &HeatMap::default());
        prop_assert_eq!(placed.experts().count(), 2 * experts as usize);
        for (_, _, held) in placed.experts() {
            let distinct: BTreeSet<_> = held.iter().collect();
            prop_assert_eq!(distinct.len(), held.len());
            prop_assert_eq!(held.len(), copies.min(workers));
            prop_assert_eq!(hosts(&candidates, held), copies.min(on.min(workers)));
        }
    }

    /// A worker that joins gains experts and nobody else does; seen backwards, one that leaves loses its own and nobody
    /// else does. Copies included.
    #[test]
    fn joining_and_leaving_move_only_what_they_must(
        workers in 1..12_usize, on in 1..5_usize, copies in 1..4_usize, newcomer_host in 0..6_usize,
        weight in 0.25..8.0_f64,
    ) {
        let without = cluster(workers, on);
        let mut with = without.clone();
        with.push(Candidate { host: format!("h{newcomer_host}"), ..worker("newcomer", weight) });
        let before = plan(&layers(3, 16), &without, copies, &HeatMap::default());
        let after = plan(&layers(3, 16), &with, copies, &HeatMap::default());
        let pairs = holders(&before, &without).into_iter().zip(holders(&after, &with));
        for (before, after) in pairs {
            let gained: Vec<_> = after.difference(&before).map(String::as_str).collect();
            prop_assert!(gained.is_empty() || gained == ["newcomer"], "{:?} {:?}", before, after);
            prop_assert!(gained.len() == 1 || before == after, "{:?} {:?}", before, after);
        }
    }

    /// Copies never take more than what first owners leave of a budget, and first owners do not depend on budgets.
    #[test]
    fn budgets_are_kept(
        budgets in prop::collection::vec(20..400_u64, 2..8), copies in 2..4_usize,
        rows in prop::collection::vec(0.0..100.0_f32, 16),
    ) {
        let mut candidates = cluster(budgets.len(), 3);
        let first = Placement::compute(&layers(2, 16), &candidates).unwrap();
        for (candidate, budget) in candidates.iter_mut().zip(&budgets) {
            candidate.ram_budget_bytes = *budget;
        }
        let placed = plan(&layers(2, 16), &candidates, copies, &heat(1, &rows));
        for ((share, own), budget) in placed.shares().into_iter().zip(first.shares()).zip(&budgets) {
            prop_assert!(share as u64 * 10 <= (*budget).max(own as u64 * 10));
        }
        for ((_, _, a), (_, _, b)) in first.experts().zip(placed.experts()) {
            prop_assert_eq!(a[0], b[0]);
        }
    }

    #[test]
    fn new_numbers_change_nothing_else(workers in 1..6_usize, shift in 0..6_usize) {
        let candidates = cluster(workers, 2);
        let placed = plan(&layers(2, 8), &candidates, 2, &HeatMap::default());
        let seats: Vec<usize> = (0..workers).map(|w| (w + shift) % workers + 3).collect();
        let reseated = placed.reseated(&seats, workers + 3);
        for (worker, &seat) in seats.iter().enumerate() {
            prop_assert_eq!(placed.owned_by(worker), reseated.owned_by(seat));
        }
    }
}
