//! The members of a cluster, from what the store says and what the links found out.
//!
//! A plain function of its arguments. The rules:
//!
//! * A worker whose link is up belongs to the cluster, whatever became of its lease: the store may be away.
//! * A worker whose lease lasts and whose link is down is awaited; one that has neither is gone, since its link went down.
//! * A greeting is believed before a record: it is newer, and from the worker itself.
//! * Of two links that greet with one id, the one that greeted first is the member. The other is refused by name.
//! * A worker that is draining or quarantined, or serves another container, is a member that takes no experts.

use std::{collections::BTreeMap, time::Instant};

use shimmer_proto::{
    identity::shown,
    membership::{
        Snapshot,
        records::{
            COORDINATORS, CoordinatorRecord, DRAINS, HEAT, HeatRecord, LEADER, QUARANTINES,
            QuarantineRecord, WORKERS, WorkerRecord, id_in,
        },
    },
};

use crate::{
    heat::HeatMap,
    placement::{Candidate, Placement, record::MAX_ID_BYTES},
};

/// What the link to one worker knows. A coordinator has one for every worker that it ever heard of.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkFacts {
    /// `host:port` that it connects to.
    pub address: String,
    /// The last greeting; none if there never was one.
    pub greeting: Option<Greeting>,
    /// Whether a greeted session is up.
    pub up: bool,
    /// Since when it is up or down.
    pub since: Instant,
    /// Why the worker was refused, if it was.
    pub refused: Option<String>,
}

/// What a worker said in its hello.
#[derive(Debug, Clone, PartialEq)]
pub struct Greeting {
    /// Its name, and what placement wants to know.
    pub candidate: Candidate,
    /// It was about to leave, or said so since.
    pub draining: bool,
}

/// Everything a coordinator knows about its cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct View {
    /// Workers by id.
    pub members: BTreeMap<String, Member>,
    /// Coordinators by id, as far as the store names them.
    pub coordinators: BTreeMap<String, CoordinatorRecord>,
    /// Who leads, and the revision under which it does.
    pub leader: Option<(String, u64)>,
    /// This coordinator does: it wrote the key under the lease that it still has.
    pub leads: bool,
    /// Heat over all coordinators.
    pub heat: HeatMap,
    /// Whether the store answers.
    pub connected: bool,
    /// What was refused and why: records that cannot be read, ids that are used twice.
    pub complaints: Vec<String>,
}

/// A worker of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// What placement wants to know of it.
    pub candidate: Candidate,
    /// `host:port` to connect to: the record's when there is one.
    pub address: String,
    /// The process, as its record numbers it; none without a record.
    pub incarnation: Option<u64>,
    /// Whether it can be reached.
    pub reach: Reach,
    /// Whether this coordinator was ever greeted by it.
    pub greeted: bool,
    /// Why it takes no experts.
    pub excluded: Option<Exclusion>,
}

impl Member {
    /// Whether experts can be placed on it now.
    pub fn is_placeable(&self) -> bool {
        self.reach == Reach::Up && self.excluded.is_none()
    }
}

/// Whether a worker can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The link is up.
    Up,
    /// The link is down; the worker's lease lasts.
    Awaited {
        /// Since when; none if there never was a link.
        since: Option<Instant>,
    },
    /// Neither link nor lease.
    Gone {
        /// When the link went down.
        since: Instant,
    },
}

/// Why a member takes no experts. It goes on serving those that it has, except when it is quarantined or refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exclusion {
    /// It is about to leave.
    Draining {
        /// An operator asked for it, not the worker.
        by_operator: bool,
    },
    /// It computed something else than others.
    Quarantined {
        /// How that was told.
        reason: String,
    },
    /// It does not fit this cluster.
    Refused {
        /// Names what does not fit, with both values.
        reason: String,
    },
}

impl View {
    /// Puts together what the store and the links know. `container_digest` is what this coordinator serves.
    pub fn new(snapshot: &Snapshot, links: &[LinkFacts], container_digest: &str) -> Self {
        let (connected, leads) = (snapshot.disconnected.is_none(), snapshot.owns(LEADER));
        let mut view = Self { connected, leads, ..Self::default() };
        view.add_links(links);
        for (key, entry) in &snapshot.entries {
            view.add_entry(key, &entry.value, entry.revision, container_digest);
        }
        view.complaints.extend(foreign_leader(snapshot));
        view.exclude(snapshot);
        view
    }

    /// Greeted workers, each id once.
    fn add_links(&mut self, links: &[LinkFacts]) {
        let mut greeted: Vec<(&LinkFacts, &Greeting)> =
            links.iter().filter_map(|link| Some((link, link.greeting.as_ref()?))).collect();
        // Of several links with one id: one that is up, the earliest; else the one that went down last.
        greeted.sort_by(|(a, _), (b, _)| {
            let since = if a.up { a.since.cmp(&b.since) } else { b.since.cmp(&a.since) };
            b.up.cmp(&a.up).then(since).then(a.address.cmp(&b.address))
        });
        for (link, greeting) in greeted {
            let id = &greeting.candidate.id;
            if let Some(first) = self.members.get(id) {
                if link.up && first.reach == Reach::Up {
                    self.complaints.push(format!(
                        "worker id {} at {} is already used by {}; ids must be unique",
                        shown(id),
                        link.address,
                        first.address
                    ));
                }
                continue;
            }
            let since = link.since;
            let draining = greeting.draining.then_some(Exclusion::Draining { by_operator: false });
            let refused = link.refused.clone().map(|reason| Exclusion::Refused { reason });
            let member = Member {
                candidate: greeting.candidate.clone(),
                address: link.address.clone(),
                incarnation: None,
                reach: if link.up { Reach::Up } else { Reach::Gone { since } },
                greeted: true,
                excluded: refused.or(draining),
            };
            self.members.insert(id.clone(), member);
        }
    }

