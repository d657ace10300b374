//! What happened in schedules, by name: shows that the faults do something, and how much was checked.

use std::collections::BTreeMap;

use shimmer_coordinator::dispatch::FaultCounts;

/// Counts of schedules that broke no rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    counts: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// How often something happened.
    pub fn of(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    pub(super) fn count(&mut self, what: &'static str, times: u64) {
        *self.counts.entry(what).or_default() += times;
    }

    pub(super) fn add(&mut self, other: &Self) {
        other.counts.iter().for_each(|(what, times)| self.count(what, *times));
    }

    /// What the exchange of one coordinator says of itself.
    pub(super) fn dispatch(&mut self, counts: &FaultCounts) {
        let FaultCounts { resent, hedged, adopted, audits, audits_skipped, .. } = *counts;
        for (what, times) in [
            ("messages sent again", resent),
            ("hedges", hedged),
            ("experts adopted", adopted),
            ("comparisons", audits),
            ("comparisons left out", audits_skipped),
            ("comparisons that differed", counts.mismatches),
            ("liars found by a third", counts.quarantines),
        ] {
            self.count(what, times);
        }
    }
}
