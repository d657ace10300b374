//! The exchange's end of a model coordinator: who can be asked, and what is to be sent.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_coordinator::{
    dispatch::{ExpertTransport, Pace, PartLimits, Reply, Standing, TransportError, WorkerInfo},
    fence::Ledger,
    placement::Placement,
};
use shimmer_proto::expert::v1::ExpertWork;
use shimmer_worker::generations::Stamp;

use super::{
    Mutation,
    worker::{ModelWorker, Order, Owned},
};

/// Collects what the exchange wants; the world carries it out.
#[derive(Debug)]
pub(super) struct ModelTransport {
    infos: Vec<WorkerInfo>,
    /// Most rows that each worker takes in one message.
    max_rows: Vec<usize>,
    pub(super) standings: Vec<Standing>,
    pub(super) paces: Vec<Pace>,
    pub(super) placement: Arc<Placement>,
    pub(super) stamp: Stamp,
    pub(super) now: Instant,
    pub(super) ledger: Ledger,
    adopted: Vec<Owned>,
    pub(super) outbox: Vec<(usize, Order)>,
    pub(super) suspected: Vec<usize>,
    pub(super) given_up: Vec<usize>,
    /// Workers that computed something else, until they are readmitted.
    pub(super) quarantined: BTreeSet<usize>,
    /// A planted bug.
    mutation: Option<Mutation>,
}

impl ModelTransport {
    pub(super) fn new(
        workers: &[ModelWorker],
        epoch: u64,
        mutation: Option<Mutation>,
        now: Instant,
    ) -> Self {
        let count = workers.len();
        Self {
            infos: workers.iter().map(|worker| WorkerInfo { id: worker.id.clone() }).collect(),
            max_rows: workers.iter().map(|worker| worker.max_rows).collect(),
            standings: vec![Standing::Away; count],
            paces: vec![Pace::Usual; count],
            placement: Arc::default(),
            stamp: Stamp::new(epoch, 0),
            now,
            ledger: Ledger::new(),
            adopted: vec![Owned::new(); count],
            outbox: Vec::new(),
            suspected: Vec::new(),
            given_up: Vec::new(),
            quarantined: BTreeSet::new(),
            mutation,
        }
    }

    /// Another generation comes into force.
    pub(super) fn flip(&mut self, generation: u64, placement: Arc<Placement>) {
        self.stamp.generation = generation;
        self.placement = placement;
        self.adopted.iter_mut().for_each(Owned::clear);
    }

    /// What a worker adopted went with its session.
    pub(super) fn forget(&mut self, worker: usize) {
        self.adopted[worker].clear();
        self.ledger.forget(worker);
    }
}

impl ExpertTransport for ModelTransport {
    fn workers(&self) -> &[WorkerInfo] {
        &self.infos
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn copies(&self, layer: u32, expert: u32) -> &[usize] {
        self.placement.copies(layer, expert)
    }

    fn standing(&self, worker: usize) -> Standing {
        self.standings[worker]
    }

    fn stand_ins(&self, _layer: u32) -> Vec<usize> {
        (0..self.infos.len()).filter(|&worker| self.standings[worker] != Standing::Away).collect()
    }

    fn adopt(
        &mut self,
        worker: usize,
        layer: u32,
        experts: &[u32],
    ) -> Result<usize, TransportError> {
        if self.standings[worker] == Standing::Away {
            return Err(TransportError::Lost { worker, detail: "it is away".to_owned() });
        }
        let fresh: Owned = experts
            .iter()
            .map(|&expert| (layer, expert))
            .filter(|place| !self.adopted[worker].contains(place))
            .collect();
        let adopted = fresh.len();
        if adopted > 0 {
            self.adopted[worker].extend(fresh.iter().copied());
            self.outbox.push((worker, Order::Adopt { stamp: self.stamp, owned: fresh }));
        }
        Ok(adopted)
    }

    fn usual(&self, _worker: usize, _rows: u32) -> Option<Duration> {
        Some(Duration::from_millis(60))
    }

    fn pace(&self, worker: usize) -> Pace {
        self.paces[worker]
    }

    fn suspect(&mut self, worker: usize) {
        if self.standings[worker] == Standing::Serving {
            self.standings[worker] = Standing::Suspect;
        }
        self.suspected.push(worker);
    }

    fn contest(&mut self, worker: usize, _layer: u32, _experts: &[u32]) {
        self.outbox.push((worker, Order::Prove));
    }

    fn quarantine(&mut self, worker: usize, reason: &str) {
        let accused = if self.mutation == Some(Mutation::OtherAccused) {
            (worker + 1) % self.infos.len()
        } else {
            worker
        };
        self.quarantined.insert(accused);
        self.give_up(accused, reason);
    }

    fn is_quarantined(&self, worker: usize) -> bool {
        self.quarantined.contains(&worker)
    }

    fn fence_base(&self) -> (u64, u64) {
        (self.stamp.epoch, self.stamp.generation)
    }

    fn limits(&self, worker: usize) -> PartLimits {
        // The planted bug: what one worker takes is believed of all.
        let of = if self.mutation == Some(Mutation::LimitOfAnother) { 0 } else { worker };
        PartLimits { max_rows: self.max_rows[of], max_bytes: 1 << 20 }
    }

    fn send(&mut self, worker: usize, work: ExpertWork) -> Result<(), TransportError> {
        let lost = |detail: String| TransportError::Lost { worker, detail };
        if self.standings[worker] == Standing::Away {
            return Err(lost("it is away".to_owned()));
        }
        self.ledger.expect(worker, work.fence.as_ref()).map_err(|error| lost(error.to_string()))?;
        self.outbox.push((worker, Order::Work(Box::new(work))));
        Ok(())
    }

    fn receive(&mut self, _deadline: Instant) -> Result<Reply, TransportError> {
        // The world drives the exchange by events.
        Err(TransportError::Closed)
    }

    fn give_up(&mut self, worker: usize, _reason: &str) {
        self.standings[worker] = Standing::Away;
        self.ledger.forget(worker);
        self.given_up.push(worker);
    }
}
