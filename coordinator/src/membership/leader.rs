//! Who decides placements, and when there is something to decide.
//!
//! Every coordinator runs this core. The one whose id stands under `leader` proposes placements, under two conditions: nobody
//! wrote a placement since the one that it knows, and it still leads. A leader that was cut off and comes back late fails
//! by the second one; nothing else keeps two leaders apart, and nothing else is needed.
//!
//! | what happened | the placement changes |
//! |---|---|
//! | first start with a list of workers | when all have greeted; after [`Timings::placement_wait`] with those that have |
//! | first start with registered workers | [`Timings::settle`] after the last one joined |
//! | a worker joined, drains, was quarantined, came back as another | [`Timings::debounce`] later |
//! | the same, and the placement names a worker that this coordinator never saw | ten times that at the latest: it may come back |
//! | a worker is gone | after [`Timings::replace_after`]; until then copies and stand-ins serve |
//! | the link to a worker with a lease is down | after [`LEASED_PATIENCE`] times that: others may reach it |
//! | the store is away | never |
//! | the store lost its data or was restored, and a coordinator follows a later placement | [`Timings::debounce`] later |
//!
//! A placement that the workers cannot serve is never proposed.

mod wish;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use shimmer_proto::{
    identity::shown,
    membership::{
        Condition, Snapshot, StoreError, Write, Written,
        records::{LEADER, PLACEMENT, PlacementRecord},
    },
};

use super::{
    decided::{Decided, DecidedError},
    view::{Reach, View},
};
use crate::placement::{
    Candidate, PlacedLayer, Placement, PlacementError, PlacementInput,
    rebalance::{Rebalance, rebalance},
    record::RecordHeader,
};

pub use wish::LEASED_PATIENCE;
use wish::{Unseen, Wish};

/// First wait after a write that failed; it doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(250);
/// Longest wait after a write that failed. It is one small request, and until it is made there may be no placement at all.
const RETRY_MAX: Duration = Duration::from_secs(2);
/// Longest wait for a snapshot that shows a write which was made. A store that was restored may never get there.
const SHOWN_WITHIN: Duration = Duration::from_secs(5);
/// A placement is put off at most so many times its quiet time, or members that come and go would put it off for ever.
const DEBOUNCES: u32 = 10;

/// What a leader must know beside the members.
#[derive(Debug, Clone)]
pub struct LeaderConfig {
    /// This coordinator.
    pub id: String,
    /// Container that it serves.
    pub container_digest: String,
    /// Layers with routed experts.
    pub layers: Vec<PlacedLayer>,
    /// Copies of an expert in all.
    pub copies: usize,
    /// Number of workers of a static list; none when workers register themselves.
    pub listed: Option<usize>,
    /// When to act.
    pub timings: Timings,
}

/// When to act on what happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    /// Longest wait for the workers of a static list before the first placement.
    pub placement_wait: Duration,
    /// Quiet time before the first placement of workers that register themselves.
    pub settle: Duration,
    /// Quiet time before any later placement.
    pub debounce: Duration,
    /// How long a worker may be gone before its experts are placed elsewhere.
    pub replace_after: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            placement_wait: Duration::from_secs(10),
            // Workers of one roll-out start within a second or two of each other.
            settle: Duration::from_secs(2),
            debounce: Duration::from_secs(1),
            // A restart takes less; moving experts costs reads and warm caches.
            replace_after: Duration::from_secs(30),
        }
    }
}

/// One transaction of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreWrite {
    /// See [`shimmer_proto::membership::MembershipStore::write`].
    pub conditions: Vec<Condition>,
    /// See [`shimmer_proto::membership::MembershipStore::write`].
    pub writes: Vec<Write>,
}

/// What there is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Duty {
    /// Try to become leader.
    Campaign(StoreWrite),
    /// Write a placement.
    Propose {
        /// The placement.
        record: PlacementRecord,
        /// How to write it.
        write: StoreWrite,
    },
}

/// What to do now, and when to ask again although nothing has happened.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// A write to make; [`Leader::settled`] must be told its outcome.
    pub duty: Option<Duty>,
    /// When the answer may be another one; none if only an event can change it.
    pub wake: Option<Instant>,
    /// Why there is no new placement although one is wanted.
    pub hindrance: Option<String>,
}

