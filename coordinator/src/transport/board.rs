//! What the links agree on: the seats of the workers, who has been greeted, which placements are followed.
//!
//! A worker's seat is its number. Seats are made by the records of the membership store and by placements that name a
//! worker. When all are taken, one whose worker has been gone for longer than it is waited for, and that no placement names,
//! is given to the next worker; whoever was there before gets another one when it comes back.

mod seat;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use shimmer_proto::{
    address::PeerAddress,
    expert::v1::WorkerHello,
    identity::shown,
    limits::MAX_WORKERS,
    membership::{
        Snapshot,
        records::{DRAINS, QUARANTINES, QuarantineRecord, WORKERS, WorkerRecord, id_in},
    },
};
use tokio::sync::watch;

use super::{
    ClusterModel,
    lane::Lane,
    plans::Plans,
    stage::Stage,
    status::{ClusterStatus, LinkState},
};
use crate::{
    admin::KnownWorker,
    placement::{Candidate, Placement},
};
pub(super) use seat::{Orders, SeatFacts};
use seat::{Placed, Quarantine, Seat, Surroundings};

/// How long a worker that has gone without a word is called lost once no placement counts on it: long enough to be seen by
/// people, and no longer than there is something to do about it.
const LOST_FOR: Duration = Duration::from_secs(3600);

/// Shared by all links, the control task and the step thread.
#[derive(Debug)]
pub(super) struct Board {
    state: Mutex<State>,
    plans: watch::Sender<Plans>,
    roster: watch::Sender<Vec<Member>>,
    status: watch::Sender<ClusterStatus>,
    /// What the control task looks at, by seat.
    facts: watch::Sender<Vec<SeatFacts>>,
    /// Layers with routed experts, and whether the coordinator has a copy of its own.
    layers: Vec<(u32, bool)>,
    /// Whether the store knows addresses only, and ids come with the hellos.
    fixed: bool,
    /// How long a worker that is gone keeps its seat when all are taken.
    seat_kept: Duration,
    /// [`LOST_FOR`].
    lost_for: Duration,
    /// Tells the time.
    stage: Stage,
}

#[derive(Debug, Default)]
struct State {
    seats: Vec<Seat>,
    /// A worker found no seat when the store was looked at last.
    full: bool,
    /// The step thread has said that no request is under way.
    idle: bool,
    /// Records that the log has complained of, with their revisions.
    unreadable: Complaints,
}

/// What is wrong is said once of each version of a record.
#[derive(Debug, Default)]
struct Complaints(BTreeMap<String, u64>);

impl Complaints {
    /// Whether this version of the record is not yet known to be wrong.
    fn is_news(&mut self, key: &str, revision: u64) -> bool {
        self.0.insert(key.to_owned(), revision) != Some(revision)
    }

    /// Forgets what has gone.
    fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|key, _| is_there(key));
    }
}

/// A seat as the step thread sees it.
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// The worker's id, or its address before its hello.
    pub(super) name: String,
    /// How many other workers had the seat before.
    pub(super) holder: u64,
    pub(super) lane: Arc<Lane>,
    pub(super) absent_layers: Arc<[u32]>,
    pub(super) weight: f64,
}

/// A seat that needs a link.
#[derive(Debug)]
pub(super) struct NewSeat {
    pub(super) worker: usize,
    pub(super) lane: Arc<Lane>,
    pub(super) orders: watch::Receiver<Orders>,
}

impl Board {
    pub(super) fn new(
        model: &ClusterModel,
        own: &[u32],
        fixed: bool,
        seat_kept: Duration,
        stage: Stage,
    ) -> Self {
        Self {
            state: Mutex::default(),
            plans: watch::Sender::default(),
            roster: watch::Sender::default(),
            status: watch::Sender::default(),
            facts: watch::Sender::default(),
            layers: model.layers.iter().map(|l| (l.layer, own.contains(&l.layer))).collect(),
            fixed,
            seat_kept,
            lost_for: LOST_FOR,
            stage,
        }
    }

