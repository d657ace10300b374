//! One worker's seat: what the store, its hello and its link say about it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_proto::{
    address::PeerAddress, expert::v1::WorkerHello, identity::shown,
    membership::records::WorkerRecord, v1::WorkerStatus,
};
use tokio::sync::watch;

use super::{
    super::{lane::Lane, status::LinkState},
    Member,
};
use crate::admin::KnownWorker;

/// How long a worker that could not take its experts is given none, if it comes back as it was. It would refuse them again,
/// and each time there would be a new placement.
const REFUSED_FOR: Duration = Duration::from_secs(300);

/// What a link is to do.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in super::super) struct Orders {
    /// Where the worker is; none while nobody has said it.
    pub(in super::super) address: Option<PeerAddress>,
    /// Differs each time the worker's process starts; 0 where that is not known.
    pub(in super::super) incarnation: u64,
    /// Why there is to be no connection.
    pub(in super::super) hold: Option<(LinkState, String)>,
}

impl Orders {
    /// Whether these may lead to a process where those did not.
    pub(in super::super) fn is_news(&self, from: &Self) -> bool {
        (&self.address, self.incarnation) != (&from.address, from.incarnation)
    }
}

/// What the membership cores are told about a seat.
#[derive(Debug, Clone, PartialEq)]
pub(in super::super) struct SeatFacts {
    pub(in super::super) address: String,
    /// Its last hello.
    pub(in super::super) hello: Option<WorkerHello>,
    /// It said that it leaves.
    pub(in super::super) leaving: bool,
    /// The session that was greeted last.
    pub(in super::super) session: u64,
    /// Whether that session is up.
    pub(in super::super) up: bool,
    /// Since when it is up or down.
    pub(in super::super) since: Instant,
    /// Generations that it can serve; 0 stands for none.
    pub(in super::super) ready: [u64; 2],
    /// Why it cannot have what it was given, if so.
    pub(in super::super) refused: Option<String>,
}

/// Whether a worker is kept out of service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Quarantine {
    #[default]
    Not,
    /// The store does not know yet.
    Wanted(String),
    /// Written at a revision that has not been seen yet.
    Written(String, u64),
    /// Stands in the store.
    Seen(String),
}

impl Quarantine {
    /// Follows the store: the reason of the record, if there is one.
    pub(super) fn follow(&mut self, record: Option<String>, revision: u64) {
        match (&*self, record) {
            (_, Some(reason)) => *self = Self::Seen(reason),
            (Self::Seen(_), None) => *self = Self::Not,
            // Written, seen by an operator and undone before it was seen here.
            (Self::Written(_, written), None) if *written <= revision => *self = Self::Not,
            _ => {}
        }
    }

    pub(super) fn written(&mut self, revision: u64) {
        if let Self::Wanted(reason) = self {
            *self = Self::Written(std::mem::take(reason), revision);
        }
    }

    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Not => None,
            Self::Wanted(reason) | Self::Written(reason, _) | Self::Seen(reason) => Some(reason),
        }
    }
}

#[derive(Debug)]
pub(super) struct Seat {
    pub(super) id: Option<String>,
    /// How many other workers had the seat before.
    holder: u64,
    /// Since when it has neither record nor link and no placement names it.
    gone: Option<Instant>,
    /// The newest one, also after it has vanished from the store.
    address: Option<PeerAddress>,
    incarnation: u64,
    /// What the store says now.
    pub(super) record: Option<WorkerRecord>,
    /// The last one.
    hello: Option<WorkerHello>,
    session: u64,
    up: bool,
    since: Instant,
    absent_layers: Arc<[u32]>,
    pub(super) link: LinkState,
    pub(super) detail: String,
    pub(super) experts: u64,
    pub(super) bytes: u64,
    pub(super) ready: [u64; 2],
    /// Why and when it could not take what it was given.
    refused: Option<(String, Instant)>,
    /// An operator wants it to leave.
    pub(super) to_drain: bool,
    /// It said itself that it leaves.
    pub(super) said_goodbye: bool,
    /// Its last record said that it leaves: remembered when the record has gone with the worker.
    recorded_goodbye: bool,
    pub(super) quarantine: Quarantine,
    pub(super) lane: Arc<Lane>,
    orders: watch::Sender<Orders>,
}

/// What the placements say of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    /// One of them gives it experts.
    Named,
    /// The one in force does without it.
    Omitted,
    /// There is none.
    Nowhere,
}

/// What a seat is reviewed by beside what it knows itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Surroundings {
    pub(super) placed: Placed,
    /// The workers are a list that does not change.
    pub(super) fixed: bool,
    /// No request is under way.
    pub(super) idle: bool,
    /// How long a worker that is gone without a goodbye is waited for.
    pub(super) lost_for: Duration,
    pub(super) now: Instant,
}

