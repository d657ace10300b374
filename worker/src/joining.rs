//! Whether a worker that has just started is still owed experts: values in, values out.
//!
//! The placement may have gone on without a worker that drained and comes back, so that the first thing it is assigned is
//! nothing. It is not in service then: the next placement names it. A roll-out that took it for ready would take down the
//! next worker, and so all of them, before any has loaded. A worker that is owed nothing, because others suffice or an
//! operator drains it, cannot tell that from being owed something, so the wait has an end.

use std::time::{Duration, Instant};

/// How long experts are waited for. A placement names a worker 10 s after it joined at the latest, and 30 s
/// (`--replace-after`) later if its leader is new and first waits for others to come back; as much again is for the
/// election of that leader.
pub(crate) const JOIN_WAIT: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Joining {
    since: Option<Instant>,
    greeted: bool,
    served: bool,
}

impl Joining {
    /// The worker can be found by coordinators.
    pub(crate) fn announced(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// A coordinator has found it. Only the first one counts: a link that comes and goes prolongs nothing.
    pub(crate) fn greeted(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.greeted, true) {
            self.since = Some(now);
        }
    }

    /// It has loaded what it was assigned, which may be nothing.
    pub(crate) fn loaded(&mut self, experts: u64) {
        self.served |= experts > 0;
    }

    /// Whether experts are still to be expected.
    pub(crate) fn is_owed(&self, now: Instant) -> bool {
        !self.served && self.since.is_some_and(|since| now < since + JOIN_WAIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_assigned_nothing_waits_for_experts_and_not_for_ever() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut joining = Joining::default();
        assert!(!joining.is_owed(began), "nobody knows of it");
        joining.announced(began);
        assert!(joining.is_owed(at(59)) && !joining.is_owed(at(60)));
        joining.greeted(at(50));
        joining.greeted(at(70));
        joining.loaded(0);
        assert!(joining.is_owed(at(109)), "an empty assignment ends nothing");
        assert!(!joining.is_owed(at(110)), "as long as from the first greeting");
        joining.loaded(3);
        joining.loaded(0);
        assert!(!joining.is_owed(at(51)), "it has served");
    }
}
