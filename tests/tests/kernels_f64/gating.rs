use shimmer_kernels::gating::{GatingRule, GatingScratch, Score, select};
use shimmer_tests::{random::uniform, reference::gating::Gating};

use super::{UNIT, assert_close, widen};

/// A choice this close may fall either way in f32.
const CLOSE: f64 = 1e-6;

fn check(score: Score, experts: usize, gating: Gating, biased: bool) {
    let rule = GatingRule {
        score,
        top_k: gating.top_k,
        groups: gating.groups,
        groups_kept: gating.groups_kept,
        normalise: gating.normalise,
        normalise_eps: if gating.normalise && gating.sigmoid { 1e-20 } else { 0.0 },
        #[expect(clippy::cast_possible_truncation, reason = "the scales below are exact in f32")]
        scale: gating.scale as f32,
    };
    let (mut scratch, mut found) = (GatingScratch::default(), Vec::new());
    for seed in 0..200 {
        let logits: Vec<f32> = uniform(seed, experts).iter().map(|x| x * 5.0).collect();
        let bias = biased.then(|| uniform(seed + 1000, experts));
        select(&rule, &logits, bias.as_deref(), &mut scratch, &mut found).unwrap();
        let (expected, margin) =
            gating.choose(&widen(&logits), bias.as_deref().map(widen).as_deref());
        if margin < CLOSE {
            continue;
        }
        assert_eq!(found.len(), expected.len());
        for (rank, &(expert, weight)) in expected.iter().enumerate() {
            let name = format!("{gating:?} of {experts}, seed {seed}, rank");
            let ours = found.iter().find(|selected| selected.expert as usize == expert);
            let ours = ours
                .unwrap_or_else(|| panic!("{name} {rank}: expert {expert} is not in {found:?}"));
            // exp, sums of at most 16 terms, two divisions and a product.
            assert_close(&name, rank, ours.weight, weight, 16.0 * UNIT * weight);
        }
    }
}

#[test]
fn the_same_experts_with_the_same_weights() {
    let softmax = |top_k, normalise| Gating {
        sigmoid: false,
        top_k,
        groups: 1,
        groups_kept: 1,
        normalise,
        scale: 1.0,
    };
    let sigmoid = |top_k, groups, groups_kept, normalise| Gating {
        sigmoid: true,
        groups,
        groups_kept,
        scale: 2.5,
        ..softmax(top_k, normalise)
    };
    check(Score::Softmax, 8, softmax(2, true), false);
    check(Score::Softmax, 13, softmax(4, false), false);
    check(Score::Softmax, 128, softmax(8, true), false);
    check(Score::Sigmoid, 16, sigmoid(4, 1, 1, true), true);
    check(Score::Sigmoid, 16, sigmoid(3, 4, 2, false), true);
    check(Score::Sigmoid, 256, sigmoid(8, 8, 4, true), true);
}

#[test]
fn ties_go_to_the_lowest_expert() {
    let rule = GatingRule {
        score: Score::Sigmoid,
        top_k: 3,
        groups: 4,
        groups_kept: 2,
        normalise: true,
        normalise_eps: 1e-20,
        scale: 1.0,
    };
    let (mut scratch, mut found) = (GatingScratch::default(), Vec::new());
    select(&rule, &[0.0; 16], None, &mut scratch, &mut found).unwrap();
    assert_eq!(found.iter().map(|selected| selected.expert).collect::<Vec<_>>(), [0, 1, 2]);
}
