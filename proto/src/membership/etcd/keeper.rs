//! Keeps the lease and what is announced on it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use etcd_client::Client;
use tokio::{
    select,
    sync::watch,
    time::{sleep_until, timeout},
};

use super::{
    Shared,
    failure::Failure,
    lease::{Action, Lease},
    transaction::Transaction,
    watcher::number,
};
use crate::{
    backoff::Backoff,
    membership::{
        Condition, Write,
        announcements::{Announcements, Change},
    },
};

/// Shortest wait after a put that failed.
const WAIT_MIN: Duration = Duration::from_millis(100);

/// Longest wait for a store that was away before.
const LEAVE_AWAY: Duration = Duration::from_millis(500);

/// The lease of one member and its keys.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    lease: Lease,
    announcements: Announcements,
    wanted: watch::Receiver<BTreeMap<String, String>>,
    /// Leases that a write has found to be gone.
    lost: watch::Receiver<u64>,
    waits: Backoff,
    /// When the next put may be tried.
    put_at: Instant,
    /// What the log has said of keys that others hold.
    told: BTreeSet<String>,
    /// What the log has said that etcd refuses.
    refusals: Refusals,
    /// Whether the store was away when last looked at.
    away: bool,
}

/// What a member needs of etcd. One may be granted while the other is refused: whoever may have a lease may have no rights to
/// the cluster's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    Lease,
    Keys,
}

/// A refusal is said once, until the same need is met.
#[derive(Debug, Default)]
struct Refusals(BTreeSet<Need>);

impl Refusals {
    /// Whether the refusal is news.
    fn refused(&mut self, need: Need) -> bool {
        self.0.insert(need)
    }

    fn met(&mut self, need: Need) {
        self.0.remove(&need);
    }
}

