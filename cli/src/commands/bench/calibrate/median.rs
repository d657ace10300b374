//! Named samples, and medians of them and of rounds.

use std::collections::BTreeMap;

use crate::forecast::{Costs, Curve};

/// What was measured, by name.
#[derive(Debug, Default)]
pub(super) struct Samples(BTreeMap<String, Vec<f64>>);

impl Samples {
    pub(super) fn add(&mut self, name: &str, value: f64) {
        self.0.entry(name.to_owned()).or_default().push(value);
    }

    /// The middle one; 0 of what was never measured.
    pub(super) fn median(&self, name: &str) -> f64 {
        self.0.get(name).map_or(0.0, |values| median(values.iter().copied()))
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        count if count % 2 == 1 => values[count / 2],
        count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
    }
}

/// The median of each cost. Rounds have the same points: routing is the same in each.
pub(super) fn median_of(rounds: &[Costs]) -> Costs {
    let Some(first) = rounds.first() else { return Costs::default() };
    let of = |cost: fn(&Costs) -> f64| median(rounds.iter().map(cost));
    let curve = |of: fn(&Costs) -> &Curve| Curve {
        rows: of(first).rows.clone(),
        seconds: (0..of(first).rows.len())
            .map(|at| median(rounds.iter().filter_map(|costs| of(costs).seconds.get(at).copied())))
            .collect(),
    };
    Costs {
        container: first.container.clone(),
        threads: first.threads,
        attention_decode_s: of(|costs| costs.attention_decode_s),
        attention_prefill_s: of(|costs| costs.attention_prefill_s),
        trunk: curve(|costs| &costs.trunk),
        expert: curve(|costs| &costs.expert),
        message: curve(|costs| &costs.message),
        message_more: curve(|costs| &costs.message_more),
        read: curve(|costs| &costs.read),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        let mut samples = Samples::default();
        let mut check = |value: f64, expected: f64| {
            samples.add("a", value);
            assert!((samples.median("a") - expected).abs() < 1e-12, "{samples:?}");
        };
        check(3.0, 3.0);
        check(1.0, 2.0);
        check(9.0, 3.0);
        assert!(Samples::default().median("b").abs() < 1e-12);
    }

    #[test]
    fn costs_are_the_median_of_each_alone() {
        let round = |attention: f64, seconds: [f64; 2]| Costs {
            attention_decode_s: attention,
            read: Curve { rows: vec![1.0, 16.0], seconds: seconds.to_vec() },
            ..Costs::default()
        };
        let rounds = [round(1.0, [5.0, 1.0]), round(2.0, [7.0, 2.0]), round(9.0, [6.0, 9.0])];
        assert_eq!(median_of(&rounds), round(2.0, [6.0, 2.0]));
    }
}
