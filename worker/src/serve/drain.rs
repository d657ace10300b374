//! The end of a worker in two steps: coordinators are told that it will leave, and it leaves when they have let it go, or
//! when their time is over.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How far the end of a worker has come.
#[derive(Debug, Default)]
pub(super) struct Drain {
    begun: CancellationToken,
    over: CancellationToken,
    until: OnceLock<Instant>,
}

impl Drain {
    /// From now on coordinators are told; at most for `time`.
    pub(super) fn begin(&self, time: Duration) {
        self.until.get_or_init(|| Instant::now() + time);
        self.begun.cancel();
    }

    /// From now on streams are ended.
    pub(super) fn end(&self) {
        self.over.cancel();
    }

    /// Waits until coordinators are to be told.
    pub(super) async fn begun(&self) {
        self.begun.cancelled().await;
    }

    /// Waits until streams are to be ended.
    pub(super) async fn over(&self) {
        self.over.cancelled().await;
    }

    /// What is left of the time.
    pub(super) fn left(&self) -> Duration {
        let until = self.until.get().copied();
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}

/// Seats of coordinators: each stream whose hello was accepted has one.
#[derive(Debug)]
pub(super) struct Seats {
    most: usize,
    taken: watch::Sender<usize>,
}

/// A seat; it is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Seat(Arc<Seats>);

impl Seats {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, taken: watch::Sender::new(0) })
    }

    /// A seat, if there is one.
    pub(super) fn take(self: &Arc<Self>) -> Option<Seat> {
        let free = |taken: &mut usize| {
            let free = *taken < self.most;
            *taken += usize::from(free);
            free
        };
        self.taken.send_if_modified(free).then(|| Seat(Arc::clone(self)))
    }

    /// How many there are.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Waits until all are free.
    pub(super) async fn empty(&self) {
        let mut taken = self.taken.subscribe();
        // The sender lives as long as this.
        drop(taken.wait_for(|taken| *taken == 0).await);
    }

    pub(super) fn are_empty(&self) -> bool {
        *self.taken.borrow() == 0
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.send_modify(|taken| *taken -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_more_seats_than_were_made() {
        let seats = Seats::new(2);
        assert!(seats.are_empty());
        let (one, two) = (seats.take(), seats.take());
        assert!(one.is_some() && two.is_some() && seats.take().is_none());
        drop(one);
        assert!(!seats.are_empty());
        let again = seats.take();
        assert!(again.is_some() && seats.take().is_none());
        drop((two, again));
        assert!(seats.are_empty());
    }
}
