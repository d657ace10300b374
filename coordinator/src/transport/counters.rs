//! What the links have counted, for whoever looks.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use serde::Serialize;
use tokio::sync::watch;

use super::{board::Member, lane::LinkCounters};
use crate::fence::Dropped;

/// What the links have counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RemoteCounters {
    /// Connections made.
    pub connects: u64,
    /// Sessions that broke or missed a deadline.
    pub losses: u64,
    /// Workers refused.
    pub refusals: u64,
    /// Results whose content does not match their checksum.
    pub corrupt_frames: u64,
    /// Frames that are too large or no message.
    pub unreadable_frames: u64,
    /// Workers asked whether they are alive, because they owed an answer.
    pub probes: u64,
    /// Those of these that did not answer.
    pub failed_probes: u64,
    /// Workers found to have become slow.
    pub slowed: u64,
    /// Replies that were not awaited.
    pub dropped: Dropped,
}

/// Reads what the links count.
#[derive(Debug, Clone)]
pub struct RemoteObserver {
    pub(super) roster: watch::Receiver<Vec<Member>>,
    pub(super) dropped: Arc<Mutex<Dropped>>,
}

impl RemoteObserver {
    /// What has been counted so far.
    pub fn counters(&self) -> RemoteCounters {
        let roster = self.roster.borrow();
        let sum = |pick: fn(&LinkCounters) -> &AtomicU64| {
            let count = |member: &Member| pick(&member.lane.counters).load(Ordering::Relaxed);
            roster.iter().map(count).fold(0, u64::saturating_add)
        };
        RemoteCounters {
            connects: sum(|counters| &counters.connects),
            losses: sum(|counters| &counters.losses),
            refusals: sum(|counters| &counters.refusals),
            corrupt_frames: sum(|counters| &counters.corrupt_frames),
            unreadable_frames: sum(|counters| &counters.unreadable_frames),
            probes: sum(|counters| &counters.probes),
            failed_probes: sum(|counters| &counters.failed_probes),
            slowed: sum(|counters| &counters.slowed),
            dropped: *self.dropped.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}
