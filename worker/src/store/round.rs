//! HOT PATH: one work message against one layer.
//!
//! When a round opens, everything that is in memory is leased at once, so that its own reads evict none of it, and the
//! missing experts are read as far as there are slots. Each later call hands out what has come meanwhile and uses the
//! slots that became idle. What a read of this round brought is leased to it before anyone else sees it: rounds that share
//! a single slot therefore take turns instead of evicting each other's experts unseen.
//!
//! A round waits only while it holds no lease that it has not handed out, so that rounds never wait for each other in a
//! circle.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use super::{
    ReadyExpert, Round, StoreError,
    layer::{Layer, LayerState, SlotGrant},
    lease::Lease,
    tiered::{Shared, closed},
};
use crate::{
    io::{ReadDone, ReadError, ReadJob, ReadSink},
    residency::{Demand, Origin, Ticket},
    tier_counters::{ReadClass, TierCounters},
};

/// A round of the tiered store.
#[derive(Debug)]
pub(super) struct TieredRound<'a> {
    shared: &'a Shared,
    layer: &'a Arc<Layer>,
    experts: &'a [u32],
    number: u64,
    /// Leased when the round opened and not handed out yet.
    opened: Vec<ReadyExpert>,
    /// Places of experts that are not there and not being read for this round.
    wanted: Vec<usize>,
    /// Reads of this round that have not been handed out.
    reading: usize,
    /// Whether the round stands in the layer's queue.
    queued: bool,
    /// Where reads of this round end; a round that misses nothing has none.
    sink: Option<Arc<RoundSink>>,
}

impl<'a> TieredRound<'a> {
    /// Opens a round and begins its reads.
    pub(super) fn open(shared: &'a Shared, layer: &'a Arc<Layer>, experts: &'a [u32]) -> Self {
        let (mut round, mut state) = Self::begin(shared, layer, experts, layer.lock());
        if !round.wanted.is_empty() && shared.options.pipeline {
            let jobs = round.take(&mut state, usize::MAX);
            drop(state);
            round.submit(jobs);
        }
        round
    }

    /// Opens a round if all its experts are there.
    pub(super) fn open_ready(
        shared: &'a Shared,
        layer: &'a Arc<Layer>,
        experts: &'a [u32],
    ) -> Option<Self> {
        let state = layer.lock();
        if !experts.iter().all(|&expert| state.slots.is_resident(expert)) {
            return None;
        }
        Some(Self::begin(shared, layer, experts, state).0)
    }

    /// Counts the work and leases what is there.
    fn begin(
        shared: &'a Shared,
        layer: &'a Arc<Layer>,
        experts: &'a [u32],
        mut state: MutexGuard<'a, LayerState>,
    ) -> (Self, MutexGuard<'a, LayerState>) {
        let number = state.next_round();
        state.slots.begin_work(experts);
        let mut opened = Vec::with_capacity(experts.len());
        let mut missed = Vec::new();
        let (mut pinned, mut useful, mut late) = (0, 0, 0);
        for (item, &expert) in experts.iter().enumerate() {
            let warm = state.was_wanted(expert, number);
            if !state.slots.is_resident(expert) {
                late += u64::from(state.slots.loading(expert) == Some(Origin::Prefetch));
                missed.push(Missed { item, expert, warm });
                continue;
            }
            let Demand::Hit(grant) = state.slots.demand(expert) else {
                unreachable!("a resident expert is a hit")
            };
            pinned += u64::from(grant.pinned);
            useful += u64::from(grant.prefetched);
            opened.push(ReadyExpert { item, lease: Lease::new(layer, grant) });
        }
        let counters = &shared.counters;
        add(&counters.works, 1);
        add(&counters.hits_pinned, pinned);
        add(&counters.hits_cache, opened.len() as u64 - pinned);
        add(&counters.misses, missed.len() as u64);
        add(&counters.prefetch_useful, useful);
        add(&counters.prefetch_late, late);
        let wanted = missed.iter().map(|missed| missed.item).collect();
        let sink = (!missed.is_empty()).then(|| RoundSink::new(shared, layer, missed));
        let (reading, queued) = (0, false);
        (Self { shared, layer, experts, number, opened, wanted, reading, queued, sink }, state)
    }

