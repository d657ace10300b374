//! Who should hold experts, by what is known of the members.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::super::view::{Exclusion, Member, Reach, View};
use crate::placement::Candidate;

/// A worker whose lease lasts may be reached by other coordinators: it is replaced after so many times the usual time.
pub const LEASED_PATIENCE: u32 = 4;

/// Workers of the placement that there has never been a link to, and since when they are missed.
#[derive(Debug, Default)]
pub(super) struct Unseen(BTreeMap<String, Instant>);

/// Workers that should hold experts.
#[derive(Debug, Default)]
pub(super) struct Wish {
    /// Those that should, ascending.
    pub(super) candidates: Vec<Candidate>,
    /// All that may yet be among them, ascending; only before the first placement.
    pub(super) expected: Vec<Candidate>,
    /// Those that are asked to leave and still serve.
    pub(super) leaving: Vec<Candidate>,
    /// When the wish changes although nothing happens.
    pub(super) wake: Option<Instant>,
    /// Workers that are still waited for and that nothing is known of, ascending.
    pub(super) unknown: Vec<String>,
}

impl Wish {
    /// Before there is any placement: everybody who is there.
    pub(super) fn first(view: &View) -> Self {
        let of = |wanted: fn(&Member) -> bool| {
            view.members.values().filter(|m| wanted(m)).map(|m| m.candidate.clone()).collect()
        };
        let is_expected =
            |m: &Member| m.excluded.is_none() && !matches!(m.reach, Reach::Gone { .. });
        Self { candidates: of(Member::is_placeable), expected: of(is_expected), ..Self::default() }
    }

    /// After a placement on `workers`.
    pub(super) fn later(
        view: &View,
        workers: &[String],
        unseen: &mut Unseen,
        replace_after: Duration,
        now: Instant,
    ) -> Self {
        unseen.0.retain(|id, _| workers.contains(id));
        let mut wish = Self::default();
        for (id, member) in &view.members {
            let placed = workers.contains(id);
            if member.reach == Reach::Up {
                unseen.0.remove(id);
            }
            match &member.excluded {
                None if member.reach == Reach::Up => wish.candidates.push(member.candidate.clone()),
                None if placed => {
                    let (since, patience) = match member.reach {
                        Reach::Gone { since } => (since, replace_after),
                        Reach::Awaited { since: Some(since) } => {
                            (since, replace_after.saturating_mul(LEASED_PATIENCE))
                        }
                        Reach::Awaited { since: None } | Reach::Up => {
                            let since = *unseen.0.entry(id.clone()).or_insert(now);
                            (since, replace_after.saturating_mul(LEASED_PATIENCE))
                        }
                    };
                    if wish.waits(since, patience, now) {
                        wish.candidates.push(member.candidate.clone());
                    }
                }
                Some(Exclusion::Draining { .. }) if placed && member.reach == Reach::Up => {
                    wish.leaving.push(member.candidate.clone());
                }
                _ => {}
            }
        }
        for id in workers.iter().filter(|id| !view.members.contains_key(*id)) {
            let since = *unseen.0.entry(id.clone()).or_insert(now);
            if wish.waits(since, replace_after, now) {
                // Nothing is known that it could be placed by: it keeps what it has until its time is over.
                wish.unknown.push(id.clone());
            }
        }
        wish.unknown.sort();
        wish
    }

    /// Whether a worker that is missed since then is still waited for.
    fn waits(&mut self, since: Instant, patience: Duration, now: Instant) -> bool {
        let until = since + patience;
        if now < until {
            self.wake = Some(self.wake.map_or(until, |wake| wake.min(until)));
        }
        now < until
    }
}