/// What is to be done next.
enum Step {
    Lease(Action),
    Write(Change, u64),
    Wait(Instant),
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let now = Instant::now();
        let (seed, ttl) = (shared.config.seed, shared.config.lease);
        Self {
            lease: Lease::new(ttl, now, seed),
            announcements: Announcements::default(),
            wanted: shared.wanted.subscribe(),
            lost: shared.lost.subscribe(),
            waits: Backoff::new(WAIT_MIN, shared.config.longest_wait(), seed ^ 0xacce_55ed),
            put_at: now,
            told: BTreeSet::new(),
            refusals: Refusals::default(),
            away: false,
            shared,
        }
    }

    /// Keeps everything until the member leaves, then gives the lease back with all that hangs on it.
    pub(super) async fn run(mut self) {
        let mut view = self.shared.view.subscribe();
        let leave = self.shared.leave.clone();
        loop {
            let step = self.next(Instant::now());
            let work = async {
                match step {
                    Step::Lease(action) => self.take(action).await,
                    Step::Write(change, lease) => self.write(&change, lease).await,
                    Step::Wait(until) => {
                        select! {
                            () = sleep_until(until.into()) => {}
                            _ = view.changed() => {}
                            _ = self.wanted.changed() => {}
                            _ = self.lost.changed() => {}
                        }
                    }
                }
            };
            select! {
                biased;
                () = leave.cancelled() => break,
                () = work => {}
            }
        }
        self.give_back().await;
    }

    /// Decides, without waiting.
    fn next(&mut self, now: Instant) -> Step {
        let lost = *self.lost.borrow_and_update();
        self.lease.lost(lost, now);
        let away = self.shared.view.borrow().disconnected.is_some();
        if std::mem::replace(&mut self.away, away) && !away {
            self.lease.retry(now);
            self.announcements.retry();
            self.put_at = now;
        }
        let confirmed = self.lease.confirmed(now);
        self.publish(confirmed);
        if self.lease.due() <= now {
            return Step::Lease(self.lease.action());
        }
        let mut until = self.lease.due();
        if let Some(expires) = self.lease.expires().filter(|expires| *expires > now) {
            until = until.min(expires);
        }
        let Some(lease) = confirmed else { return Step::Wait(until) };
        let change = {
            let (wanted, view) = (self.wanted.borrow_and_update(), self.shared.view.borrow());
            self.announcements.next(&wanted, &view, lease)
        };
        self.tell_taken();
        match change {
            Some(change) if self.put_at <= now => Step::Write(change, lease),
            Some(_) => Step::Wait(until.min(self.put_at)),
            None => Step::Wait(until),
        }
    }

    async fn take(&mut self, action: Action) {
        let sent = Instant::now();
        let limit = self.shared.config.attempt();
        let answer = match action {
            Action::Grant => {
                let seconds = self.shared.config.lease.as_secs().max(1);
                let ttl = i64::try_from(seconds).unwrap_or(i64::MAX);
                let call = |mut client: Client| async move { client.lease_grant(ttl, None).await };
                self.shared.attempt(limit, call).await.map(|granted| {
                    let ttl = Duration::from_secs(number(granted.ttl()).max(1));
                    tracing::info!(lease = granted.id(), ttl_s = ttl.as_secs(), "lease granted");
                    self.lease.granted(number(granted.id()), ttl, sent);
                })
            }
            Action::Renew(id) => {
                let id = i64::try_from(id).unwrap_or(0);
                let call = |mut client: Client| async move { client.lease_keep_alive(id).await };
                self.shared.attempt(limit, call).await.map(|_| self.lease.renewed(sent))
            }
        };
        let now = Instant::now();
        match (answer, action) {
            (Ok(()), _) => {
                self.refusals.met(Need::Lease);
                self.announcements.retry();
            }
            (Err(Failure::LeaseGone), Action::Renew(id)) => {
                tracing::warn!(
                    lease = id,
                    "the lease has run out; this member announces itself again on a new one"
                );
                self.lease.lost(id, now);
            }
            (Err(failure), _) => {
                self.tell_refused(&failure, Need::Lease);
                self.lease.failed(now);
            }
        }
    }

    async fn write(&mut self, change: &Change, lease: u64) {
        let key = change.key.clone();
        let write = match change.value.clone() {
            Some(value) => Write::PutLeased { key, value },
            None => Write::Delete { key },
        };
        let conditions: Vec<Condition> = change.condition.clone().into_iter().collect();
        let transaction = Transaction::new(&self.shared.prefix, &conditions, &[write], lease);
        let call = |mut client: Client| async move { client.txn(transaction.request(false)).await };
        let answer = self.shared.attempt(self.shared.config.attempt(), call).await;
        let now = Instant::now();
        match answer {
            Ok(response) => {
                self.waits.succeed();
                self.refusals.met(Need::Keys);
                let revision = response.header().map_or(0, |header| number(header.revision()));
                if response.succeeded() {
                    self.announcements.written(change, lease, revision);
                } else {
                    self.announcements.conflict(change);
                }
            }
            Err(Failure::LeaseGone) => self.lease.lost(lease, now),
            Err(failure) => {
                self.tell_refused(&failure, Need::Keys);
                self.put_at = now + self.waits.fail();
            }
        }
    }

    /// Withdraws everything, and gives the lease back with all that was written on it. Bounded: what cannot be given back
    /// runs out.
    async fn give_back(self) {
        let Some(id) = self.lease.id() else { return };
        let id = i64::try_from(id).unwrap_or(0);
        // Whoever leaves while the store is away anyway waits for one try only, and not for long.
        let away = self.shared.view.borrow().disconnected.is_some();
        let attempt = self.shared.config.attempt();
        let limit = if away { attempt.min(LEAVE_AWAY) } else { attempt };
        let giving = async {
            loop {
                let call = |mut client: Client| async move { client.lease_revoke(id).await };
                match self.shared.attempt(limit, call).await {
                    Ok(_) | Err(Failure::LeaseGone | Failure::Refused(_)) => return,
                    Err(_) => tokio::time::sleep(WAIT_MIN).await,
                }
            }
        };
        if timeout(if away { limit } else { limit * 2 }, giving).await.is_err() {
            tracing::warn!(
                ttl_s = self.shared.config.lease.as_secs(),
                "left without the membership store: this member's keys go when its lease runs out"
            );
        }
    }

    /// Shows the lease in the snapshot.
    fn publish(&self, confirmed: Option<u64>) {
        let lease = confirmed.unwrap_or(0);
        self.shared
            .view
            .send_if_modified(|view| std::mem::replace(&mut view.lease, lease) != lease);
    }

    fn tell_taken(&mut self) {
        let taken = self.announcements.taken();
        if *taken == self.told {
            return;
        }
        for key in taken.difference(&self.told) {
            tracing::error!(
                key,
                "another process has taken this member's key: are there two with one --id? This one waits until the other \
                 is gone"
            );
        }
        for key in self.told.difference(taken) {
            tracing::info!(key, "nobody else holds this member's key any more");
        }
        self.told = taken.clone();
    }

    /// A refusal that no waiting ends; the watch tells of stores that are away.
    fn tell_refused(&mut self, failure: &Failure, need: Need) {
        let Failure::Refused(cause) = failure else { return };
        if self.refusals.refused(need) {
            let what = match need {
                Need::Lease => "lease",
                Need::Keys => "keys",
            };
            tracing::error!(cause, "the membership store refuses this member's {what}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_refused_are_told_once_however_often_the_lease_is_granted() {
        let mut refusals = Refusals::default();
        assert!(refusals.refused(Need::Keys));
        for _ in 0..3 {
            refusals.met(Need::Lease);
            assert!(!refusals.refused(Need::Keys));
        }
        assert!(refusals.refused(Need::Lease), "another need");
        refusals.met(Need::Keys);
        assert!(refusals.refused(Need::Keys), "it was met meanwhile");
    }
}
