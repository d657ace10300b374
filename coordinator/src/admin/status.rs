//! What the store and the links know, as the messages of the admin service.

use std::{collections::BTreeMap, time::SystemTime};

use shimmer_proto::{
    admin::v1::{Coordinator, FaultCounts, PlacedExpert, PlacedLayer, Store, Worker},
    identity::shown,
    membership::{
        MembershipStore, Snapshot, StoreError,
        records::{
            COORDINATORS, CoordinatorRecord, DRAINS, HEAT, HeatRecord, LEADER, LayerRecord,
            PLACEMENT, PlacementRecord, QUARANTINES, id_in,
        },
    },
};

use super::KnownWorker;
use crate::{
    dispatch::{self, WorkerStats},
    heat::HeatMap,
    membership::view::foreign_leader,
};

/// The placement in the store; an error that can be read by people if it is none of this build.
pub(super) fn placement(snapshot: &Snapshot) -> Result<Option<PlacementRecord>, String> {
    let Some(entry) = snapshot.entries.get(PLACEMENT) else { return Ok(None) };
    let record = serde_json::from_str(&entry.value);
    record.map(Some).map_err(|error| format!("the record `{PLACEMENT}` cannot be read: {error}"))
}

/// Who decides placements; empty while nobody does.
pub(super) fn leader(snapshot: &Snapshot) -> String {
    snapshot.entries.get(LEADER).map_or_else(String::new, |entry| shown(&entry.value))
}

/// The same for people: a key that no member holds says why nobody decides.
pub(super) fn told_leader(snapshot: &Snapshot) -> String {
    foreign_leader(snapshot).map_or_else(|| leader(snapshot), |why| format!("unknown: {why}"))
}

/// Workers that a drain or a quarantine in the store is about, whether they are there or not.
pub(super) fn ordered(snapshot: &Snapshot) -> Vec<String> {
    let id = |key| id_in(DRAINS, key).or_else(|| id_in(QUARANTINES, key));
    snapshot.entries.keys().filter_map(|key| id(key)).map(str::to_owned).collect()
}

/// What is said of a write whose answer did not come: it may have been made, or be made later.
pub(super) fn uncertain(error: &StoreError, undone_by: &str) -> String {
    format!(
        "{error}. The order may take effect all the same, also later: `shimmer status` shows it when the store answers, and `{undone_by}` takes it back"
    )
}

pub(super) fn store(store: &dyn MembershipStore, snapshot: &Snapshot) -> Store {
    let detail = snapshot.disconnected.as_ref().map(|outage| {
        let since = SystemTime::now().duration_since(outage.since).unwrap_or_default();
        format!("{}; nothing heard for {} s", outage.cause, since.as_secs())
    });
    Store {
        kind: store.kind().to_owned(),
        connected: detail.is_none(),
        detail: detail.unwrap_or_else(|| store.describe()),
        revision: snapshot.revision,
    }
}

/// The coordinators that have registered; this one alone where nobody registers.
pub(super) fn coordinators(snapshot: &Snapshot, own: &str, generation: u64) -> Vec<Coordinator> {
    let leader = leader(snapshot);
    let mut found: Vec<Coordinator> = snapshot
        .entries
        .iter()
        .filter_map(|(key, entry)| Some((id_in(COORDINATORS, key)?, entry)))
        .map(|(id, entry)| {
            let record = serde_json::from_str::<CoordinatorRecord>(&entry.value);
            let (endpoint, admin_endpoint, in_force) = record
                .map(|record| (record.address, record.admin_address, record.in_force))
                .unwrap_or_default();
            let (id, leads) = (shown(id), leader == id);
            Coordinator { id, endpoint, admin_endpoint, leads, generation: in_force }
        })
        .collect();
    if found.is_empty() {
        let (id, leads) = (own.to_owned(), leader == own);
        found.push(Coordinator { id, leads, generation, ..Coordinator::default() });
    }
    found
}

/// The highest generation that any coordinator follows.
pub(super) fn followed(snapshot: &Snapshot) -> u64 {
    let entries = snapshot.entries.iter().filter(|(key, _)| key.starts_with(COORDINATORS));
    let records = entries.filter_map(|(_, entry)| serde_json::from_str(&entry.value).ok());
    records.map(|record: CoordinatorRecord| record.follows).max().unwrap_or(0)
}

/// Experts that each worker holds first, and as a copy.
pub(super) fn shares(record: Option<&PlacementRecord>) -> BTreeMap<&str, (u64, u64)> {
    let mut shares = BTreeMap::<&str, (u64, u64)>::new();
    let Some(record) = record else { return shares };
    for copies in record.layers.iter().flat_map(|layer| &layer.copies) {
        for (place, &worker) in copies.iter().enumerate() {
            let Some(id) = record.workers.get(usize::from(worker)) else { continue };
            let share = shares.entry(id).or_default();
            if place == 0 { share.0 += 1 } else { share.1 += 1 }
        }
    }
    shares
}

pub(super) fn worker(known: KnownWorker, share: (u64, u64), stats: Option<&WorkerStats>) -> Worker {
    let millis = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    Worker {
        id: known.id.unwrap_or_default(),
        endpoint: known.address,
        host: known.host,
        state: known.state.to_owned(),
        detail: known.detail,
        draining: known.draining,
        primary_experts: share.0,
        copy_experts: share.1,
        loaded_experts: known.loaded_experts,
        loaded_bytes: known.loaded_bytes,
        ram_budget_bytes: known.ram_budget_bytes,
        weight: known.weight,
        expert_rows: stats.map_or(0, |stats| stats.expert_rows),
        compute_ms: stats.map_or(0.0, |stats| millis(stats.compute)),
        wait_ms: stats.map_or(0.0, |stats| millis(stats.wait)),
        p99_ms: millis(known.p99),
    }
}

pub(super) fn faults(counts: &dispatch::FaultCounts, losses: u64) -> FaultCounts {
    FaultCounts {
        losses,
        resent_parts: counts.resent,
        hedged_parts: counts.hedged,
        hedges_won: counts.hedges_won,
        adopted_experts: counts.adopted,
        own_copies: counts.own_copies,
        audits: counts.audits,
        audit_mismatches: counts.mismatches,
        quarantines: counts.quarantines,
        dropped_replies: counts.dropped,
    }
}

/// How often experts were used, over all coordinators.
pub(super) fn heat(snapshot: &Snapshot) -> HeatMap {
    let mut heat = HeatMap::default();
    for (_, entry) in snapshot.entries.iter().filter(|(key, _)| key.starts_with(HEAT)) {
        if let Ok(record) = serde_json::from_str::<HeatRecord>(&entry.value) {
            heat.add(&record);
        }
    }
    heat
}

pub(super) fn layer(record: &LayerRecord, heat: &HeatMap) -> PlacedLayer {
    let place = |(expert, copies): (u32, &Vec<u16>)| PlacedExpert {
        copies: copies.iter().map(|&worker| u32::from(worker)).collect(),
        heat: heat.of(record.layer, expert),
    };
    PlacedLayer { layer: record.layer, experts: (0..).zip(&record.copies).map(place).collect() }
}
