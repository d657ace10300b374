use proptest::prelude::*;

use super::*;

/// Logits of given probabilities.
#[expect(clippy::cast_possible_truncation, reason = "rounding to the type of logits")]
fn logarithms(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| libm::log(*p) as f32).collect()
}

/// The token chosen at position 7 with the defaults changed by `change`.
fn token(logits: &[f32], change: impl FnOnce(&mut Sampling)) -> Result<u32, SamplerError> {
    let mut sampling = Sampling::default();
    change(&mut sampling);
    choose(&sampling, &History::new(&[1, 2]), logits, 7, &mut SamplerScratch::default())
}

/// All tokens that some seed can draw.
fn support(logits: &[f32], change: impl Fn(&mut Sampling)) -> Vec<u32> {
    let draw = |seed| {
        token(logits, |sampling| {
            change(sampling);
            sampling.seed = seed;
        })
    };
    let mut seen: Vec<u32> = (0..2000).map(|seed| draw(seed).unwrap()).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_id_of_ties() {
    let check = |logits: &[f32], expected| {
        assert_eq!(token(logits, |s| s.temperature = 0.0), Ok(expected));
        assert_eq!(token(logits, |s| s.top_k = 1), Ok(expected), "top_k 1");
    };
    check(&[0.0, 3.0, 3.0, 1.0], 1);
    check(&[-5.0, -5.0], 0);
    check(&[-0.0, 0.0], 0);
    check(&[1.0, 1.0 + f32::EPSILON], 1);
    check(&[f32::MIN, f32::MIN], 0);
}

#[test]
fn logits_that_are_not_finite_are_refused_by_name() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(
            token(&[0.0, 1.0, bad, 2.0], |s| s.temperature = 0.0),
            Err(SamplerError::NonFinite { token: 2 })
        );
    }
    let overflow = token(&[0.0, 1.0, 0.0], |s| s.repetition_penalty = 1e-45);
    assert_eq!(overflow, Err(SamplerError::Penalised { token: 1 }));
}

#[test]
fn bias_and_penalties_come_before_the_greedy_choice() {
    let greedy = |logits: &[f32], change: fn(&mut Sampling)| {
        token(logits, |sampling| {
            sampling.temperature = 0.0;
            change(sampling);
        })
    };
    assert_eq!(greedy(&[1.0, 0.0, 0.0, 0.0], |s| s.logit_bias = vec![(3, 1.5)]), Ok(3));
    // Tokens 1 and 2 are in the prompt: positive logits shrink, negative ones grow away from zero.
    assert_eq!(greedy(&[1.0, 1.5, 0.0, 0.0], |s| s.repetition_penalty = 2.0), Ok(0));
    assert_eq!(greedy(&[-1.5, -1.0, -9.0, -9.0], |s| s.repetition_penalty = 2.0), Ok(0));
    // Presence and frequency look at generated tokens only.
    assert_eq!(greedy(&[1.0, 1.5, 0.0, 0.0], |s| s.presence_penalty = 2.0), Ok(1));
    let mut history = History::new(&[1, 2]);
    history.push(3);
    history.push(3);
    let sampling = Sampling { temperature: 0.0, frequency_penalty: 0.5, ..Sampling::default() };
    let pick =
        |logits: &[f32]| choose(&sampling, &history, logits, 7, &mut SamplerScratch::default());
    assert_eq!(pick(&[1.0, 0.0, 0.0, 2.5]), Ok(3));
    assert_eq!(pick(&[1.0, 0.0, 0.0, 1.9]), Ok(0));
}