/// The duties of one coordinator.
#[derive(Debug)]
pub struct Leader {
    config: LeaderConfig,
    started: Option<Instant>,
    pending: Option<Pending>,
    unseen: Unseen,
    facts: Facts,
    /// Revision of the last placement that was looked at, and the highest generation of all: see [`Self::newest`].
    seen: (u64, u64),
    /// A write is out.
    in_flight: bool,
    /// A revision that the snapshot must have reached, and until when it is waited for.
    shown: Option<(u64, Instant)>,
    failures: u32,
    retry_at: Option<Instant>,
}

/// What a placement was made of, as far as this coordinator knows.
#[derive(Debug, Default)]
struct Facts {
    generation: u64,
    of: BTreeMap<String, Candidate>,
}

/// Members that are not those of the placement.
#[derive(Debug)]
struct Pending {
    wish: Vec<Candidate>,
    /// Since when there is any difference.
    first: Instant,
    /// Since when it is this one.
    last: Instant,
}

/// What a placement comes after.
#[derive(Debug, Clone, Copy)]
struct Base {
    leader_revision: u64,
    /// The highest generation so far; 0 for none.
    generation: u64,
    /// Its revision.
    placed: Option<u64>,
}

/// A rebalance that could be written.
#[derive(Debug)]
pub struct RebalancePlan {
    /// The moves; workers are numbered as `workers` is.
    pub rebalance: Rebalance,
    /// Ids of the workers.
    pub workers: Vec<String>,
    /// The placement with the moves made.
    pub record: PlacementRecord,
    /// How to write it. Nothing has to be told of its outcome: the snapshot will show it.
    pub write: StoreWrite,
}

