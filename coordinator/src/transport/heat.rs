//! Counts for the cluster how often experts are used.

use std::time::{Duration, Instant};

use shimmer_proto::{expert::v1::ExpertWork, membership::records::HeatRecord};
use tokio::sync::watch;

use super::ClusterModel;
use crate::heat::HeatCounter;

/// What was used so long ago counts half. Placements follow heat in minutes at the earliest.
const HALF_LIFE: Duration = Duration::from_secs(600);
/// How often others are told: a record of a large model has a hundred kilobytes.
const EVERY: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct HeatKeeper {
    counter: HeatCounter,
    told: Instant,
    /// Whether anything was counted since.
    fresh: bool,
    out: watch::Sender<HeatRecord>,
}

impl HeatKeeper {
    pub(super) fn new(model: &ClusterModel, out: watch::Sender<HeatRecord>, now: Instant) -> Self {
        let experts = |of: &super::ClusterLayer| {
            (of.layer, u32::try_from(of.self_tests.len()).unwrap_or(u32::MAX))
        };
        let experts: Vec<(u32, u32)> = model.layers.iter().map(experts).collect();
        let counter = HeatCounter::new(&experts, HALF_LIFE.as_secs_f64());
        Self { counter, told: now, fresh: false, out }
    }

    /// Counts the rows of a message.
    pub(super) fn count(&mut self, layer: u32, work: &ExpertWork) {
        for (&expert, &rows) in work.experts.iter().zip(&work.item_rows) {
            self.counter.count_rows(layer, expert, rows);
        }
        self.fresh = true;
    }

    /// Tells others now and then.
    pub(super) fn publish(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.told);
        if elapsed < EVERY || !self.fresh {
            return;
        }
        self.counter.fold(elapsed.as_secs_f64());
        (self.told, self.fresh) = (now, false);
        self.out.send_replace(self.counter.record());
    }
}

#[cfg(test)]
mod tests {
    use shimmer_proto::expert::v1::Identity;

    use super::*;
    use crate::transport::ClusterLayer;

    fn keeper() -> (HeatKeeper, watch::Receiver<HeatRecord>) {
        let layer = ClusterLayer { layer: 2, slab_bytes: 1, self_tests: vec![[0; 16]; 4] };
        let layers = vec![layer];
        let model = ClusterModel { identity: Identity::default(), row_bytes: 1, hidden: 1, layers };
        let (out, told) = watch::channel(HeatRecord { layers: Vec::new() });
        (HeatKeeper::new(&model, out, Instant::now()), told)
    }

    fn work(experts: &[u32], rows: &[u32]) -> ExpertWork {
        let (experts, item_rows) = (experts.to_vec(), rows.to_vec());
        ExpertWork { experts, item_rows, ..ExpertWork::default() }
    }

    #[test]
    fn others_are_told_now_and_then_and_only_what_is_new() {
        let (mut keeper, mut told) = keeper();
        let start = keeper.told;
        keeper.publish(start + EVERY);
        assert!(!told.has_changed().unwrap(), "nothing was counted");
        keeper.count(2, &work(&[0, 3], &[5, 1]));
        keeper.count(2, &work(&[3], &[2]));
        keeper.publish(start + EVERY - Duration::from_millis(1));
        assert!(!told.has_changed().unwrap(), "it is too early");
        keeper.publish(start + EVERY);
        assert_eq!(told.borrow_and_update().layers, [(2, vec![5.0, 0.0, 0.0, 3.0])]);
        keeper.publish(start + EVERY * 2);
        assert!(!told.has_changed().unwrap(), "nothing was counted since");
    }

    #[test]
    fn what_was_used_a_half_life_ago_counts_half() {
        let (mut keeper, told) = keeper();
        let start = keeper.told;
        keeper.count(2, &work(&[1], &[8]));
        keeper.publish(start + EVERY);
        keeper.count(2, &work(&[2], &[1]));
        keeper.publish(start + EVERY + HALF_LIFE);
        assert_eq!(told.borrow().layers, [(2, vec![0.0, 4.0, 1.0, 0.0])]);
    }
}
