//! Slow or dead? A worker that owes an answer is asked for its health on a connection of its own.
//!
//! A stopped process still has a kernel that keeps its connections open, and a host that is cut off says nothing at all: both
//! would be found out by keepalive after half a minute. A process that answers here is slow, and is left alone.
//!
//! Silence is held against a worker only while this process runs itself: on a starved host it is this side that is late to
//! take in the answer. See [`Hearing`].

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use shimmer_proto::{address::PeerAddress, identity::shown};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::{
    RemoteConfig,
    lane::{Lane, LinkCounters},
};

/// Unanswered probes after which a worker is dead: one may be lost with a connection that broke at the wrong moment.
const FAILURES: u32 = 2;

/// A hearing is looked at so many times within its limit: what this side slept through is known to a tenth.
const LOOKS: u32 = 10;
/// A look that comes later than so many times its distance was slept through, and counts as so many.
const LATE: u32 = 2;
/// However starved this side is, no hearing lasts longer than so many times its limit.
const LONGEST: u32 = 10;

/// How long an answer is listened for: a limit of time in which this process ran. A sans-I/O core.
///
/// The listener looks at its clock several times within the limit. A look that comes late says that this process was
/// stopped or starved meanwhile, and what it did not live through is not counted as silence of the other side.
#[derive(Debug)]
struct Hearing {
    limit: Duration,
    begun: Instant,
    looked: Instant,
    listened: Duration,
}

impl Hearing {
    fn new(limit: Duration, now: Instant) -> Self {
        Self { limit, begun: now, looked: now, listened: Duration::ZERO }
    }

    /// When to look next.
    fn next(&self) -> Instant {
        self.looked + self.limit / LOOKS
    }

    /// Looks. Whether it has been listened for long enough.
    fn is_over(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.looked);
        self.listened += passed.min(self.limit / LOOKS * LATE);
        self.looked = now;
        self.listened >= self.limit
            || now.saturating_duration_since(self.begun) >= self.limit * LONGEST
    }
}

/// Asks whenever somebody doubts. Returns when the worker is dead, or owes an answer for too long; says why.
pub(super) async fn watch_over(
    config: &RemoteConfig,
    address: &PeerAddress,
    lane: &Lane,
    shown: impl Fn(),
) -> String {
    loop {
        lane.doubted().await;
        shown();
        let mut failures = 0;
        let mut suspected: Option<Instant> = None;
        loop {
            let begun = config.stage.now();
            match probe(config, address, lane).await {
                Ok(()) => {
                    failures = 0;
                    lane.vouch(config.stage.now());
                    if !lane.is_suspect() {
                        shown();
                        break;
                    }
                    let since = *suspected.get_or_insert(begun);
                    let waited = config.stage.now().saturating_duration_since(since);
                    if waited > config.suspect_patience {
                        let ms = config.suspect_patience.as_millis();
                        return format!(
                            "answers health probes but owes an answer for more than {ms} ms"
                        );
                    }
                }
                Err(detail) => {
                    failures += 1;
                    if failures == FAILURES {
                        return format!("does not answer health probes: {detail}");
                    }
                }
            }
            tokio::time::sleep_until((begun + config.probe_interval).into()).await;
        }
    }
}

/// Any answer is a sign of life, a refusal too.
async fn probe(config: &RemoteConfig, address: &PeerAddress, lane: &Lane) -> Result<(), String> {
    LinkCounters::bump(&lane.counters.probes);
    let limit = config.probe_timeout;
    let ask = async {
        let dialled = config.dialer.connect(address, limit * LONGEST).await;
        let channel = dialled.map_err(|error| format!("connecting to {address}: {error}"))?;
        let request = HealthCheckRequest { service: String::new() };
        match HealthClient::new(channel).check(request).await {
            Ok(_) => Ok(()),
            // What this side says about a connection that gave nothing.
            Err(status) if is_local(status.code()) => Err(shown(status.message())),
            Err(_) => Ok(()),
        }
    };
    let mut ask = pin!(ask);
    let mut hearing = Hearing::new(limit, config.stage.now());
    let outcome = loop {
        tokio::select! {
            // An answer that is there counts, however late it is looked at.
            biased;
            outcome = &mut ask => break outcome,
            () = tokio::time::sleep_until(hearing.next().into()) => {
                if hearing.is_over(config.stage.now()) {
                    break Err(format!("no answer of {address} within {} ms", limit.as_millis()));
                }
            }
        }
    };
    if outcome.is_err() {
        LinkCounters::bump(&lane.counters.failed_probes);
    }
    outcome
}

/// Codes with which the client reports that nobody answered.
fn is_local(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(500);

    /// Looks that come so many milliseconds after each other; the one at which it was over, and when.
    fn heard(looks: &[u64]) -> Option<(usize, Duration)> {
        let begun = Instant::now();
        let mut hearing = Hearing::new(LIMIT, begun);
        let mut now = begun;
        for (index, &ms) in looks.iter().enumerate() {
            now += Duration::from_millis(ms);
            if hearing.is_over(now) {
                return Some((index, now - begun));
            }
        }
        None
    }

    #[test]
    fn who_runs_waits_for_the_limit() {
        assert_eq!(heard(&[50; 9]), None);
        assert_eq!(heard(&[50; 10]), Some((9, LIMIT)));
        let hearing = Hearing::new(LIMIT, Instant::now());
        assert_eq!(hearing.next() - hearing.begun, Duration::from_millis(50));
    }

    #[test]
    fn what_this_side_slept_through_is_not_held_against_a_worker() {
        // Stopped for 800 ms, longer than the limit: the answer may lie in the socket and is still waited for.
        assert_eq!(heard(&[50, 800]), None);
        assert_eq!(
            heard(&[50, 800, 50, 50, 50, 50, 50, 50, 50]),
            Some((8, Duration::from_millis(1200)))
        );
        // Starved all the time: it takes longer, and it ends.
        let (looks, waited) = heard(&[600; 20]).unwrap();
        assert_eq!((looks, waited), (4, Duration::from_millis(3000)));
        // Hardly running at all.
        assert_eq!(heard(&[5000]), Some((0, Duration::from_secs(5))));
    }

    #[test]
    fn a_clock_that_stands_counts_nothing() {
        assert_eq!(heard(&[0; 100]), None);
    }

    proptest! {
        /// No verdict before the limit, and always one before ten times that, whatever the scheduler does.
        #[test]
        fn every_hearing_ends_in_time(looks in prop::collection::vec(1..700_u64, 600)) {
            let (index, waited) = heard(&looks).expect("600 looks are enough");
            prop_assert!(waited >= LIMIT);
            let last = Duration::from_millis(looks[index]);
            prop_assert!(waited < LIMIT * LONGEST + last);
            let lived: u64 = looks[..=index].iter().map(|ms| (*ms).min(100)).sum();
            prop_assert!(lived >= 500 || waited >= LIMIT * LONGEST);
        }
    }
}
