//! How often a piece is asked for, and after which wait.

use std::time::Duration;

use shimmer_proto::backoff::Backoff;

/// The first wait. Most faults of a connection are over at once.
const WAIT_MIN: Duration = Duration::from_millis(500);
/// The longest wait that is our own: a server that comes back is noticed within half a minute.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// The longest wait that a server may ask for. A pod that waits longer is better started again.
const ASKED_MAX: Duration = Duration::from_secs(300);
/// So many new bytes make a try a success although it failed: fewer, and a server that gives a byte at a time would keep us
/// for years.
const PROGRESS_BYTES: u64 = 1 << 20;

/// The tries of one piece.
#[derive(Debug)]
pub(super) struct Tries {
    waits: Backoff,
    failed: u32,
    limit: u32,
}

impl Tries {
    /// `limit` failures in a row are too many.
    pub(super) fn new(limit: u32, seed: u64) -> Self {
        Self { waits: Backoff::new(WAIT_MIN, WAIT_MAX, seed), failed: 0, limit }
    }

    /// A try failed after `gained` bytes that will not be asked for again. How long to wait, unless it was one too many.
    pub(super) fn failed(&mut self, gained: u64, asked: Option<Duration>) -> Option<Duration> {
        if gained >= PROGRESS_BYTES {
            self.waits.succeed();
            self.failed = 0;
        }
        self.failed += 1;
        if self.failed > self.limit {
            return None;
        }
        let own = self.waits.fail();
        Some(asked.map_or(own, |asked| asked.min(ASKED_MAX).max(own)))
    }

    /// Failures since the last success.
    pub(super) fn count(&self) -> u32 {
        self.failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_end_unless_bytes_come() {
        let mut tries = Tries::new(3, 7);
        let waits: Vec<_> = (0..4).map(|_| tries.failed(PROGRESS_BYTES - 1, None)).collect();
        let within = |wait: Option<Duration>, most: u64| {
            let most = Duration::from_millis(most);
            wait.is_some_and(|wait| wait <= most && wait >= most / 2)
        };
        assert!(within(waits[0], 500) && within(waits[1], 1000) && within(waits[2], 2000));
        assert_eq!((waits[3], tries.count()), (None, 4));
        let mut tries = Tries::new(1, 7);
        for _ in 0..100 {
            assert!(within(tries.failed(PROGRESS_BYTES, None), 500), "bytes came");
        }
    }

    #[test]
    fn a_server_may_ask_for_more_time_but_not_for_hours() {
        let mut tries = Tries::new(9, 7);
        let seconds = Duration::from_secs;
        assert_eq!(tries.failed(0, Some(seconds(20))), Some(seconds(20)));
        assert_eq!(tries.failed(0, Some(seconds(86_400))), Some(ASKED_MAX));
        let wait = tries.failed(0, Some(Duration::ZERO)).unwrap();
        assert!(wait >= seconds(1), "zero does not make us hammer: {wait:?}");
    }
}