    /// Follows the membership store. Returns the seats that are new.
    pub(super) fn follow(&self, snapshot: &Snapshot) -> Vec<NewSeat> {
        let mut made = Vec::new();
        let mut state = self.lock();
        state.full = false;
        for seat in &mut state.seats {
            seat.record = None;
        }
        let mut records: Vec<(&str, PeerAddress, WorkerRecord)> = Vec::new();
        for (key, entry) in &snapshot.entries {
            let Some(name) = id_in(WORKERS, key) else { continue };
            let record = serde_json::from_str::<WorkerRecord>(&entry.value);
            let parsed = record.map_err(|error| error.to_string()).and_then(|record| {
                let address = record.address.parse::<PeerAddress>();
                address.map(|address| (address, record)).map_err(|error| error.to_string())
            });
            match parsed {
                Ok((address, record)) => records.push((name, address, record)),
                Err(detail) if state.unreadable.is_news(key, entry.revision) => {
                    tracing::warn!(key = shown(key), detail, "ignoring a record of a worker");
                }
                Err(_) => {}
            }
        }
        state.unreadable.keep(|key| snapshot.entries.contains_key(key));
        if self.fixed {
            // The places in the list.
            records.sort_by_key(|(_, _, record)| record.incarnation);
        }
        let listed: Vec<&str> = records.iter().map(|(name, ..)| *name).collect();
        for (name, address, record) in &records {
            let name = if self.fixed { None } else { Some(*name) };
            let found = state.seats.iter().position(|seat| match name {
                Some(id) => seat.id.as_deref() == Some(id),
                None => seat.address() == Some(address),
            });
            let index = match found {
                Some(index) => index,
                None => match self.seat(&mut state, name, Some(address.clone()), &listed) {
                    Some((index, new)) => {
                        made.extend(new);
                        index
                    }
                    None => {
                        state.full = true;
                        continue;
                    }
                },
            };
            state.seats[index].follow(address.clone(), record.clone());
        }
        for seat in &mut state.seats {
            let Some(id) = seat.id.as_deref() else { continue };
            seat.to_drain = snapshot.entries.contains_key(&format!("{DRAINS}{id}"));
            let quarantine = snapshot.entries.get(&format!("{QUARANTINES}{id}"));
            let reason = quarantine.map(|entry| {
                serde_json::from_str::<QuarantineRecord>(&entry.value)
                    .map_or_else(|_| "its record cannot be read".to_owned(), |record| record.reason)
            });
            seat.quarantine.follow(reason, snapshot.revision);
        }
        self.review(&mut state);
        made
    }

    /// The seats of these workers, which a placement names; made where there is none.
    pub(super) fn seats_of(&self, ids: &[String]) -> Option<(Vec<usize>, Vec<NewSeat>)> {
        let mut made = Vec::new();
        let mut state = self.lock();
        let mut seats = Vec::with_capacity(ids.len());
        let named: Vec<&str> = ids.iter().map(String::as_str).collect();
        for id in ids {
            let found = state.seats.iter().position(|seat| seat.id.as_ref() == Some(id));
            let index = match found {
                Some(index) => index,
                None => {
                    let (index, new) = self.seat(&mut state, Some(id), None, &named)?;
                    made.extend(new);
                    index
                }
            };
            seats.push(index);
        }
        self.review(&mut state);
        Some((seats, made))
    }

    /// A seat for one more worker, and what its link needs if it has none yet. At the limit the seat is one that nobody
    /// sits on any more, unless it belongs to one of `kept`; none if there is none.
    fn seat(
        &self,
        state: &mut State,
        id: Option<&str>,
        address: Option<PeerAddress>,
        kept: &[&str],
    ) -> Option<(usize, Option<NewSeat>)> {
        let worker = state.seats.len();
        if worker == MAX_WORKERS {
            let now = self.stage.now();
            let is_kept = |seat: &Seat| seat.id.as_deref().is_some_and(|id| kept.contains(&id));
            let vacant = (0..).zip(&state.seats).filter(|(_, seat)| !self.fixed && !is_kept(seat));
            let vacant = vacant.filter_map(|(index, seat)| {
                let at = seat.vacant_at(self.seat_kept)?;
                (at <= now).then_some((at, index))
            });
            if let Some((_, index)) = vacant.min() {
                let seat = &mut state.seats[index];
                tracing::info!(
                    seat = index,
                    before = seat.id.as_deref().map(shown),
                    now = id.map(shown),
                    "the seat of a worker that is gone is given to another one"
                );
                seat.pass_on(id.map(str::to_owned), address, now);
                return Some((index, None));
            }
            let worker = id.map(shown).or_else(|| Some(address?.to_string())).unwrap_or_default();
            tracing::error!(
                worker,
                "no seat is left for a worker: a cluster has at most {MAX_WORKERS}, and those that have gone keep their seats for as long as placements wait for them (--replace-after) or name them"
            );
            return None;
        }
        let seat = Seat::new(id.map(str::to_owned), address, self.stage.now());
        let new = NewSeat { worker, lane: Arc::clone(&seat.lane), orders: seat.orders() };
        state.seats.push(seat);
        Some((worker, Some(new)))
    }