/// Why a placement cannot be rebalanced here and now.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RebalanceError {
    /// Somebody else decides.
    #[error("coordinator {leader} decides placements: ask there")]
    NotLeader {
        /// Who; "(nobody)" while there is no leader.
        leader: String,
    },
    /// The store is away.
    #[error("the membership store is away: no placement can be written")]
    StoreAway,
    /// Nothing is placed yet.
    #[error("there is no placement yet")]
    NoPlacement,
    /// A placement that cannot be used.
    #[error(transparent)]
    Decided(#[from] DecidedError),
    /// A worker of the placement was never there.
    #[error("worker {id} of the placement is not known here: wait until it is back or replaced")]
    UnknownWorker {
        /// Its name.
        id: String,
    },
    /// See [`PlacementError`].
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

impl Leader {
    /// Nothing has happened yet.
    pub fn new(config: LeaderConfig) -> Self {
        Self {
            config,
            started: None,
            pending: None,
            unseen: Unseen::default(),
            facts: Facts::default(),
            seen: (0, 0),
            in_flight: false,
            shown: None,
            failures: 0,
            retry_at: None,
        }
    }

    /// Whether this coordinator leads, as far as it knows.
    pub fn leads(&self, view: &View) -> bool {
        view.leads && view.leader.as_ref().is_some_and(|(id, _)| *id == self.config.id)
    }

    /// What there is to do. To be asked when view or snapshot changed, when the last decision's time has come, and after
    /// [`Self::settled`].
    pub fn decide(&mut self, view: &View, snapshot: &Snapshot, now: Instant) -> Decision {
        let started = *self.started.get_or_insert(now);
        self.remember(snapshot);
        if self.in_flight || !view.connected {
            return Decision::default();
        }
        self.shown =
            self.shown.filter(|&(revision, until)| snapshot.revision < revision && now < until);
        let wait = self.shown.map(|(_, until)| until).or(self.retry_at.filter(|&at| at > now));
        if wait.is_some() {
            return Decision { wake: wait, ..Decision::default() };
        }
        let leader_revision = match &view.leader {
            Some((_, revision)) if self.leads(view) => *revision,
            leader => {
                self.step_down();
                let duty = leader.is_none().then(|| self.campaign());
                return Decision { duty, ..Decision::default() };
            }
        };
        let newest = self.newest(view);
        let base = |generation: u64, placed| Base {
            leader_revision,
            generation: generation.max(newest),
            placed,
        };
        match Decided::read(snapshot, &self.config.container_digest, &self.config.layers) {
            Err(DecidedError::Unfit { revision, generation, .. }) => {
                self.first(view, base(generation, Some(revision)), started, now)
            }
            Err(error) => Decision { hindrance: Some(error.to_string()), ..Decision::default() },
            Ok(None) => self.first(view, base(0, None), started, now),
            Ok(Some(decided)) => {
                let base = base(decided.record.generation, Some(decided.revision));
                self.later(view, &decided, base, now)
            }
        }
    }

    /// The outcome of the write of the last decision.
    pub fn settled(&mut self, outcome: &Result<Written, StoreError>, now: Instant) {
        self.in_flight = false;
        if let Ok(Written::Done(revision)) = outcome {
            self.failures = 0;
            self.retry_at = None;
            self.shown = Some((*revision, now + SHOWN_WITHIN));
        } else {
            // Somebody else wrote and the snapshot does not show it yet, or the store did not answer.
            let wait = RETRY_MIN.saturating_mul(1 << self.failures.min(8)).min(RETRY_MAX);
            self.failures = self.failures.saturating_add(1);
            self.retry_at = Some(now + wait);
        }
    }

    /// Levels the placement in force by heat, if this coordinator may. Nothing is written: the shell may, for anything but a
    /// dry run.
    pub fn rebalance(
        &self,
        view: &View,
        snapshot: &Snapshot,
        max_moves: usize,
    ) -> Result<RebalancePlan, RebalanceError> {
        let leader_revision = match &view.leader {
            _ if !view.connected => return Err(RebalanceError::StoreAway),
            Some((_, revision)) if self.leads(view) => *revision,
            leader => {
                let nobody = || "(nobody)".to_owned();
                let leader = leader.as_ref().map_or_else(nobody, |(id, _)| shown(id));
                return Err(RebalanceError::NotLeader { leader });
            }
        };
        let LeaderConfig { container_digest, layers, copies, .. } = &self.config;
        let decided = Decided::read(snapshot, container_digest, layers)?;
        let decided = decided.ok_or(RebalanceError::NoPlacement)?;
        let workers = decided.record.workers.clone();
        let known = |id: &String| {
            let member = view.members.get(id).map(|m| m.candidate.clone());
            member.ok_or_else(|| RebalanceError::UnknownWorker { id: id.clone() })
        };
        let candidates = workers.iter().map(known).collect::<Result<Vec<_>, _>>()?;
        let input =
            PlacementInput { layers, candidates: &candidates, copies: *copies, heat: &view.heat };
        let rebalance = rebalance(&decided.placement, &input, max_moves)?;
        let generation = decided.record.generation.max(self.newest(view));
        let base = Base { leader_revision, generation, placed: Some(decided.revision) };
        let reason = format!("rebalance: {} moves", rebalance.moves.len());
        let (record, write) = self.proposal(&rebalance.placement, &workers, base, reason);
        Ok(RebalancePlan { rebalance, workers, record, write })
    }

    /// Also while somebody else leads: whoever leads next must know.
    fn remember(&mut self, snapshot: &Snapshot) {
        let Some(entry) = snapshot.entries.get(PLACEMENT) else { return };
        if self.seen.0 != entry.revision {
            let record = serde_json::from_str::<PlacementRecord>(&entry.value);
            let generation = record.map_or(0, |record| record.generation);
            self.seen = (entry.revision, self.seen.1.max(generation));
        }
    }

    /// The highest generation that this coordinator has seen, or that another one has: a store that lost its data knows less
    /// than they do, and one that leads since then may, too.
    fn newest(&self, view: &View) -> u64 {
        let followed = view.coordinators.values().map(|coordinator| coordinator.follows).max();
        followed.unwrap_or(0).max(self.seen.1)
    }

    /// What is missed since when is remembered: whoever leads again must not begin to wait anew.
    fn step_down(&mut self) {
        self.pending = None;
        self.facts = Facts::default();
    }

    fn campaign(&mut self) -> Duty {
        self.in_flight = true;
        Duty::Campaign(StoreWrite {
            conditions: vec![Condition { key: LEADER.to_owned(), revision: None }],
            writes: vec![Write::PutLeased {
                key: LEADER.to_owned(),
                value: self.config.id.clone(),
            }],
        })
    }

    /// The first placement of this container.
    fn first(&mut self, view: &View, base: Base, started: Instant, now: Instant) -> Decision {
        let Timings { placement_wait, settle, .. } = self.config.timings;
        let wish = Wish::first(view);
        let (_, last) = self.note(&wish.expected, now);
        let due = match self.config.listed {
            Some(listed) if wish.candidates.len() >= listed => now,
            Some(_) => started + placement_wait,
            None => last + settle,
        };
        if now < due {
            return Decision { wake: Some(due), ..Decision::default() };
        }
        let names = wish.candidates.iter().map(|c| c.id.as_str()).collect::<Vec<_>>().join(", ");
        let reason = format!("first placement: {names}");
        match self.place(view, wish.candidates, None) {
            Ok((placement, candidates)) => self.propose(&placement, candidates, base, reason),
            Err(error) => Decision { hindrance: Some(error.to_string()), ..Decision::default() },
        }
    }

    /// A placement after another one.
    fn later(&mut self, view: &View, decided: &Decided, base: Base, now: Instant) -> Decision {
        let Timings { debounce, replace_after, .. } = self.config.timings;
        self.learn(view, decided);
        let workers = &decided.record.workers;
        let wish = Wish::later(view, workers, &mut self.unseen, replace_after, now);
        // A coordinator that follows a later one cannot go back: it gets one that is newer still.
        let newest = base.generation;
        let is_behind = decided.record.generation < newest;
        let went_back =
            || is_behind.then(|| format!("the store went back, from generation {newest} at least"));
        // Whom nothing is known of is no reason by itself while it may come back.
        let mut expected = workers.clone();
        expected.retain(|id| !wish.unknown.contains(id));
        let difference = self.difference(&wish.candidates, &expected).or_else(went_back);
        if difference.is_none() {
            self.pending = None;
            return Decision { wake: wish.wake, ..Decision::default() };
        }
        let (first, last) = self.note(&wish.candidates, now);
        let due = (last + debounce).min(first + debounce * DEBOUNCES);
        if now < due {
            let wake = wish.wake.map_or(due, |wake| wake.min(due));
            return Decision { wake: Some(wake), ..Decision::default() };
        }
        // Nothing is known that it could be placed by, so that it holds up the others, but not for as long as it is waited
        // for alone.
        let until = first + debounce * DEBOUNCES;
        if let Some(id) = wish.unknown.first().filter(|_| now < until) {
            let hindrance = Some(format!("worker {id} has not been seen here and may come back"));
            let wake = Some(wish.wake.map_or(until, |wake| wake.min(until)));
            return Decision { wake, hindrance, ..Decision::default() };
        }
        let Some(reason) = self.difference(&wish.candidates, workers).or_else(went_back) else {
            self.pending = None;
            return Decision { wake: wish.wake, ..Decision::default() };
        };
        let hindered = |error: PlacementError| Decision {
            wake: wish.wake,
            hindrance: Some(error.to_string()),
            ..Decision::default()
        };
        let (placement, candidates, reason) =
            match self.place(view, wish.candidates.clone(), Some(decided)) {
                Ok((placement, candidates)) => (placement, candidates, reason),
                // Who drains stays while nobody else can do its work.
                Err(error) => {
                    let mut all = wish.candidates;
                    all.extend(wish.leaving);
                    all.sort_by(|a, b| a.id.cmp(&b.id));
                    let difference = self.difference(&all, workers).or_else(went_back);
                    let Some(reason) = difference else {
                        return hindered(error);
                    };
                    match self.place(view, all, Some(decided)) {
                        Ok((placement, candidates)) => (placement, candidates, reason),
                        Err(error) => return hindered(error),
                    }
                }
            };
        let is_same = candidates.iter().map(|c| &c.id).eq(workers);
        if is_same && !is_behind && placement == decided.placement {
            // A worker that came back with a little more memory, say: nothing moves.
            self.facts.of = candidates.into_iter().map(|c| (c.id.clone(), c)).collect();
            self.pending = None;
            return Decision { wake: wish.wake, ..Decision::default() };
        }
        let decision = self.propose(&placement, candidates, base, reason);
        Decision { wake: wish.wake, ..decision }
    }

    /// Notes what the placement in force is made of, where that is not known.
    fn learn(&mut self, view: &View, decided: &Decided) {
        let Decided { record, .. } = decided;
        let is_new = self.facts.generation != record.generation;
        self.facts.generation = record.generation;
        self.facts.of.retain(|id, _| record.workers.contains(id));
        for id in &record.workers {
            if let Some(member) = view.members.get(id).filter(|m| m.reach == Reach::Up)
                && (is_new || !self.facts.of.contains_key(id))
            {
                self.facts.of.insert(id.clone(), member.candidate.clone());
            }
        }
    }

    /// In what a wish differs from the workers of the placement; none if it does not.
    fn difference(&self, wish: &[Candidate], workers: &[String]) -> Option<String> {
        let wanted = |id: &String| wish.iter().any(|c| c.id == *id);
        let joined = wish.iter().filter(|c| !workers.contains(&c.id)).map(|c| &c.id);
        let left = workers.iter().filter(|id| !wanted(id));
        let changed = wish.iter().filter(|c| workers.contains(&c.id));
        let changed = changed.filter(|c| self.facts.of.get(&c.id).is_some_and(|of| of != *c));
        let parts: Vec<String> = [
            ("joined", joined.collect::<Vec<_>>()),
            ("left", left.collect()),
            ("changed", changed.map(|c| &c.id).collect()),
        ]
        .into_iter()
        .filter(|(_, ids)| !ids.is_empty())
        .map(|(what, ids)| {
            let ids: Vec<&str> = ids.into_iter().map(String::as_str).collect();
            format!("{what}: {}", ids.join(", "))
        })
        .collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// Since when there is a wish, and since when it is this one.
    fn note(&mut self, wish: &[Candidate], now: Instant) -> (Instant, Instant) {
        let pending = self.pending.get_or_insert_with(|| Pending {
            wish: wish.to_vec(),
            first: now,
            last: now,
        });
        if pending.wish != wish {
            pending.wish = wish.to_vec();
            pending.last = now;
        }
        (pending.first, pending.last)
    }

    fn place(
        &self,
        view: &View,
        candidates: Vec<Candidate>,
        before: Option<&Decided>,
    ) -> Result<(Placement, Vec<Candidate>), PlacementError> {
        let LeaderConfig { layers, copies, .. } = &self.config;
        let input =
            PlacementInput { layers, candidates: &candidates, copies: *copies, heat: &view.heat };
        let members = before.and_then(|decided| {
            let workers = decided.record.workers.iter();
            workers.map(|id| self.facts.of.get(id).cloned()).collect::<Option<Vec<_>>>()
        });
        let placement = match (before, members) {
            (Some(decided), Some(members)) => {
                Placement::plan_after(&input, &decided.placement, &members)?
            }
            // What it was made of is not known here, and so not what was moved.
            _ => Placement::plan(&input)?,
        };
        Ok((placement, candidates))
    }

    fn propose(
        &mut self,
        placement: &Placement,
        candidates: Vec<Candidate>,
        base: Base,
        reason: String,
    ) -> Decision {
        let ids: Vec<String> = candidates.iter().map(|c| c.id.clone()).collect();
        let (record, write) = self.proposal(placement, &ids, base, reason);
        let of = candidates.into_iter().map(|c| (c.id.clone(), c)).collect();
        self.facts = Facts { generation: record.generation, of };
        self.pending = None;
        self.in_flight = true;
        Decision { duty: Some(Duty::Propose { record, write }), ..Decision::default() }
    }

    fn proposal(
        &self,
        placement: &Placement,
        ids: &[String],
        base: Base,
        reason: String,
    ) -> (PlacementRecord, StoreWrite) {
        let Base { leader_revision, generation, placed } = base;
        let header = RecordHeader {
            generation: generation.saturating_add(1),
            container_digest: self.config.container_digest.clone(),
            leader: self.config.id.clone(),
            leader_revision,
            reason,
        };
        let record = placement.to_record(ids, header);
        let value = serde_json::to_string(&record).expect("a placement is plain data");
        let write = StoreWrite {
            conditions: vec![
                Condition { key: PLACEMENT.to_owned(), revision: placed },
                Condition { key: LEADER.to_owned(), revision: Some(leader_revision) },
            ],
            writes: vec![Write::Put { key: PLACEMENT.to_owned(), value }],
        };
        (record, write)
    }
}

#[cfg(test)]
mod tests;
