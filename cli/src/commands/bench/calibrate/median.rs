//! Named samples and their medians.

use std::collections::BTreeMap;

/// What was measured, by name.
#[derive(Debug, Default)]
pub(super) struct Samples(BTreeMap<String, Vec<f64>>);

impl Samples {
    pub(super) fn add(&mut self, name: &str, value: f64) {
        self.0.entry(name.to_owned()).or_default().push(value);
    }

    /// The middle one; 0 of what was never measured.
    pub(super) fn median(&self, name: &str) -> f64 {
        let mut values = self.0.get(name).cloned().unwrap_or_default();
        values.sort_by(f64::total_cmp);
        match values.len() {
            0 => 0.0,
            count if count % 2 == 1 => values[count / 2],
            count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
        }
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
}