    /// When to look again although nothing happens: a worker that found no seat may get one, or a lost one is waited for no
    /// more.
    pub(super) fn due(&self) -> Option<Instant> {
        let state = self.lock();
        let seats = state.seats.iter();
        let vacant = seats.clone().filter_map(|seat| seat.vacant_at(self.seat_kept));
        let vacant = vacant.filter(|_| state.full);
        vacant.chain(seats.filter_map(|seat| seat.forgotten_at(self.lost_for))).min()
    }

    /// Takes a worker's hello. The refusal names what does not fit.
    pub(super) fn greet(
        &self,
        worker: usize,
        session: u64,
        hello: &WorkerHello,
    ) -> Result<(), String> {
        let candidate =
            Candidate { id: hello.worker_id.clone(), weight: hello.weight, ..Candidate::default() };
        // One candidate alone: its weight is checked before it can spoil the placement of all.
        Placement::compute(&[], std::slice::from_ref(&candidate))
            .map_err(|error| error.to_string())?;
        let id = &hello.worker_id;
        if id.is_empty() || id.len() > 64 {
            return Err(format!("worker id {} is empty or longer than 64 bytes", shown(id)));
        }
        let mut state = self.lock();
        if !self.fixed
            && let Some(expected) = &state.seats[worker].id
            && expected != id
        {
            return Err(format!(
                "worker {} answers at the address that worker {} has in the membership store",
                shown(id),
                shown(expected)
            ));
        }
        let mut others = state.seats.iter_mut().enumerate().filter(|(other, _)| *other != worker);
        if let Some((_, seat)) = others.find(|(_, seat)| seat.id.as_ref() == Some(id)) {
            if matches!(seat.link, LinkState::Loading | LinkState::Serving) {
                return Err(format!(
                    "worker id {} is already used by {}; ids must be unique",
                    shown(id),
                    seat.address_text()
                ));
            }
            // The worker has moved to another address of the list.
            seat.forget();
        }
        state.seats[worker].greet(hello, session, self.stage.now());
        self.review(&mut state);
        Ok(())
    }

    /// Recomputes what follows from the seats, under their lock.
    fn review(&self, state: &mut State) {
        let plans = self.plans.borrow().clone();
        let now = self.stage.now();
        for (worker, seat) in state.seats.iter_mut().enumerate() {
            let placed = match plans.in_force {
                _ if plans.names(worker) => Placed::Named,
                Some(_) => Placed::Omitted,
                None => Placed::Nowhere,
            };
            let (fixed, idle, lost_for) = (self.fixed, state.idle, self.lost_for);
            seat.review(&Surroundings { placed, fixed, idle, lost_for, now });
        }
        let roster: Vec<Member> = state.seats.iter().map(Seat::member).collect();
        self.roster.send_if_modified(|old| {
            let differs = old.len() != roster.len()
                || old.iter().zip(&roster).any(|(old, new)| {
                    (&old.name, old.holder, &old.absent_layers)
                        != (&new.name, new.holder, &new.absent_layers)
                });
            if differs {
                *old = roster;
            }
            differs
        });
        let status = self.status_of(state, &plans);
        self.status.send_if_modified(|old| {
            let differs = *old != status;
            *old = status;
            differs
        });
        let facts: Vec<SeatFacts> = state.seats.iter().map(Seat::facts).collect();
        self.facts.send_if_modified(|old| {
            let differs = *old != facts;
            *old = facts;
            differs
        });
    }

    fn status_of(&self, state: &State, plans: &Plans) -> ClusterStatus {
        let generation = plans.coming().map_or(0, |plan| plan.generation);
        // A worker that serves can stand in for every other one in the layers that it has.
        let covered = |&(layer, own): &(u32, bool)| {
            own || state.seats.iter().any(|seat| seat.covers(layer, generation))
        };
        ClusterStatus {
            workers: state.seats.iter().map(Seat::status).collect(),
            complete: generation != 0 && self.layers.iter().all(covered),
        }
    }

    /// Follows the placements.
    pub(super) fn plans(&self) -> watch::Receiver<Plans> {
        self.plans.subscribe()
    }

    /// What operators are told of each seat.
    pub(super) fn known(&self) -> Vec<KnownWorker> {
        self.lock().seats.iter().map(Seat::known).collect()
    }

