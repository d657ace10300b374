//! When to ask for a lease, when to renew it, and until when it counts as held. A plain state machine over the time that the
//! caller gives.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use crate::backoff::Backoff;

/// Shortest wait between two tries.
const WAIT_MIN: Duration = Duration::from_millis(100);

/// The lease of one member.
#[derive(Debug)]
pub(super) struct Lease {
    held: Option<Held>,
    next: Instant,
    waits: Backoff,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    id: u64,
    ttl: Duration,
    /// The store keeps the lease until then at least: counted from when the request was sent that the store has answered, as
    /// the store may have answered at once and the answer may have travelled long.
    expires: Instant,
}

/// What to ask the store for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Grant,
    Renew(u64),
}

impl Lease {
    /// No lease yet; one of `ttl` is wanted at once.
    pub(super) fn new(ttl: Duration, now: Instant, seed: u64) -> Self {
        // A quarter, so that between a renewal that failed at a third and the expiry there is time for more tries.
        Self { held: None, next: now, waits: Backoff::new(WAIT_MIN, ttl / 4, seed) }
    }

    /// When the next action is due.
    pub(super) fn due(&self) -> Instant {
        self.next
    }

    /// What is to be done then. A lease whose time has passed is renewed all the same: a store that was away itself has
    /// not let it run out.
    pub(super) fn action(&self) -> Action {
        self.held.map_or(Action::Grant, |held| Action::Renew(held.id))
    }

    /// The lease of which the store has not said that it is gone.
    pub(super) fn id(&self) -> Option<u64> {
        self.held.map(|held| held.id)
    }

    /// The lease if it cannot have run out.
    pub(super) fn confirmed(&self, now: Instant) -> Option<u64> {
        self.held.filter(|held| now < held.expires).map(|held| held.id)
    }

    /// When [`confirmed`](Self::confirmed) ends without a renewal.
    pub(super) fn expires(&self) -> Option<Instant> {
        self.held.map(|held| held.expires)
    }

    /// The store granted a lease that was asked for at `sent`.
    pub(super) fn granted(&mut self, id: u64, ttl: Duration, sent: Instant) {
        self.held = Some(Held { id, ttl, expires: sent + ttl });
        self.answered(sent + ttl / 3);
    }

    /// The store renewed the lease, as it was asked to at `sent`.
    pub(super) fn renewed(&mut self, sent: Instant) {
        if let Some(held) = &mut self.held {
            held.expires = held.expires.max(sent + held.ttl);
            let next = sent + held.ttl / 3;
            self.answered(next);
        }
    }

    /// The store has no such lease any more.
    pub(super) fn lost(&mut self, id: u64, now: Instant) {
        if self.id() == Some(id) {
            self.held = None;
            self.next = now;
        }
    }

    /// A try got no answer.
    pub(super) fn failed(&mut self, now: Instant) {
        let mut wait = self.waits.fail();
        if let Some(left) = self.held.and_then(|held| held.expires.checked_duration_since(now)) {
            wait = wait.min(left / 2).max(WAIT_MIN);
        }
        self.next = now + wait;
    }

    /// The store answers again, as something else has shown.
    pub(super) fn retry(&mut self, now: Instant) {
        self.next = self.next.min(now);
    }

    fn answered(&mut self, next: Instant) {
        self.waits.succeed();
        self.next = next;
    }
}
