//! What must hold for the cluster as a whole, whoever wrote what and when.

use std::collections::BTreeMap;

use shimmer_proto::membership::{
    Entry, Snapshot,
    records::{LEADER, PLACEMENT, PlacementRecord},
};

/// Remembers every placement that was ever written.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    placements: BTreeMap<u64, Entry>,
}

impl Oracle {
    /// The store changed from one state to another by one write: a placement was written by who led then, it is the next
    /// one, and no generation has two sets of owners.
    pub(super) fn check(&mut self, before: &Snapshot, after: &Snapshot) -> Result<(), String> {
        let Some(entry) = after.entries.get(PLACEMENT) else { return Ok(()) };
        if before.entries.get(PLACEMENT) == Some(entry) {
            return Ok(());
        }
        let record: PlacementRecord = serde_json::from_str(&entry.value)
            .map_err(|error| format!("a placement that nobody can read: {error}"))?;
        let generation = record.generation;
        let leader = before.entries.get(LEADER).map(|entry| (&entry.value, entry.revision));
        if leader != Some((&record.leader, record.leader_revision)) {
            return Err(format!(
                "generation {generation} was written by {} of revision {}, but {leader:?} led",
                record.leader, record.leader_revision
            ));
        }
        let last = self.placements.keys().next_back().copied().unwrap_or(0);
        if generation != last + 1 {
            return Err(format!("generation {generation} was written after {last}"));
        }
        self.placements.insert(generation, entry.clone());
        Ok(())
    }

    /// A coordinator serves by a generation: it must be one that was written.
    pub(super) fn serves(&self, record: &PlacementRecord) -> Result<(), String> {
        let written = self.placements.get(&record.generation).map(|entry| entry.value.as_str());
        let served = serde_json::to_string(record).expect("a record is plain data");
        if written == Some(served.as_str()) {
            return Ok(());
        }
        Err(format!("generation {} is served with owners that nobody wrote", record.generation))
    }

    /// Placements so far.
    pub(super) fn generations(&self) -> usize {
        self.placements.len()
    }
}
