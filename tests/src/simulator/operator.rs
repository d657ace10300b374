//! What operators do while the cluster runs: they drain workers, some of them to stop them, level the load, and readmit who
//! was quarantined.

use shimmer_proto::membership::{
    Write,
    records::{COORDINATORS, CoordinatorRecord, DRAINS, HeatRecord, PLACEMENT, PlacementRecord},
};

use super::{
    EXPERTS, LAYERS, Mutation,
    faults::Fault,
    world::{STORE_TICK, TTL, World},
};

impl World {
    /// By whoever reaches the store. An operator whose command fails tries again; here nothing happens.
    pub(super) fn drain(&mut self, worker: usize, drains: bool) {
        let key = format!("{DRAINS}w{worker}");
        let write =
            if drains { Write::Put { key, value: String::new() } } else { Write::Delete { key } };
        let result = self.operator.write_now(&[], vec![write]);
        self.note(|| format!("drain of w{worker}: {drains}, {result:?}"));
    }

    /// Workers whose operator waits until they are drained are stopped once they are.
    pub(super) fn stop_drained(&mut self) -> Result<(), String> {
        // What a backup brought back of runs that have ended since lasts as long as their leases.
        if self.restored.is_some_and(|at| self.now <= at + TTL + STORE_TICK) {
            return Ok(());
        }
        for worker in self.waited.clone() {
            let Some(by) = self.drained(worker) else { continue };
            self.waited.remove(&worker);
            self.tally.count("workers stopped after a drain", 1);
            let counts =
                |id: &String| self.coordinators.iter().any(|c| c.id == *id && c.counts_on(worker));
            if let Some(id) = by.iter().find(|id| counts(id)) {
                return Err(format!("w{worker} is told to be drained, but {id} counts on it"));
            }
            self.begin(Fault::Crash { worker })?;
        }
        Ok(())
    }

    /// The coordinators by whose word a worker is drained, if it is: all that are known work by the placement in the store,
    /// and that does not name it.
    fn drained(&self, worker: usize) -> Option<Vec<String>> {
        let snapshot = self.cluster.snapshot();
        let placement = snapshot.entries.get(PLACEMENT)?;
        let placement: PlacementRecord = serde_json::from_str(&placement.value).ok()?;
        if placement.workers.contains(&self.workers[worker].id) {
            return None;
        }
        let mut by = Vec::new();
        for (key, entry) in &snapshot.entries {
            let Some(id) = key.strip_prefix(COORDINATORS) else { continue };
            let record: CoordinatorRecord = serde_json::from_str(&entry.value).ok()?;
            let works_by_it =
                record.in_force == placement.generation && record.follows <= placement.generation;
            // The planted bug: what one of them says is enough.
            if !works_by_it && self.mutation != Some(Mutation::DrainAskedOfOne) {
                return None;
            }
            by.push((id.to_owned(), works_by_it));
        }
        let one = by.iter().any(|(_, works_by_it)| *works_by_it);
        one.then(|| by.into_iter().map(|(id, _)| id).collect())
    }

    /// Asks one coordinator after the other to level the load; whoever leads does.
    pub(super) fn rebalance(&mut self) -> Result<(), String> {
        for coordinator in 0..self.coordinators.len() {
            let mut layer = |layer: u32| {
                let rows = (0..EXPERTS).map(|_| self.dice.below(1000));
                let rows = rows.map(|rows| f32::from(u16::try_from(rows).expect("below 1000")));
                (layer, rows.collect())
            };
            let heat = HeatRecord { layers: (0..LAYERS).map(&mut layer).collect() };
            let of = &mut self.coordinators[coordinator];
            if of.rebalance(&self.cluster, &mut self.oracle, heat)? {
                self.tally.count("rebalances made", 1);
                self.note(|| format!("c{coordinator} levels the load"));
            }
        }
        Ok(())
    }

    /// A worker with other memory is started instead, and an operator says that it may serve again.
    pub(super) fn readmit(&mut self, worker: usize) -> Result<(), String> {
        if !std::mem::take(&mut self.workers[worker].lies) {
            return Ok(());
        }
        self.begin(Fault::Crash { worker })?;
        for coordinator in &mut self.coordinators {
            coordinator.transport.quarantined.remove(&worker);
            coordinator.liar = None;
        }
        Ok(())
    }
}
