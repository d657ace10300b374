//! What a pilot does with a hint.

use std::sync::atomic::Ordering::Relaxed;

use super::tiered::Shared;
use crate::{
    io::{ReadDone, ReadJob},
    prefetch::Hint,
    residency::{Skip, Ticket},
};

impl Shared {
    /// Reads the expert into the cache on this thread, unless it is too late or not worth it.
    pub(super) fn follow(&self, hint: Hint) {
        let Hint { layer, expert, time } = hint;
        let Some(layer) = self.layer(layer) else { return };
        let counters = &self.counters;
        let mut state = layer.lock();
        let skipped = if state.slots.time() != time || !state.slots.is_claimed(expert) {
            Err(Skip::LayerStarted)
        } else {
            state.slots.prefetch(expert)
        };
        let load = match skipped {
            Ok(load) => load,
            Err(skip) => return self.skipped(skip),
        };
        drop(state);
        counters.prefetch_issued.fetch_add(1, Relaxed);
        counters.evictions_prefetch.fetch_add(u64::from(load.evicted.is_some()), Relaxed);
        let token = load.ticket.to_bits();
        let job = ReadJob { layer: layer.layer, expert, memory: load.memory, token };
        counters.read_begins();
        let ReadDone { job, outcome } = self.read_here(job);
        counters.read_ended(outcome.as_ref().ok());
        let ticket = Ticket::from_bits(job.token);
        let mut state = layer.lock();
        match outcome {
            Ok(_) => drop(state.slots.complete(ticket, job.memory)),
            Err(error) => {
                state.slots.fail(ticket, job.memory);
                counters.prefetch_dropped_failed.fetch_add(1, Relaxed);
                tracing::warn!(layer = layer.layer, expert, %error, "reading an expert ahead");
            }
        }
        layer.changed(state);
    }

    /// Counts a hint that is not followed.
    pub(super) fn skipped(&self, skip: Skip) {
        let counters = &self.counters;
        let counter = match skip {
            Skip::Duplicate => &counters.prefetch_dropped_duplicate,
            Skip::LayerStarted => &counters.prefetch_dropped_started,
            Skip::Guard => &counters.prefetch_dropped_guard,
            Skip::NoRoom => &counters.prefetch_dropped_no_room,
        };
        counter.fetch_add(1, Relaxed);
    }
}
