//! Reading what a claim pins.

use std::sync::{
    Arc,
    atomic::Ordering::Relaxed,
    mpsc::{self, Receiver, Sender},
};

use crate::{
    io::{ReadDone, ReadError, ReadJob, ReadSink, SlabReader},
    memory::SlotMemory,
    residency::{Demand, Load, Ticket},
    store::{
        LoadProgress, StoreError,
        layer::{Layer, LayerState},
        tiered::Shared,
    },
    tier_counters::TierCounters,
};

/// Reads of a claim that are under way.
pub(super) struct Loads<'a> {
    shared: &'a Shared,
    ended: Sender<Ended>,
    ends: Receiver<Ended>,
    reader: Option<Arc<dyn SlabReader>>,
    under_way: usize,
}

/// The end of one read: whose it was, and the bytes to tell.
type Ended = Result<u64, (u32, u32, ReadError)>;

impl<'a> Loads<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        let (ended, ends) = mpsc::channel();
        Self { shared, ended, ends, reader: None, under_way: 0 }
    }

    /// Pins an expert; if it is not there, its read is begun. Nothing happens if no slot is left to pin it in: others may
    /// have taken some since the plan was made.
    pub(super) fn pin(
        &mut self,
        layer: &Arc<Layer>,
        expert: u32,
        told: bool,
        progress: &dyn LoadProgress,
    ) -> Result<(), StoreError> {
        /// Enough for every backend to have work while the ends are told.
        const UNDER_WAY_MAX: usize = 64;
        if progress.cancelled() {
            return self.stop(StoreError::Cancelled);
        }
        while self.under_way >= UNDER_WAY_MAX {
            self.hear(progress)?;
        }
        let told = if told { layer.bytes(1) } else { 0 };
        let Some(job) = self.reserve(layer, expert) else {
            if told > 0 {
                progress.loaded(told);
            }
            return Ok(());
        };
        let reader = match &self.reader {
            Some(reader) => Arc::clone(reader),
            None => match self.shared.reader() {
                Ok(reader) => Arc::clone(self.reader.insert(reader)),
                Err(error) => {
                    let mut state = layer.lock();
                    state.slots.fail(Ticket::from_bits(job.token), job.memory);
                    layer.changed(state);
                    return self.stop(error);
                }
            },
        };
        self.under_way += 1;
        let counters = Arc::clone(&self.shared.counters);
        counters.read_begins();
        let sink: Arc<dyn ReadSink> = Arc::new(PinSink {
            layer: Arc::clone(layer),
            counters,
            told,
            ended: self.ended.clone(),
        });
        reader.submit(vec![job], &sink);
        Ok(())
    }

    /// Pins the expert if it is there, else gives the read that brings it; neither if it is not to be pinned. Reads and works of others end, so that the wait
    /// for a slot does, too.
    fn reserve(&self, layer: &Arc<Layer>, expert: u32) -> Option<ReadJob> {
        let mut state = layer.lock();
        loop {
            let lazy = state.is_lazy(expert) && !state.slots.is_resident(expert);
            if lazy || state.slots.is_pinned(expert) || !state.slots.may_pin() {
                return None;
            }
            if state.slots.set_pinned(expert, true) {
                return None;
            }
            if let Some(load) = place(&mut state, expert) {
                let evicted = u64::from(load.evicted.is_some());
                self.shared.counters.evictions_claim.fetch_add(evicted, Relaxed);
                let token = load.ticket.to_bits();
                return Some(ReadJob { layer: layer.layer, expert, memory: load.memory, token });
            }
            state = layer.wait(state);
        }
    }

    /// Waits for the end of one read.
    fn hear(&mut self, progress: &dyn LoadProgress) -> Result<(), StoreError> {
        let ended = self.ends.recv().expect("the loads keep a sender themselves");
        self.under_way -= 1;
        match ended {
            Ok(0) => Ok(()),
            Ok(bytes) => {
                progress.loaded(bytes);
                Ok(())
            }
            Err((layer, expert, error)) => {
                self.stop(StoreError::Read { layer, expert, source: Box::new(error) })
            }
        }
    }

    pub(super) fn finish(&mut self, progress: &dyn LoadProgress) -> Result<(), StoreError> {
        while self.under_way > 0 {
            if progress.cancelled() {
                return self.stop(StoreError::Cancelled);
            }
            self.hear(progress)?;
        }
        Ok(())
    }

    /// Waits for what is under way, so that nothing of a failed claim goes on after it.
    fn stop(&mut self, error: StoreError) -> Result<(), StoreError> {
        while self.under_way > 0 {
            drop(self.ends.recv().expect("the loads keep a sender themselves"));
            self.under_way -= 1;
        }
        Err(error)
    }
}

/// Room for an expert that is to be pinned: what nobody claims goes first, then what the cache can best do without.
fn place(state: &mut LayerState, expert: u32) -> Option<Load<SlotMemory>> {
    if state.slots.loading(expert).is_some() {
        return None;
    }
    state.slots.place(expert).or_else(|| match state.slots.demand(expert) {
        Demand::Load(load) => Some(load),
        Demand::Full | Demand::Loading(_) => None,
        Demand::Hit(_) => unreachable!("the caller has looked"),
    })
}

/// Where the read of one pinned expert ends.
struct PinSink {
    layer: Arc<Layer>,
    counters: Arc<TierCounters>,
    told: u64,
    ended: Sender<Ended>,
}

impl ReadSink for PinSink {
    fn done(&self, done: ReadDone) {
        let ReadDone { job, outcome } = done;
        self.counters.read_ended(outcome.as_ref().ok());
        let ticket = Ticket::from_bits(job.token);
        let mut state = self.layer.lock();
        let ended = match outcome {
            Ok(_) => {
                let (expert, _) = state.slots.complete(ticket, job.memory);
                if state.slots.may_pin() {
                    state.slots.set_pinned(expert, true);
                }
                Ok(self.told)
            }
            Err(error) => {
                state.slots.fail(ticket, job.memory);
                Err((job.layer, job.expert, error))
            }
        };
        self.layer.changed(state);
        // The claim waits for every end.
        drop(self.ended.send(ended));
    }
}
