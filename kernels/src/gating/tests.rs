use super::*;

fn rule(score: Score, top_k: usize) -> GatingRule {
    GatingRule {
        score,
        top_k,
        groups: 1,
        groups_kept: 1,
        normalise: false,
        normalise_eps: 0.0,
        scale: 1.0,
    }
}

fn run(
    rule: &GatingRule,
    logits: &[f32],
    bias: Option<&[f32]>,
) -> Result<Vec<Selected>, GatingError> {
    let mut out = Vec::new();
    select(rule, logits, bias, &mut GatingScratch::default(), &mut out).map(|()| out)
}

fn experts(rule: &GatingRule, logits: &[f32], bias: Option<&[f32]>) -> Vec<u32> {
    run(rule, logits, bias).unwrap().iter().map(|s| s.expert).collect()
}

#[test]
fn rank_order_is_descending_and_ties_go_to_the_lowest() {
    for score in [Score::Softmax, Score::Sigmoid] {
        assert_eq!(experts(&rule(score, 3), &[0.0, 2.0, 1.0, 2.0, 2.0], None), [1, 3, 4]);
        assert_eq!(experts(&rule(score, 4), &[0.5; 7], None), [0, 1, 2, 3]);
    }
}

#[test]
fn all_experts_can_be_chosen() {
    assert_eq!(experts(&rule(Score::Softmax, 3), &[1.0, 3.0, 2.0], None), [1, 2, 0]);
}

#[test]
fn bias_moves_the_choice_but_not_the_weight() {
    let rule = rule(Score::Sigmoid, 1);
    let selected = run(&rule, &[0.0, 1.0], Some(&[1.0, 0.0])).unwrap();
    assert_eq!(selected, [Selected { expert: 0, weight: 0.5 }]);
}

#[test]
fn negative_choices_can_win_over_masked_groups() {
    let rule = GatingRule { groups: 2, groups_kept: 1, ..rule(Score::Sigmoid, 2) };
    // Group 1 has the better pair; its second member is below zero, the masked ones are not.
    let bias = [0.0, 0.0, 2.0, -1.5];
    assert_eq!(experts(&rule, &[0.0; 4], Some(&bias)), [2, 3]);
}

#[test]
fn groups_score_their_two_best() {
    let rule = GatingRule { groups: 3, groups_kept: 2, ..rule(Score::Sigmoid, 3) };
    let logits = [9.0, -9.0, -9.0, 1.0, 1.0, -9.0, 0.5, 0.5, 0.5];
    // Pairs: about 1.0, 1.46, 1.24.
    assert_eq!(experts(&rule, &logits, None), [3, 4, 6]);
    // Equal groups: the lowest are kept.
    assert_eq!(experts(&rule, &[0.0; 9], None), [0, 1, 2]);
}

#[test]
fn weights_are_normalised_in_rank_order_then_scaled() {
    let rule =
        GatingRule { normalise: true, normalise_eps: 1e-20, scale: 2.5, ..rule(Score::Sigmoid, 2) };
    let selected = run(&rule, &[1.0, -1.0, 0.0], None).unwrap();
    let (a, b) = (math::sigmoid(1.0), math::sigmoid(0.0));
    let total = a + b + 1e-20;
    assert_eq!(selected[0], Selected { expert: 0, weight: a / total * 2.5 });
    assert_eq!(selected[1], Selected { expert: 2, weight: b / total * 2.5 });
}

#[test]
fn scores_that_are_not_finite_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = run(&rule(Score::Softmax, 1), &[0.0, bad], None).unwrap_err();
        assert_eq!(error, GatingError::NonFinite { expert: 1 });
        let error = run(&rule(Score::Sigmoid, 1), &[0.0, 0.0], Some(&[bad, 0.0])).unwrap_err();
        assert_eq!(error, GatingError::NonFinite { expert: 0 });
    }
}

#[test]
fn rules_that_do_not_fit_are_refused() {
    let check = |rule: GatingRule, experts: usize| {
        let error = run(&rule, &vec![0.0; experts], None).unwrap_err();
        assert!(matches!(error, GatingError::Rule { .. }), "{error}");
    };
    check(rule(Score::Softmax, 5), 4);
    check(rule(Score::Softmax, 0), 4);
    check(rule(Score::Softmax, 1), 0);
    check(GatingRule { groups: 3, ..rule(Score::Softmax, 1) }, 4);
    check(GatingRule { groups: 0, ..rule(Score::Softmax, 1) }, 4);
    check(GatingRule { groups: 2, groups_kept: 3, ..rule(Score::Softmax, 1) }, 4);
    check(GatingRule { groups: 2, groups_kept: 1, ..rule(Score::Softmax, 3) }, 4);
    let error = run(&rule(Score::Sigmoid, 1), &[0.0; 3], Some(&[0.0; 2])).unwrap_err();
    assert_eq!(error, GatingError::BiasLength { experts: 3, found: 2 });
}
