//! The in-process transport: work is computed where it is sent, on the threads of whoever sends it.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use shimmer_coordinator::{
    api::ClusterStatus,
    dispatch::{ExpertTransport, PartLimits, Reply, Standing, TransportError, WorkerInfo},
    placement::{Placement, PlacementError},
};
use shimmer_kernels::Kernels;
use shimmer_model::Container;
use shimmer_proto::{
    checksum,
    expert::v1::{Assign, CoordinatorHello, ExpertWork, LayerExperts, PrefetchHint, WorkerError},
    limits::{self, MAX_PART_ROWS, PART_BYTES},
    v1::WorkerStatus,
};
use shimmer_worker::{
    ExpertCore, ExpertSession, TierOptions, WorkerConfig,
    guard::{MemoryGuard, SystemProbe},
    placement::PlanError,
    store::LoadProgress,
};

use super::plan::{PlannedWorker, ProcessPlan};
use crate::commands::BUILD;

/// One coordinator and one placement for the life of the process.
const EPOCH: u64 = 1;
const GENERATION: u64 = 1;

/// Why in-process workers could not start.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    #[error(transparent)]
    Worker(#[from] shimmer_worker::Error),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Placement(#[from] PlacementError),
    #[error("{}", .0.detail)]
    Refused(Box<WorkerError>),
    #[error("cannot read the manifest's self-test")]
    Manifest(#[from] shimmer_model::Error),
    #[error(
        "worker {worker} computes expert {expert} of layer {layer} differently from the machine that made the container"
    )]
    SelfTest { worker: String, layer: u32, expert: u32 },
}

impl From<WorkerError> for LocalError {
    fn from(error: WorkerError) -> Self {
        Self::Refused(Box::new(error))
    }
}

/// Workers of this process. They take the same messages and compute by the same function as those behind sockets.
#[derive(Debug)]
pub struct LocalTransport {
    workers: Vec<WorkerInfo>,
    sessions: Vec<ExpertSession>,
    placement: Placement,
    status: ClusterStatus,
    replies: VecDeque<Reply>,
}

/// Nobody watches the load.
struct Unwatched;

impl LoadProgress for Unwatched {
    fn loaded(&self, _bytes: u64) {}
}

impl LocalTransport {
    /// Starts the planned workers; they share `threads` threads.
    ///
    /// # Errors
    /// An expert cannot be read, or is computed differently from the manifest.
    pub fn start(
        container: &Arc<Container>,
        kernels: Kernels,
        plan: ProcessPlan,
        tiers: &TierOptions,
        threads: usize,
    ) -> Result<Self, LocalError> {
        let ProcessPlan { workers, placement, budget } = plan;
        let guard = Arc::new(MemoryGuard::new(&budget, Box::new(SystemProbe)));
        let mut pool = None;
        let mut sessions = Vec::with_capacity(workers.len());
        for PlannedWorker { id, weight, budget, .. } in workers {
            let config = WorkerConfig {
                id,
                host: String::new(),
                coordinators: 1,
                weight,
                tiers: tiers.clone(),
                threads,
                pool: pool.clone(),
                build: BUILD.to_owned(),
            };
            let core = ExpertCore::with_budget(
                Arc::clone(container),
                kernels,
                config,
                budget,
                Arc::clone(&guard),
            )?;
            pool = Some(Arc::clone(core.pool()));
            sessions.push(core.session());
        }
        let mut statuses = Vec::with_capacity(sessions.len());
        for (index, session) in sessions.iter_mut().enumerate() {
            statuses.push(start_session(container, session, &placement, index)?);
        }
        Ok(Self {
            workers: statuses
                .iter()
                .map(|status| WorkerInfo { id: status.worker_id.clone() })
                .collect(),
            sessions,
            placement,
            status: ClusterStatus { workers: statuses, complete: true },
            replies: VecDeque::new(),
        })
    }

    /// The workers, for their counters.
    pub fn cores(&self) -> Vec<Arc<ExpertCore>> {
        self.sessions.iter().map(|session| Arc::clone(session.core())).collect()
    }

    /// What `GetModel` says about the workers; it does not change.
    pub fn status(&self) -> ClusterStatus {
        self.status.clone()
    }
}

/// The same handshake as over a socket: hello, assignment, self-test.
fn start_session(
    container: &Container,
    session: &mut ExpertSession,
    placement: &Placement,
    index: usize,
) -> Result<WorkerStatus, LocalError> {
    let core = Arc::clone(session.core());
    session.greet(&CoordinatorHello {
        identity: Some(core.identity()),
        limits: Some(limits::announced()),
        coordinator_id: "in-process".to_owned(),
    })?;
    let owned = placement.owned_by(index);
    let layers = owned
        .iter()
        .map(|(layer, experts)| LayerExperts { layer: *layer, experts: experts.clone() });
    let assign = Assign { epoch: EPOCH, generation: GENERATION, layers: layers.collect() };
    let ready = session.assign(&assign, &Unwatched)?;
    if let Some((layer, expert)) =
        owned.first().and_then(|(layer, experts)| Some((*layer, *experts.first()?)))
    {
        let found = session.self_test(layer, expert)?;
        if hex::encode(&found.digest) != container.expert_entry(layer, expert)?.self_test {
            return Err(LocalError::SelfTest { worker: core.id().to_owned(), layer, expert });
        }
    }
    Ok(WorkerStatus {
        worker_id: core.id().to_owned(),
        endpoint: "in-process".to_owned(),
        state: "serving".to_owned(),
        experts: ready.experts,
        bytes: ready.bytes,
        detail: String::new(),
    })
}

impl ExpertTransport for LocalTransport {
    fn workers(&self) -> &[WorkerInfo] {
        &self.workers
    }

    fn copies(&self, layer: u32, expert: u32) -> &[usize] {
        self.placement.copies(layer, expert)
    }

    fn standing(&self, _worker: usize) -> Standing {
        Standing::Serving
    }

    fn fence_base(&self) -> (u64, u64) {
        (EPOCH, GENERATION)
    }

    fn limits(&self, _worker: usize) -> PartLimits {
        PartLimits { max_rows: MAX_PART_ROWS as usize, max_bytes: PART_BYTES }
    }

    fn send(&mut self, worker: usize, mut work: ExpertWork) -> Result<(), TransportError> {
        checksum::seal_work(&mut work);
        let session = self.sessions.get_mut(worker).ok_or(TransportError::Closed)?;
        let outcome = session.work(&work);
        self.replies.push_back(Reply { worker, outcome });
        Ok(())
    }

    fn wants_hints(&self, worker: usize) -> bool {
        self.sessions[worker].core().wants_hints()
    }

    fn hint(&mut self, worker: usize, mut hint: PrefetchHint) {
        checksum::seal_hint(&mut hint);
        self.sessions[worker].hint(&hint);
    }

    fn receive(&mut self, _deadline: Instant) -> Result<Reply, TransportError> {
        self.replies.pop_front().ok_or(TransportError::Timeout)
    }

    /// Nothing is ever outstanding here.
    fn give_up(&mut self, _worker: usize, _reason: &str) {}
}