    /// Changes the placements.
    pub(super) fn plan<R>(&self, change: impl FnOnce(&mut Plans) -> R) -> R {
        let mut result = None;
        let mut state = self.lock();
        self.plans.send_if_modified(|plans| {
            let before = plans.clone();
            result = Some(change(plans));
            *plans != before
        });
        self.review(&mut state);
        result.expect("the change was made")
    }

    /// Follows the seats.
    pub(super) fn roster(&self) -> watch::Receiver<Vec<Member>> {
        self.roster.subscribe()
    }

    /// Follows the status.
    pub(super) fn status(&self) -> watch::Receiver<ClusterStatus> {
        self.status.subscribe()
    }

    /// Tells whether requests are under way.
    pub(super) fn set_running(&self, any: bool) {
        let mut state = self.lock();
        state.idle = !any;
        self.review(&mut state);
    }

    /// Follows what is known of each seat.
    pub(super) fn facts(&self) -> watch::Receiver<Vec<SeatFacts>> {
        self.facts.subscribe()
    }

    /// Tells where a link has got to, and why.
    pub(super) fn tell(&self, worker: usize, link: LinkState, detail: impl Into<String>) {
        self.update(worker, |seat| {
            seat.link = link;
            seat.detail = detail.into();
        });
    }

    /// Tells what a worker holds.
    pub(super) fn tell_resident(&self, worker: usize, experts: u64, bytes: u64) {
        self.update(worker, |seat| (seat.experts, seat.bytes) = (experts, bytes));
    }

    /// Tells which generations a worker has ready; 0 stands for none.
    pub(super) fn tell_ready(&self, worker: usize, ready: [u64; 2]) {
        self.update(worker, |seat| seat.ready = ready);
    }

    /// Tells that a worker cannot take what it was given.
    pub(super) fn tell_refused(&self, worker: usize, detail: &str) {
        let now = self.stage.now();
        self.update(worker, |seat| seat.refuse(detail, now));
    }

    /// Tells that a worker is about to leave.
    pub(super) fn tell_leaving(&self, worker: usize) {
        self.update(worker, |seat| seat.said_goodbye = true);
    }

    /// Tells that a session has ended.
    pub(super) fn tell_ended(&self, worker: usize, link: LinkState, detail: &str) {
        let now = self.stage.now();
        self.update(worker, |seat| {
            seat.ended(now);
            (seat.link, seat.detail) = (link, detail.to_owned());
        });
    }

    /// Takes a worker out of service until the store's record says otherwise.
    pub(super) fn quarantine(&self, worker: usize, reason: &str) {
        self.update(worker, |seat| seat.quarantine = Quarantine::Wanted(reason.to_owned()));
    }

    /// Whether a worker is out of service because it computed differently.
    pub(super) fn is_quarantined(&self, worker: usize) -> bool {
        self.lock().seats.get(worker).is_some_and(|seat| seat.quarantine.reason().is_some())
    }

    /// Quarantines that the store does not know of yet.
    pub(super) fn unwritten_quarantines(&self) -> Vec<(String, String)> {
        let state = self.lock();
        let wanted = state.seats.iter().filter_map(|seat| match &seat.quarantine {
            Quarantine::Wanted(reason) => Some((seat.id.clone()?, reason.clone())),
            _ => None,
        });
        wanted.collect()
    }

    /// Takes down that a quarantine was written.
    pub(super) fn quarantine_written(&self, id: &str, revision: u64) {
        let mut state = self.lock();
        if let Some(seat) = state.seats.iter_mut().find(|seat| seat.id.as_deref() == Some(id)) {
            seat.quarantine.written(revision);
        }
    }

    /// Shows a change that only the lane knows.
    pub(super) fn refresh(&self) {
        self.review(&mut self.lock());
    }

    /// Name and address of a worker for messages.
    pub(super) fn name(&self, worker: usize) -> String {
        let state = self.lock();
        let seat = &state.seats[worker];
        match &seat.id {
            Some(id) => format!("worker {} ({})", shown(id), seat.address_text()),
            None => format!("worker at {}", seat.address_text()),
        }
    }

    /// State of a link and why it is there.
    pub(super) fn told(&self, worker: usize) -> (LinkState, String) {
        let state = self.lock();
        let seat = &state.seats[worker];
        (seat.link, seat.detail.clone())
    }

    fn update(&self, worker: usize, change: impl FnOnce(&mut Seat)) {
        let mut state = self.lock();
        change(&mut state.seats[worker]);
        self.review(&mut state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
