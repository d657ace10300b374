//! What is done about workers that are late or wrong, and how often it was done.

use std::time::Duration;

use serde::Serialize;

/// When work is sent to a second worker. None of it changes a byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultPolicy {
    /// Work that is out for this many times longer than its worker usually takes is sent to another one as well. 0: never;
    /// a worker that is that late is still asked whether it is alive.
    pub hedge_factor: f64,
    /// Work is never late before this, however fast its worker was.
    pub hedge_floor: Duration,
    /// As the floor, where nobody else holds the experts and another worker would have to read them.
    pub cold_floor: Duration,
    /// When work is late while its worker's usual time is not known.
    pub unknown: Duration,
    /// Messages that may be sent twice per message that is sent once. Where everybody is late the load is the reason, and
    /// more of it no cure.
    pub hedge_share: f64,
    /// Share of messages that are computed by two workers and compared, in ten thousandths.
    pub audit_per_10k: u32,
    /// How long an expert that a worker could not read is asked of others first.
    pub sick: Duration,
    /// How long two workers that disagree may take to show which of them is wrong, where there is no third.
    pub contest: Duration,
}

impl Default for FaultPolicy {
    fn default() -> Self {
        Self {
            // Of the slowest of the last 64 replies of its size: twice that is no noise.
            hedge_factor: 2.0,
            // A busy host stops a process for tens of milliseconds.
            hedge_floor: Duration::from_millis(50),
            cold_floor: Duration::from_millis(250),
            unknown: Duration::from_millis(500),
            hedge_share: 0.05,
            audit_per_10k: 0,
            sick: Duration::from_secs(30),
            contest: Duration::from_secs(2),
        }
    }
}

impl FaultPolicy {
    /// How long work may be out before it is late.
    pub(super) fn patience(&self, usual: Option<Duration>, warm: bool) -> Duration {
        let floor = if warm { self.hedge_floor } else { self.cold_floor };
        let factor = if self.hedge_factor > 0.0 { self.hedge_factor } else { 2.0 };
        usual.map_or(self.unknown, |usual| usual.mul_f64(factor)).max(floor)
    }

    /// Whether one message of a layer is computed twice: a function of its place, the same for every run.
    pub(super) fn audits(&self, step: u64, layer: u32, part: usize) -> bool {
        if self.audit_per_10k == 0 {
            return false;
        }
        // splitmix64 over the place.
        let place = (step << 24) ^ (u64::from(layer) << 12) ^ part as u64;
        let mut z = place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % 10_000 < u64::from(self.audit_per_10k)
    }
}

/// What went wrong and was answered since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FaultCounts {
    /// Messages whose worker was lost or refused, sent to others.
    pub resent: u64,
    /// Messages sent to others beside a worker that was late or has become slow.
    pub hedged: u64,
    /// Of these, the ones that the others answered first.
    pub hedges_won: u64,
    /// Experts that workers adopted to stand in for others.
    pub adopted: u64,
    /// Messages computed on the coordinator's own copy.
    pub own_copies: u64,
    /// Messages that two workers computed and that were compared.
    pub audits: u64,
    /// Messages that were to be compared, but nobody else could compute them.
    pub audits_skipped: u64,
    /// Comparisons that differed.
    pub mismatches: u64,
    /// Workers taken out of service because they computed differently.
    pub quarantines: u64,
    /// Replies that answered nothing that was out, or came second.
    pub dropped: u64,
    /// Rows that failed because nobody could compute their experts.
    pub unavailable_rows: u64,
}

impl FaultCounts {
    /// What happened after an earlier moment of the same engine.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            resent: self.resent - earlier.resent,
            hedged: self.hedged - earlier.hedged,
            hedges_won: self.hedges_won - earlier.hedges_won,
            adopted: self.adopted - earlier.adopted,
            own_copies: self.own_copies - earlier.own_copies,
            audits: self.audits - earlier.audits,
            audits_skipped: self.audits_skipped - earlier.audits_skipped,
            mismatches: self.mismatches - earlier.mismatches,
            quarantines: self.quarantines - earlier.quarantines,
            dropped: self.dropped - earlier.dropped,
            unavailable_rows: self.unavailable_rows - earlier.unavailable_rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_has_floors_and_knows_no_zero() {
        let ms = Duration::from_millis;
        let policy = FaultPolicy::default();
        assert_eq!(policy.patience(Some(ms(100)), true), ms(200));
        assert_eq!(policy.patience(Some(ms(1)), true), policy.hedge_floor);
        assert_eq!(policy.patience(Some(ms(1)), false), policy.cold_floor);
        assert_eq!(policy.patience(None, true), policy.unknown);
        let off = FaultPolicy { hedge_factor: 0.0, ..policy };
        assert_eq!(off.patience(Some(ms(100)), true), ms(200), "late is late, hedged or not");
    }

    #[test]
    fn the_share_of_audits_is_what_was_asked_for() {
        let share = |audit_per_10k| {
            let policy = FaultPolicy { audit_per_10k, ..FaultPolicy::default() };
            let places = (0..1000).flat_map(|step| (0..20).map(move |layer| (step, layer)));
            places.filter(|&(step, layer)| policy.audits(step, layer, 0)).count()
        };
        assert_eq!((share(0), share(10_000)), (0, 20_000));
        assert!((150..=250).contains(&share(100)), "{}", share(100));
    }
}