    /// Reserves slots for up to `most` of the wanted experts and gives the reads; experts that somebody else has brought
    /// meanwhile go to `opened`.
    fn take(&mut self, state: &mut LayerState, most: usize) -> Vec<ReadJob> {
        let first = state.queue.front().is_none_or(|&first| first == self.number);
        let (mut jobs, mut full) = (Vec::new(), false);
        let Self { shared, layer, experts, opened, reading, .. } = self;
        self.wanted.retain(|&item| {
            let expert = experts[item];
            if state.slots.loading(expert).is_some() {
                return true;
            }
            if !state.slots.is_resident(expert) && (full || !first || jobs.len() == most) {
                full |= !first;
                return true;
            }
            match state.slots.demand(expert) {
                Demand::Hit(grant) => {
                    opened.push(ReadyExpert { item, lease: Lease::new(layer, grant) });
                }
                Demand::Load(load) => {
                    add(&shared.counters.evictions_demand, u64::from(load.evicted.is_some()));
                    *reading += 1;
                    let token = load.ticket.to_bits();
                    jobs.push(ReadJob { layer: layer.layer, expert, memory: load.memory, token });
                }
                Demand::Full | Demand::Loading(_) => {
                    full = true;
                    return true;
                }
            }
            false
        });
        self.queue(state, full);
        jobs
    }

    /// Stands in line, or leaves it for the next one.
    fn queue(&mut self, state: &mut LayerState, stand: bool) {
        match (self.queued, stand) {
            (false, true) => state.queue.push_back(self.number),
            (true, false) => {
                state.queue.retain(|&number| number != self.number);
                self.layer.wake(state);
            }
            _ => {}
        }
        self.queued = stand;
    }

    /// Hands reads to the reader; if there is none, they have failed.
    fn submit(&self, jobs: Vec<ReadJob>) {
        if jobs.is_empty() {
            return;
        }
        let sink = self.sink();
        jobs.iter().for_each(|job| sink.begins(job));
        match self.shared.reader() {
            Ok(reader) => {
                let sink: Arc<dyn ReadSink> = Arc::<RoundSink>::clone(sink);
                reader.submit(jobs, &sink);
            }
            Err(_reported) => jobs.into_iter().for_each(|job| sink.done(closed(job))),
        }
    }

    /// Reads on this thread.
    fn read(&self, job: ReadJob) {
        let sink = self.sink();
        sink.begins(&job);
        sink.done(self.shared.read_here(job));
    }

    fn sink(&self) -> &Arc<RoundSink> {
        self.sink.as_ref().expect("a round that misses experts has a sink")
    }

    /// What has come of this round's reads.
    fn collect(&mut self) -> Result<(), StoreError> {
        let Some(sink) = &self.sink else { return Ok(()) };
        let arrived = std::mem::take(&mut sink.lock().arrived);
        let mut failed = None;
        for (item, outcome) in arrived {
            self.reading -= 1;
            match outcome {
                Ok(grant) => {
                    self.opened.push(ReadyExpert { item, lease: Lease::new(self.layer, grant) });
                }
                Err(error) => {
                    failed.get_or_insert((item, error));
                }
            }
        }
        let Some((item, error)) = failed else { return Ok(()) };
        let (layer, expert) = (self.layer.layer, self.experts[item]);
        Err(StoreError::Read { layer, expert, source: Box::new(error) })
    }

    /// Waits until something can be handed out; everything missing is read as far as slots allow.
    fn advance(&mut self) -> Result<(), StoreError> {
        let mut state = self.layer.lock();
        loop {
            self.collect()?;
            let jobs = self.take(&mut state, usize::MAX);
            if !jobs.is_empty() {
                drop(state);
                self.submit(jobs);
                state = self.layer.lock();
                continue;
            }
            if !self.opened.is_empty() {
                return Ok(());
            }
            state = self.layer.wait(state);
        }
    }

    /// As [`Self::advance`], but one read after another on this thread, and nothing is handed out while one could be begun.
    fn advance_serially(&mut self) -> Result<(), StoreError> {
        let mut state = self.layer.lock();
        loop {
            if let Some(job) = self.take(&mut state, 1).pop() {
                drop(state);
                self.read(job);
                state = self.layer.lock();
                self.collect()?;
                continue;
            }
            if !self.opened.is_empty() {
                return Ok(());
            }
            state = self.layer.wait(state);
        }
    }
}

