//! Several members on one store in memory, with the faults that a store over a network has: for tests and simulations.
//!
//! Nothing here has a clock or a task: time passes when [`MemoryCluster::advance`] says so, and every change has reached
//! every member that can see it when the call that makes it returns. The same calls give the same states.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::sync::watch;

use super::{
    Condition, MembershipStore, Outage, Snapshot, StoreError, Write, Written,
    announcements::Announcements, check_write, model::Model,
};

/// What happens to one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteFault {
    /// It never reaches the store; the member hears that the store did not answer.
    LoseRequest,
    /// It happens, and the member hears that the store did not answer.
    LoseAnswer,
    /// The member hears that the store did not answer, and the write happens at [`MemoryStore::release_writes`], if its
    /// conditions hold then.
    Late,
    /// The member waits for [`MemoryStore::release_writes`], and then it happens.
    Delay,
}

/// One store that members are made of.
#[derive(Debug, Clone)]
pub struct MemoryCluster {
    shared: Arc<Shared>,
}

/// What a store held at some time.
#[derive(Debug, Clone)]
pub struct Backup(Model);

/// One member's connection to the store. Dropping it is the death of the member: its lease runs out.
#[derive(Debug)]
pub struct MemoryStore {
    shared: Arc<Shared>,
    id: u64,
}

#[derive(Debug)]
struct Shared {
    ttl: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    model: Model,
    /// Passed since the beginning.
    now: Duration,
    /// The store answers nobody, and no lease runs out.
    stopped: bool,
    members: BTreeMap<u64, Member>,
    joined: u64,
    /// Leases that a backup brought back and that no member has, and when they run out.
    orphans: Vec<(u64, Duration)>,
}

#[derive(Debug)]
struct Member {
    view: watch::Sender<Snapshot>,
    announced: BTreeMap<String, String>,
    announcements: Announcements,
    /// The process is gone.
    dead: bool,
    /// Its lease in the store, if it has not run out there.
    lease: Option<u64>,
    /// Cut off from the store.
    cut: bool,
    /// When its lease runs out unless it reaches the store before.
    expires: Option<Duration>,
    /// Since when it has not reached the store.
    since: Duration,
    /// Nothing that others write reaches it, and it does not know.
    blind: bool,
    faults: VecDeque<WriteFault>,
    late: Vec<(Vec<Condition>, Vec<Write>)>,
    releases: watch::Sender<u64>,
}

impl MemoryCluster {
    /// An empty store whose leases last `ttl` beyond the last contact.
    pub fn new(ttl: Duration) -> Self {
        Self { shared: Arc::new(Shared { ttl, state: Mutex::default() }) }
    }

    /// A new member. It stands for one run of a process: a second one is another member, whatever it announces.
    pub fn member(&self) -> MemoryStore {
        let mut state = self.shared.lock();
        let id = state.joined;
        state.joined += 1;
        let member = Member {
            view: watch::Sender::new(Snapshot::default()),
            announced: BTreeMap::new(),
            announcements: Announcements::default(),
            dead: false,
            lease: None,
            cut: false,
            expires: None,
            since: state.now,
            blind: false,
            faults: VecDeque::new(),
            late: Vec::new(),
            releases: watch::Sender::new(0),
        };
        state.members.insert(id, member);
        state.settle(self.shared.ttl);
        MemoryStore { shared: Arc::clone(&self.shared), id }
    }

    /// Lets time pass: leases of members that do not reach the store run out.
    pub fn advance(&self, by: Duration) {
        let mut state = self.shared.lock();
        state.now += by;
        state.settle(self.shared.ttl);
    }

    /// Time since the beginning.
    pub fn now(&self) -> Duration {
        self.shared.lock().now
    }

    /// The store answers nobody any more.
    pub fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        state.settle(self.shared.ttl);
    }

    /// The store answers again. As in etcd, every lease has its full time again.
    pub fn start(&self) {
        let mut state = self.shared.lock();
        state.stopped = false;
        let full = state.now + self.shared.ttl;
        for member in state.members.values_mut().filter(|member| member.expires.is_some()) {
            member.expires = Some(full);
        }
        state.settle(self.shared.ttl);
    }

    /// The store loses everything, as if it had been set up again.
    pub fn wipe(&self) {
        self.replace(&Backup(Model::default()));
    }

    /// What the store holds now, to be restored later.
    pub fn backup(&self) -> Backup {
        Backup(self.shared.lock().model.clone())
    }

    /// The store is restored from a backup: revisions go back, and leases of that time have their full time again.
    pub fn restore(&self, backup: &Backup) {
        self.replace(backup);
    }

    /// Another store under the same address: watches and requests to the one before have ended.
    fn replace(&self, backup: &Backup) {
        let mut state = self.shared.lock();
        let mut leases = state.model.restore(&backup.0);
        for member in state.members.values_mut() {
            member.lease = member.lease.filter(|lease| leases.remove(lease));
            member.blind = false;
            member.late.clear();
        }
        let until = state.now + self.shared.ttl;
        state.orphans = leases.into_iter().map(|lease| (lease, until)).collect();
        state.settle(self.shared.ttl);
    }

    /// What the store holds, whoever can see it.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().snapshot()
    }
}

