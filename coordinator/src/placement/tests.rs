use super::*;

mod copies;

fn worker(id: impl Into<String>, weight: f64) -> Candidate {
    Candidate { id: id.into(), weight, ..Candidate::default() }
}

fn layers(count: u32, experts: u32) -> Vec<PlacedLayer> {
    (0..count).map(|layer| PlacedLayer { layer, experts, slab_bytes: 10 }).collect()
}

/// Shares of the workers are within `tolerance` of what their weights say.
fn check(weights: &[f64], layer_count: u32, experts: u32, tolerance: f64) {
    let candidates: Vec<_> =
        weights.iter().enumerate().map(|(i, &w)| worker(format!("w{i}"), w)).collect();
    let placement = Placement::compute(&layers(layer_count, experts), &candidates).unwrap();
    let shares = placement.shares();
    let total = f64::from(layer_count * experts);
    assert_eq!(shares.iter().sum::<usize>(), (layer_count * experts) as usize);
    let sum: f64 = weights.iter().sum();
    for (share, weight) in shares.iter().zip(weights) {
        let expected = weight / sum;
        let found = *share as f64 / total;
        assert!(
            (found - expected).abs() <= tolerance,
            "{weights:?}: share {found}, expected {expected}"
        );
    }
}

#[test]
fn shares_are_proportional_to_weights() {
    check(&[1.0], 4, 8, 0.0);
    check(&[1.0, 1.0], 64, 128, 0.02);
    check(&[3.0, 1.0], 64, 128, 0.02);
    check(&[0.5, 1.5, 2.0, 4.0], 64, 128, 0.02);
    check(&[1.0; 5], 64, 128, 0.02);
    check(&[1.0; 16], 64, 128, 0.01);
    check(&[100_000.0, 1.0], 64, 128, 0.001);
}

#[test]
fn every_layer_is_spread() {
    let placement =
        Placement::compute(&layers(32, 64), &[worker("a", 1.0), worker("b", 1.0)]).unwrap();
    for worker in 0..2 {
        let owned = placement.owned_by(worker);
        assert_eq!(owned.len(), 32);
        assert!(
            owned.iter().all(|(_, experts)| experts.is_sorted() && experts.len() > 15),
            "{owned:?}"
        );
    }
}

#[test]
fn more_workers_than_experts_is_fine() {
    let candidates: Vec<_> = (0..16).map(|i| worker(format!("w{i}"), 1.0)).collect();
    let placement = Placement::compute(&layers(2, 3), &candidates).unwrap();
    assert_eq!(placement.shares().iter().sum::<usize>(), 6);
    for (layer, expert) in [(0, 0), (0, 2), (1, 1)] {
        assert!(placement.owner(layer, expert).is_some_and(|w| w < 16));
    }
    assert_eq!(placement.owner(0, 3), None);
    assert_eq!(placement.owner(2, 0), None);
}

#[test]
fn a_joining_worker_moves_only_what_it_gains() {
    let mut candidates: Vec<_> =
        (0..4).map(|i| worker(format!("w{i}"), 1.0 + f64::from(i))).collect();
    let before = Placement::compute(&layers(16, 64), &candidates).unwrap();
    candidates.push(worker("w4", 2.0));
    let after = Placement::compute(&layers(16, 64), &candidates).unwrap();
    let mut moved = 0;
    for layer in 0..16 {
        for expert in 0..64 {
            if before.owner(layer, expert) != after.owner(layer, expert) {
                assert_eq!(after.owner(layer, expert), Some(4));
                moved += 1;
            }
        }
    }
    assert_eq!(moved, after.shares()[4]);
    assert!(moved > 0);
}

#[test]
fn the_order_of_workers_does_not_matter() {
    let (a, b, c) = (worker("a", 1.0), worker("b", 2.0), worker("c", 3.0));
    let one = Placement::compute(&layers(8, 20), &[a.clone(), b.clone(), c.clone()]).unwrap();
    let other = Placement::compute(&layers(8, 20), &[c, a, b]).unwrap();
    for layer in 0..8 {
        for expert in 0..20 {
            assert_eq!(one.owner(layer, expert).map(|w| (w + 1) % 3), other.owner(layer, expert));
        }
    }
}

#[test]
fn absent_layers_go_to_the_others() {
    let mut poor = worker("poor", 1000.0);
    poor.absent_layers = vec![1];
    let candidates = [poor, worker("rich", 1.0)];
    let placement = Placement::compute(&layers(2, 8), &candidates).unwrap();
    assert!((0..8).all(|expert| placement.owner(1, expert) == Some(1)));

    let mut none = candidates;
    none[1].absent_layers = vec![1];
    let error = Placement::compute(&layers(2, 8), &none).unwrap_err();
    assert_eq!(error, PlacementError::NoCandidate { layer: 1 });
}

#[test]
fn bad_workers_are_refused_by_name() {
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
        let error = Placement::compute(&layers(1, 1), &[worker("w7", weight)]).unwrap_err();
        assert!(error.to_string().starts_with("worker w7 has weight"), "{error}");
    }
    let error =
        Placement::compute(&layers(1, 1), &[worker("w", 1.0), worker("w", 2.0)]).unwrap_err();
    assert_eq!(error, PlacementError::DuplicateId { id: "w".to_owned() });
    assert_eq!(
        Placement::compute(&layers(1, 1), &[]).unwrap_err(),
        PlacementError::NoCandidate { layer: 0 }
    );
}

#[test]
fn one_placement_is_pinned() {
    // Placement must not change between builds of one cluster; a new rule needs a new protocol version.
    let placement =
        Placement::compute(&layers(1, 24), &[worker("a", 1.0), worker("b", 1.0), worker("c", 2.0)])
            .unwrap();
    let owners: Vec<_> = (0..24).map(|expert| placement.owner(0, expert).unwrap()).collect();
    assert_eq!(owners, [1, 1, 0, 2, 0, 0, 0, 1, 1, 2, 0, 2, 0, 0, 2, 1, 0, 2, 2, 2, 2, 1, 0, 1]);
}