impl Round for TieredRound<'_> {
    fn next(&mut self, ready: &mut Vec<ReadyExpert>) -> Result<(), StoreError> {
        let pipeline = self.shared.options.pipeline;
        let missing = self.reading > 0 || !self.wanted.is_empty();
        if missing && (self.opened.is_empty() || !pipeline) {
            let begun = Instant::now();
            let outcome = if pipeline { self.advance() } else { self.advance_serially() };
            self.shared.counters.felt_wait(begun.elapsed());
            outcome?;
        }
        ready.append(&mut self.opened);
        Ok(())
    }

    fn missed(&self) -> usize {
        self.sink.as_ref().map_or(0, |sink| sink.missed.len())
    }
}

impl Drop for TieredRound<'_> {
    fn drop(&mut self) {
        self.opened.clear();
        let left = self.sink.as_ref().map(|sink| sink.close()).unwrap_or_default();
        let mut state = self.layer.lock();
        for grant in left {
            state.slots.release(grant);
        }
        self.queue(&mut state, false);
        state.slots.end_work();
        self.shared.after_work(&mut state);
        self.layer.changed(state);
        self.shared.watch();
    }
}

/// An expert that was not there when its round opened.
#[derive(Debug, Clone, Copy)]
struct Missed {
    item: usize,
    expert: u32,
    /// It was wanted a short while ago.
    warm: bool,
}

/// Where the reads of a round end.
#[derive(Debug)]
struct RoundSink {
    layer: Arc<Layer>,
    counters: Arc<TierCounters>,
    missed: Vec<Missed>,
    /// Locked after the layer, never before.
    state: Mutex<SinkState>,
}

#[derive(Debug, Default)]
struct SinkState {
    /// The round is over: what comes now stays in the cache.
    closed: bool,
    /// Items and what became of them, not handed out yet.
    arrived: Vec<(usize, Result<SlotGrant, ReadError>)>,
}

impl RoundSink {
    fn new(shared: &Shared, layer: &Arc<Layer>, missed: Vec<Missed>) -> Arc<Self> {
        let (layer, counters) = (Arc::clone(layer), Arc::clone(&shared.counters));
        Arc::new(Self { layer, counters, missed, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, SinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the hand-out and gives what was not handed out.
    fn close(&self) -> Vec<SlotGrant> {
        let mut state = self.lock();
        state.closed = true;
        state.arrived.drain(..).filter_map(|(_, outcome)| outcome.ok()).collect()
    }

    fn missed(&self, expert: u32) -> Missed {
        let missed = self.missed.iter().find(|missed| missed.expert == expert);
        *missed.expect("a round reads what it missed")
    }

    fn begins(&self, job: &ReadJob) {
        self.counters.read_begins();
        self.class(self.missed(job.expert)).begin(Instant::now());
    }

    fn class(&self, missed: Missed) -> &ReadClass {
        if missed.warm { &self.counters.demand_warm } else { &self.counters.demand_cold }
    }
}

impl ReadSink for RoundSink {
    fn done(&self, done: ReadDone) {
        let ReadDone { job, outcome } = done;
        let missed = self.missed(job.expert);
        let item = missed.item;
        let report = outcome.as_ref().ok();
        self.counters.read_ended(report);
        self.class(missed).end(Instant::now(), report);
        let ticket = Ticket::from_bits(job.token);
        let mut state = self.layer.lock();
        let mut sink = self.lock();
        match outcome {
            Ok(_) => {
                let (expert, _) = state.slots.complete(ticket, job.memory);
                if !sink.closed {
                    let Demand::Hit(grant) = state.slots.demand(expert) else {
                        unreachable!("what has just come is there")
                    };
                    sink.arrived.push((item, Ok(grant)));
                }
            }
            Err(error) => {
                tracing::warn!(layer = job.layer, expert = job.expert, %error, "reading an expert");
                state.slots.fail(ticket, job.memory);
                if !sink.closed {
                    sink.arrived.push((item, Err(error)));
                }
            }
        }
        drop(sink);
        self.layer.changed(state);
    }
}

fn add(counter: &AtomicU64, amount: u64) {
    if amount > 0 {
        counter.fetch_add(amount, Relaxed);
    }
}

#[cfg(test)]
mod tests;
