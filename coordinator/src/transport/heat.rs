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