#[test]
fn cuts_keep_what_their_definition_says() {
    // Probabilities 0.4, 0.3, 0.2, 0.1 in shuffled order of id.
    let logits = logarithms(&[0.1, 0.4, 0.2, 0.3]);
    let check = |change: fn(&mut Sampling), expected: &[u32]| {
        assert_eq!(support(&logits, change), expected)
    };
    check(|_| {}, &[0, 1, 2, 3]);
    check(|s| s.top_k = 2, &[1, 3]);
    check(|s| s.top_k = 9, &[0, 1, 2, 3]);
    check(|s| s.top_p = 1e-6, &[1]);
    check(|s| s.top_p = 0.65, &[1, 3]);
    check(|s| s.top_p = 0.75, &[1, 2, 3]);
    check(|s| s.min_p = 0.6, &[1, 3]);
    check(|s| s.min_p = 1.0, &[1]);
    // After top_k 3 the rest is 0.4, 0.3, 0.2 of 0.9: 0.75 of it is held by two.
    check(|s| (s.top_k, s.top_p) = (3, 0.75), &[1, 3]);
    check(|s| s.temperature = 1e-30, &[1]);
}

#[test]
fn ties_at_a_cut_go_to_the_lower_id() {
    assert_eq!(support(&[1.0; 6], |s| s.top_k = 3), [0, 1, 2]);
    assert_eq!(support(&[1.0; 4], |s| s.top_p = 0.5), [0, 1]);
}

#[test]
fn draws_follow_the_distribution_and_only_their_key() {
    let logits = logarithms(&[0.5, 0.25, 0.25]);
    let mut counts = [0_u32; 3];
    for seed in 0..8000 {
        counts[token(&logits, |s| s.seed = seed).unwrap() as usize] += 1;
    }
    for (count, expected) in counts.iter().zip([4000, 2000, 2000]) {
        assert!(count.abs_diff(expected) < 200, "{counts:?}");
    }
    let at = |seed, choice, position| {
        let sampling = Sampling { seed, choice, ..Sampling::default() };
        let history = History::default();
        choose(&sampling, &history, &[0.0; 1000], position, &mut SamplerScratch::default()).unwrap()
    };
    assert_eq!(at(5, 0, 9), at(5, 0, 9));
    let distinct = [at(5, 0, 9), at(6, 0, 9), at(5, 1, 9), at(5, 0, 10), at(5 << 32, 0, 9)];
    for (index, one) in distinct.iter().enumerate() {
        assert!(!distinct[..index].contains(one), "{distinct:?}");
    }
}

#[test]
fn log_probabilities_are_the_log_softmax_best_first() {
    let logits = [1.0, 3.0, 3.0, 0.0];
    let got = log_probabilities(&logits, 0, 3);
    let sum: f64 = logits.iter().map(|l| libm::exp(f64::from(*l))).sum();
    let close = |a: f32, logit: f64| (f64::from(a) - (logit - libm::log(sum))).abs() < 1e-6;
    assert!(close(got.chosen, 1.0));
    assert_eq!(got.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 2, 0]);
    assert!(close(got.top[0].1, 3.0) && close(got.top[2].1, 1.0));
    assert_eq!(log_probabilities(&logits, 3, 0).top, []);
    assert_eq!(log_probabilities(&logits, 3, 20).top.len(), 4);
}

proptest! {
    /// Whatever the parameters, a chosen token exists, and a reused scratch changes nothing.
    #[test]
    fn always_a_token(
        logits in prop::collection::vec(-30.0_f32..30.0, 1..60),
        temperature in 0.0_f32..3.0, top_k in 0_u32..70, top_p in 1e-3_f32..=1.0, min_p in 0.0_f32..=1.0, seed: u64,
    ) {
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed, ..Sampling::default() };
        let mut scratch = SamplerScratch::default();
        let first = choose(&sampling, &History::default(), &logits, 3, &mut scratch).unwrap();
        prop_assert!((first as usize) < logits.len());
        prop_assert_eq!(choose(&sampling, &History::default(), &logits, 3, &mut scratch).unwrap(), first);
        let rank = logits.iter().filter(|l| **l > logits[first as usize]).count();
        prop_assert!(top_k == 0 || rank < top_k as usize);
    }
}