impl MemoryStore {
    /// Cuts the member off: its view stays and says so, its writes fail, its lease runs out.
    pub fn disconnect(&self) {
        self.change(|member| member.cut = true);
    }

    /// Undoes [`disconnect`](Self::disconnect). What it announces is in the store when this returns.
    pub fn reconnect(&self) {
        self.change(|member| member.cut = false);
    }

    /// Ends the member's lease now. A member that reaches the store announces everything again on a new one.
    pub fn expire_lease(&self) {
        let mut state = self.shared.lock();
        state.expire(self.id);
        // Others see the keys gone before they are back.
        state.publish();
        state.settle(self.shared.ttl);
    }

    /// From here on the view stays as it is, without the member knowing; everything else works.
    pub fn hold_view(&self) {
        self.change(|member| member.blind = true);
    }

    /// Undoes [`hold_view`](Self::hold_view).
    pub fn release_view(&self) {
        self.change(|member| member.blind = false);
    }

    /// Decides what happens to the next writes; those after them work.
    pub fn fault_writes(&self, faults: impl IntoIterator<Item = WriteFault>) {
        self.change(|member| member.faults.extend(faults));
    }

    /// Lets writes through that wait, and makes those that are late.
    pub fn release_writes(&self) {
        let mut state = self.shared.lock();
        let member = state.member(self.id);
        member.releases.send_modify(|releases| *releases += 1);
        for (conditions, writes) in std::mem::take(&mut member.late) {
            if !state.stopped {
                state.apply(self.id, &conditions, writes);
            }
        }
        state.settle(self.shared.ttl);
    }

    /// The write, at once. A fault that delays counts as one that loses the request.
    ///
    /// # Errors
    /// As [`MembershipStore::write`].
    pub fn write_now(
        &self,
        conditions: &[Condition],
        writes: Vec<Write>,
    ) -> Result<Written, StoreError> {
        check_write(conditions, &writes)
            .map_err(|detail| StoreError::Refused { store: self.describe(), detail })?;
        let mut state = self.shared.lock();
        let fault = state.member(self.id).faults.pop_front();
        self.perform(&mut state, fault, conditions, writes)
    }