impl Seat {
    pub(super) fn new(id: Option<String>, address: Option<PeerAddress>, now: Instant) -> Self {
        let detail = if address.is_some() {
            "not connected yet"
        } else {
            "the placement names it, but the membership store does not say where it is"
        };
        Self {
            id,
            holder: 0,
            gone: None,
            orders: watch::Sender::new(Orders { address: address.clone(), ..Orders::default() }),
            address,
            incarnation: 0,
            record: None,
            hello: None,
            session: 0,
            up: false,
            since: now,
            absent_layers: Arc::default(),
            link: LinkState::Connecting,
            detail: detail.to_owned(),
            experts: 0,
            bytes: 0,
            ready: [0; 2],
            refused: None,
            to_drain: false,
            said_goodbye: false,
            recorded_goodbye: false,
            quarantine: Quarantine::default(),
            lane: Arc::default(),
        }
    }

    pub(super) fn orders(&self) -> watch::Receiver<Orders> {
        self.orders.subscribe()
    }

    pub(super) fn address(&self) -> Option<&PeerAddress> {
        self.address.as_ref()
    }

    pub(super) fn address_text(&self) -> String {
        self.address.as_ref().map_or_else(|| "unknown address".to_owned(), PeerAddress::to_string)
    }

    /// Takes the store's record.
    pub(super) fn follow(&mut self, address: PeerAddress, record: WorkerRecord) {
        self.address = Some(address);
        self.incarnation = record.incarnation;
        self.recorded_goodbye = record.draining;
        self.record = Some(record);
    }

    /// Takes a hello.
    pub(super) fn greet(&mut self, hello: &WorkerHello, session: u64, now: Instant) {
        let is_long_ago = |at: Instant| now.saturating_duration_since(at) > REFUSED_FOR;
        if self.hello.as_ref() != Some(hello)
            || self.refused.as_ref().is_some_and(|(_, at)| is_long_ago(*at))
        {
            self.refused = None;
        }
        self.id = Some(hello.worker_id.clone());
        self.absent_layers = hello.absent_layers.as_slice().into();
        self.said_goodbye = hello.draining;
        self.hello = Some(hello.clone());
        (self.session, self.up, self.since) = (session, true, now);
        (self.link, self.detail) = (LinkState::Loading, "waiting for a placement".to_owned());
    }

    /// When the seat may be given to another worker; none while anybody counts on the one that has it. What an operator or
    /// an audit wants of a worker stands in the store by its id, and so does not need the seat.
    pub(super) fn vacant_at(&self, kept: Duration) -> Option<Instant> {
        let is_settled = matches!(self.quarantine, Quarantine::Not | Quarantine::Seen(_));
        self.gone.filter(|_| is_settled && self.record.is_none()).map(|since| since + kept)
    }

    /// Gives the seat to another worker. The link stays, and so do its counters: they are totals.
    pub(super) fn pass_on(
        &mut self,
        id: Option<String>,
        address: Option<PeerAddress>,
        now: Instant,
    ) {
        let before = std::mem::replace(self, Self::new(id, address, now));
        before.lane.set_usual(Duration::ZERO);
        (self.lane, self.orders) = (before.lane, before.orders);
        (self.session, self.holder) = (before.session, before.holder + 1);
    }

    /// The worker sits elsewhere now.
    pub(super) fn forget(&mut self) {
        self.id = None;
        self.hello = None;
        self.refused = None;
    }

    /// It cannot take what it was given.
    pub(super) fn refuse(&mut self, detail: &str, now: Instant) {
        self.refused = Some((detail.to_owned(), now));
    }

    /// Its session is over.
    pub(super) fn ended(&mut self, now: Instant) {
        if std::mem::take(&mut self.up) {
            self.since = now;
        }
        self.ready = [0; 2];
        (self.experts, self.bytes) = (0, 0);
    }

    /// The store says that it leaves.
    fn is_dismissed(&self) -> bool {
        self.to_drain || self.record.as_ref().is_some_and(|record| record.draining)
    }

    fn is_leaving(&self) -> bool {
        self.said_goodbye || self.is_dismissed()
    }

    /// What it is after it has gone, and why. One that said goodbye has left. One that did not is lost: somebody may have to
    /// look after it. That ends with `lost_for`, because experts and memory are placed without it by then.
    fn absence(&self, lost_for: Duration, now: Instant) -> (LinkState, String) {
        if self.is_leaving() || self.recorded_goodbye {
            return (LinkState::Left, "said goodbye and has gone".to_owned());
        }
        if self.gone.is_some_and(|since| now.saturating_duration_since(since) >= lost_for) {
            let minutes = lost_for.as_secs() / 60;
            let detail = format!("gone without goodbye, and not waited for after {minutes} min");
            return (LinkState::Left, detail);
        }
        (LinkState::Lost, "has no record in the membership store any more".to_owned())
    }