    fn add_entry(&mut self, key: &str, value: &str, revision: u64, container_digest: &str) {
        if let Some(id) = id_in(WORKERS, key) {
            match read::<WorkerRecord>(key, value).and_then(|record| check(id, record)) {
                Ok(record) => self.add_worker(id, record, container_digest),
                Err(complaint) => self.complaints.push(complaint),
            }
        } else if let Some(id) = id_in(COORDINATORS, key) {
            match read::<CoordinatorRecord>(key, value) {
                Ok(record) => drop(self.coordinators.insert(id.to_owned(), record)),
                Err(complaint) => self.complaints.push(complaint),
            }
        } else if id_in(HEAT, key).is_some() {
            match read::<HeatRecord>(key, value) {
                Ok(record) => self.heat.add(&record),
                Err(complaint) => self.complaints.push(complaint),
            }
        } else if key == LEADER {
            self.leader = Some((value.to_owned(), revision));
        }
    }

    fn add_worker(&mut self, id: &str, record: WorkerRecord, container_digest: &str) {
        let refused = (record.container_digest != container_digest).then(|| {
            let (theirs, ours) = (shown(&record.container_digest), shown(container_digest));
            Exclusion::Refused {
                reason: format!(
                    "worker {} has container digest {theirs}, this cluster serves {ours}",
                    shown(id)
                ),
            }
        });
        let draining = record.draining.then_some(Exclusion::Draining { by_operator: false });
        let candidate = Candidate {
            id: id.to_owned(),
            weight: record.weight,
            absent_layers: record.absent_layers,
            host: record.host,
            ram_budget_bytes: record.ram_budget_bytes,
        };
        let member = self.members.entry(id.to_owned()).or_insert(Member {
            candidate: candidate.clone(),
            address: String::new(),
            incarnation: None,
            reach: Reach::Awaited { since: None },
            greeted: false,
            excluded: None,
        });
        // Where it is to be found: a worker that is up stays where it is until its link ends.
        member.address = record.address;
        member.incarnation = Some(record.incarnation);
        if let Reach::Gone { since } = member.reach {
            member.reach = Reach::Awaited { since: Some(since) };
            member.candidate = candidate;
            // What it said before it went down is not what it says now.
            member.excluded = None;
        }
        member.excluded = member.excluded.take().or(refused).or(draining);
    }

    /// Drains and quarantines hold for workers that are not there as well.
    fn exclude(&mut self, snapshot: &Snapshot) {
        for (key, entry) in &snapshot.entries {
            if let Some(member) = id_in(DRAINS, key).and_then(|id| self.members.get_mut(id)) {
                let draining = Exclusion::Draining { by_operator: true };
                member.excluded.get_or_insert(draining);
            }
            let Some(id) = id_in(QUARANTINES, key) else { continue };
            // A record that cannot be read still says that somebody distrusts the worker.
            let reason = match read::<QuarantineRecord>(key, &entry.value) {
                Ok(record) => format!("{} ({})", shown(&record.reason), shown(&record.coordinator)),
                Err(complaint) => complaint,
            };
            if let Some(member) = self.members.get_mut(id)
                && !matches!(member.excluded, Some(Exclusion::Refused { .. }))
            {
                member.excluded = Some(Exclusion::Quarantined { reason });
            }
        }
    }
}

/// What is wrong with a key `leader` that hangs on no lease, as every leader's does: it never goes by itself, and while it
/// stands nobody leads.
pub(crate) fn foreign_leader(snapshot: &Snapshot) -> Option<String> {
    let entry = snapshot.entries.get(LEADER).filter(|entry| entry.lease == 0)?;
    let value = shown(&entry.value);
    Some(format!(
        "somebody else wrote {value:?} under `{LEADER}`, without a lease, so that nobody decides placements; remove that key from the store"
    ))
}

fn read<T: serde::de::DeserializeOwned>(key: &str, value: &str) -> Result<T, String> {
    serde_json::from_str(value)
        .map_err(|error| format!("the record {} cannot be read: {error}", shown(key)))
}

/// Checks what placement would refuse, so that one bad record does not spoil the placement of all.
fn check(id: &str, record: WorkerRecord) -> Result<WorkerRecord, String> {
    if id.len() > MAX_ID_BYTES {
        return Err(format!("worker id {} is longer than {MAX_ID_BYTES} bytes", shown(id)));
    }
    let candidate = Candidate { id: shown(id), weight: record.weight, ..Candidate::default() };
    Placement::compute(&[], &[candidate]).map_err(|error| error.to_string())?;
    Ok(record)
}

#[cfg(test)]
mod tests;