    fn perform(
        &self,
        state: &mut State,
        fault: Option<WriteFault>,
        conditions: &[Condition],
        writes: Vec<Write>,
    ) -> Result<Written, StoreError> {
        let lost = |detail: &str| {
            let (store, detail) = (self.describe(), detail.to_owned());
            Err(StoreError::Unreachable { store, waited: Duration::ZERO, detail })
        };
        if state.stopped || state.member(self.id).cut {
            return lost("not connected");
        }
        match fault {
            None => {
                let written = state.apply(self.id, conditions, writes);
                state.settle(self.shared.ttl);
                Ok(written)
            }
            Some(WriteFault::LoseAnswer) => {
                state.apply(self.id, conditions, writes);
                state.settle(self.shared.ttl);
                lost("the answer was lost")
            }
            Some(WriteFault::Late) => {
                state.member(self.id).late.push((conditions.to_vec(), writes));
                lost("the request is late")
            }
            Some(WriteFault::LoseRequest | WriteFault::Delay) => lost("the request was lost"),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Member)) {
        let mut state = self.shared.lock();
        change(state.member(self.id));
        state.settle(self.shared.ttl);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn member(&mut self, id: u64) -> &mut Member {
        self.members.get_mut(&id).expect("a member is removed when nothing refers to it any more")
    }

    /// A write that reached the store.
    fn apply(&mut self, id: u64, conditions: &[Condition], writes: Vec<Write>) -> Written {
        let lease = self.lease(id);
        self.model.apply(lease, conditions, writes)
    }

    /// The member's lease, a new one if it has none.
    fn lease(&mut self, id: u64) -> u64 {
        if let Some(lease) = self.member(id).lease {
            return lease;
        }
        let lease = self.model.grant();
        self.member(id).lease = Some(lease);
        lease
    }

    fn expire(&mut self, id: u64) {
        if let Some(lease) = self.member(id).lease.take() {
            self.model.revoke(lease);
        }
    }

    /// Brings leases, announcements and views to where time and connections lead.
    fn settle(&mut self, ttl: Duration) {
        let ids: Vec<u64> = self.members.keys().copied().collect();
        for id in &ids {
            let (now, stopped) = (self.now, self.stopped);
            let member = self.member(*id);
            if !stopped && !member.cut {
                member.expires = None;
                member.since = now;
                self.renew(*id);
            } else if member.expires.is_none() {
                member.expires = Some(now + ttl);
            } else if !stopped && member.expires.is_some_and(|expires| expires <= now) {
                self.expire(*id);
            }
        }
        self.members.retain(|_, member| !member.dead || member.lease.is_some());
        let (now, stopped) = (self.now, self.stopped);
        for (lease, _) in self.orphans.extract_if(.., |(_, until)| !stopped && *until <= now) {
            self.model.revoke(lease);
        }
        self.publish();
    }

    /// What a member does that reaches the store: a lease, and what it announces on it.
    fn renew(&mut self, id: u64) {
        let lease = self.lease(id);
        loop {
            let snapshot = self.snapshot();
            let member = self.member(id);
            let Some(change) = member.announcements.next(&member.announced, &snapshot, lease)
            else {
                return;
            };
            let key = change.key.clone();
            let write = match change.value.clone() {
                Some(value) => Write::PutLeased { key, value },
                None => Write::Delete { key },
            };
            let conditions: Vec<Condition> = change.condition.clone().into_iter().collect();
            let written = self.model.apply(lease, &conditions, vec![write]);
            let announcements = &mut self.member(id).announcements;
            match written {
                Written::Done(revision) => announcements.written(&change, lease, revision),
                Written::Conflict => announcements.conflict(&change),
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            revision: self.model.revision(),
            entries: self.model.entries().clone(),
            lease: 0,
            disconnected: None,
        }
    }

    /// Shows every member what it can see.
    fn publish(&self) {
        for member in self.members.values() {
            let gone = member.expires.is_some_and(|expires| expires <= self.now);
            let lease = member.lease.filter(|_| !gone).unwrap_or(0);
            member.view.send_if_modified(|view| {
                let before = view.clone();
                if self.stopped || member.cut {
                    let cause = if member.cut { "cut off" } else { "the store has stopped" };
                    let since = SystemTime::UNIX_EPOCH + member.since;
                    view.disconnected = Some(Outage { cause: cause.to_owned(), since });
                } else if !member.blind {
                    view.disconnected = None;
                    view.revision = self.model.revision();
                    view.entries.clone_from(self.model.entries());
                }
                if !member.blind {
                    view.lease = lease;
                }
                *view != before
            });
        }
    }
}

impl Drop for MemoryStore {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let member = state.member(self.id);
        member.cut = true;
        member.dead = true;
        state.settle(self.shared.ttl);
    }
}

#[tonic::async_trait]
impl MembershipStore for MemoryStore {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn describe(&self) -> String {
        "the store in memory".to_owned()
    }

    fn watch(&self) -> watch::Receiver<Snapshot> {
        self.shared.lock().member(self.id).view.subscribe()
    }

    fn announce(&self, key: &str, value: String) {
        let key = key.to_owned();
        if let Err(error) =
            check_write(&[], &[Write::PutLeased { key: key.clone(), value: value.clone() }])
        {
            return tracing::error!(%error, "cannot announce");
        }
        self.change(|member| {
            member.announced.insert(key, value);
        });
    }

    fn withdraw(&self, key: &str) {
        self.change(|member| drop(member.announced.remove(key)));
    }

    async fn write(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> Result<Written, StoreError> {
        check_write(&conditions, &writes)
            .map_err(|detail| StoreError::Refused { store: self.describe(), detail })?;
        let (mut fault, mut releases) = {
            let mut state = self.shared.lock();
            let member = state.member(self.id);
            (member.faults.pop_front(), member.releases.subscribe())
        };
        if fault == Some(WriteFault::Delay) {
            // The sender lives in the shared state, which this member keeps.
            let _released = releases.changed().await;
            fault = None;
        }
        let mut state = self.shared.lock();
        self.perform(&mut state, fault, &conditions, writes)
    }

    async fn leave(&self) {
        let mut state = self.shared.lock();
        state.member(self.id).announced.clear();
        let reached = !state.stopped && !state.member(self.id).cut;
        if reached {
            state.expire(self.id);
        }
        state.member(self.id).cut = true;
        state.settle(self.shared.ttl);
    }
}