    /// When a worker that is lost is waited for no more.
    pub(super) fn forgotten_at(&self, lost_for: Duration) -> Option<Instant> {
        let is_lost = matches!(self.orders.borrow().hold, Some((LinkState::Lost, _)));
        self.gone.filter(|_| is_lost).map(|since| since + lost_for)
    }

    /// Decides what its link is to do.
    pub(super) fn review(&mut self, around: &Surroundings) {
        let Surroundings { placed, fixed, idle, lost_for, now } = *around;
        let unplaced = placed == Placed::Omitted;
        let is_gone = self.record.is_none() && !self.up && placed != Placed::Named;
        self.gone = is_gone.then(|| self.gone.unwrap_or(now));
        self.lane.set_leaving(self.is_leaving());
        // Who says goodbye is gone when its session is, and may come back.
        let is_leaving = self.is_dismissed() || (self.said_goodbye && self.up);
        let hold = if let Some(reason) = self.quarantine.reason() {
            Some((LinkState::Quarantined, reason.to_owned()))
        } else if !fixed && self.record.is_none() && unplaced && !self.up {
            Some(self.absence(lost_for, now))
        } else if is_leaving && unplaced {
            Some((LinkState::Draining, "drained: it holds no experts any more".to_owned()))
        } else if idle && self.said_goodbye && self.up {
            // Nobody waits for anything that it computes, and what comes later is rescued as after any loss.
            Some((LinkState::Left, "left while no request was under way".to_owned()))
        } else {
            None
        };
        let (address, incarnation) = (self.address.clone(), self.incarnation);
        let orders = Orders { address, incarnation, hold };
        self.orders.send_if_modified(|old| {
            let differs = *old != orders;
            *old = orders;
            differs
        });
    }

    /// Whether it could compute any expert of a layer under a generation.
    pub(super) fn covers(&self, layer: u32, generation: u64) -> bool {
        self.lane.serves(generation) && !self.absent_layers.contains(&layer)
    }

    /// What operators are told.
    pub(super) fn known(&self) -> KnownWorker {
        let (state, detail) = self.shown();
        let hello = self.hello.as_ref();
        let recorded = self.record.as_ref();
        let host = hello.map(|hello| hello.host.clone()).filter(|host| !host.is_empty());
        KnownWorker {
            id: self.id.clone(),
            address: self.address_text(),
            host: host.or_else(|| Some(recorded?.host.clone())).unwrap_or_default(),
            state: state.name(),
            detail,
            draining: self.is_leaving(),
            loaded_experts: self.experts,
            loaded_bytes: self.bytes,
            ram_budget_bytes: hello.map_or(0, |hello| hello.ram_budget_bytes),
            weight: hello.map_or(1.0, |hello| hello.weight),
            p99: self.lane.usual(),
        }
    }

    pub(super) fn member(&self) -> Member {
        Member {
            name: self.id.clone().unwrap_or_else(|| self.address_text()),
            holder: self.holder,
            lane: Arc::clone(&self.lane),
            absent_layers: Arc::clone(&self.absent_layers),
            weight: self.hello.as_ref().map_or(1.0, |hello| hello.weight),
        }
    }

    pub(super) fn facts(&self) -> SeatFacts {
        SeatFacts {
            address: self.address_text(),
            hello: self.hello.clone(),
            leaving: self.said_goodbye,
            session: self.session,
            up: self.up,
            since: self.since,
            ready: self.ready,
            refused: self.refused.as_ref().map(|(detail, _)| detail.clone()),
        }
    }

    pub(super) fn status(&self) -> WorkerStatus {
        let (state, detail) = self.shown();
        WorkerStatus {
            worker_id: self.id.as_deref().map(shown).unwrap_or_default(),
            endpoint: self.address.as_ref().map(PeerAddress::to_string).unwrap_or_default(),
            state: state.name().to_owned(),
            experts: self.experts,
            bytes: self.bytes,
            detail,
        }
    }

    /// The state as people see it.
    fn shown(&self) -> (LinkState, String) {
        if let Some(reason) = self.quarantine.reason() {
            return (LinkState::Quarantined, reason.to_owned());
        }
        // The link says so as well, but only when it is next asked to connect.
        if let Some(hold) = self.orders.borrow().hold.clone().filter(|_| !self.up) {
            return hold;
        }
        if self.link != LinkState::Serving {
            return (self.link, self.detail.clone());
        }
        if self.lane.is_suspect() {
            let detail = "owes an answer for longer than is usual; asked whether it is alive";
            return (LinkState::Suspect, detail.to_owned());
        }
        if self.is_leaving() {
            return (LinkState::Draining, "serves until others hold its experts".to_owned());
        }
        (self.link, self.detail.clone())
    }
}
