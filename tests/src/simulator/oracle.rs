//! What must hold for the cluster as a whole, whoever wrote what and when.

use std::collections::BTreeMap;

use shimmer_proto::membership::{
    Entry, Snapshot,
    records::{LEADER, PLACEMENT, PlacementRecord},
};

/// Remembers every placement that was ever written.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// By generation. A store that lost its data may give a number again that nobody follows.
    placements: BTreeMap<u64, Vec<Entry>>,
    written: u64,
    /// The store lost its data, and no placement above all earlier ones was written since.
    forgot: bool,
}

impl Oracle {
    /// The store changed from one state to another by one write: a placement was written by who led then, it is the next
    /// one, and no generation has two sets of owners.
    pub(super) fn check(&mut self, before: &Snapshot, after: &Snapshot) -> Result<(), String> {
        let Some(entry) = after.entries.get(PLACEMENT) else { return Ok(()) };
        if before.entries.get(PLACEMENT) == Some(entry) {
            return Ok(());
        }
        let record = read(&entry.value)?;
        let generation = record.generation;
        let leader = before.entries.get(LEADER).map(|entry| (&entry.value, entry.revision));
        if leader != Some((&record.leader, record.leader_revision)) {
            return Err(format!(
                "generation {generation} was written by {} of revision {}, but {leader:?} led",
                record.leader, record.leader_revision
            ));
        }
        let newest = self.placements.keys().next_back().copied().unwrap_or(0);
        let stood = before.entries.get(PLACEMENT).map(|entry| read(&entry.value)).transpose()?;
        let stood = stood.map_or(0, |record| record.generation);
        let is_next = if self.forgot { generation > stood } else { generation == newest + 1 };
        if !is_next {
            return Err(format!("generation {generation} was written after {stood} and {newest}"));
        }
        self.forgot &= generation <= newest;
        self.placements.entry(generation).or_default().push(entry.clone());
        self.written += 1;
        Ok(())
    }

    /// The store lost its data, or is what it was some time ago.
    pub(super) fn store_lost(&mut self) {
        self.forgot = true;
    }

    /// A coordinator serves by a generation: it must be one that was written.
    pub(super) fn serves(&self, record: &PlacementRecord) -> Result<(), String> {
        let served = serde_json::to_string(record).expect("a record is plain data");
        let mut written = self.placements.get(&record.generation).into_iter().flatten();
        if written.any(|entry| entry.value == served) {
            return Ok(());
        }
        Err(format!("generation {} is served with owners that nobody wrote", record.generation))
    }

    /// Placements so far.
    pub(super) fn written(&self) -> u64 {
        self.written
    }
}

fn read(value: &str) -> Result<PlacementRecord, String> {
    serde_json::from_str(value)
        .map_err(|error| format!("a placement that nobody can read: {error}"))
}
