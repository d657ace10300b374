//! The admin service: checks an order, writes it down, and says what will follow.

use std::sync::Arc;

use shimmer_proto::{
    admin::v1::{
        DrainRequest, DrainResponse, GetPlacementRequest, GetPlacementResponse, GetStatusRequest,
        GetStatusResponse, Move, ReadmitRequest, ReadmitResponse, RebalanceRequest,
        RebalanceResponse, admin_service_server::AdminService,
    },
    identity::shown,
    membership::{
        Condition, Snapshot, StoreError, Write, Written,
        records::{DRAINS, PlacementRecord, QUARANTINES},
    },
    status as statuses,
};
use tonic::{Request, Response, Status};

use super::{ClusterControl, ControlError, KnownWorker, status};
use crate::{engine::EngineHandle, membership::leader::RebalanceError};

/// Longest name of a worker, as `--id` takes it.
const MAX_ID_BYTES: usize = 64;

/// What the service is made of.
#[derive(Debug)]
pub struct AdminParts {
    /// Name of the cluster; empty where there is only a list of workers.
    pub cluster: String,
    /// This coordinator.
    pub coordinator_id: String,
    /// Members and placement.
    pub control: Arc<dyn ClusterControl>,
    /// What was computed, and by whom.
    pub engine: EngineHandle,
}

/// The service. Clones share everything.
#[derive(Debug, Clone)]
pub struct Admin {
    parts: Arc<AdminParts>,
}

impl Admin {
    /// A service over a running coordinator.
    pub fn new(parts: AdminParts) -> Self {
        Self { parts: Arc::new(parts) }
    }

    fn snapshot(&self) -> Snapshot {
        self.parts.control.store().watch().borrow().clone()
    }

    /// The placement that stands in the store.
    fn placement(snapshot: &Snapshot) -> Result<Option<PlacementRecord>, Status> {
        status::placement(snapshot)
            .map_err(|error| statuses::failed_precondition("UNREADABLE_PLACEMENT", error))
    }

    /// Members, their states, the placement in force and who leads.
    pub fn status(&self) -> GetStatusResponse {
        let AdminParts { cluster, coordinator_id, control, engine } = &*self.parts;
        let snapshot = self.snapshot();
        let record = status::placement(&snapshot).ok().flatten();
        let shares = status::shares(record.as_ref());
        let stats = engine.stats();
        let worker = |(seat, known): (usize, KnownWorker)| {
            let share = known.id.as_deref().and_then(|id| shares.get(id)).copied();
            status::worker(known, share.unwrap_or_default(), stats.workers.get(seat))
        };
        let (generation, next) = control.generations();
        // A store that went back gets a placement above what is followed.
        let decided = record.as_ref().map_or(0, |record| record.generation);
        let decided = decided.max(status::followed(&snapshot));
        GetStatusResponse {
            cluster: cluster.clone(),
            coordinator_id: coordinator_id.clone(),
            leader: status::told_leader(&snapshot),
            store: Some(status::store(&*control.store(), &snapshot)),
            generation,
            // What has just been decided is about to be loaded.
            next_generation: (decided > generation).then_some(decided).or(next),
            workers: control.workers().into_iter().enumerate().map(worker).collect(),
            coordinators: status::coordinators(&snapshot, coordinator_id, generation),
            complete: control.is_complete(),
            faults: Some(status::faults(&stats.faults, control.losses())),
        }
    }

    /// The worker that an order is about: one that is there, that the placement names, or that an earlier order is about.
    fn worker(
        &self,
        id: &str,
        record: Option<&PlacementRecord>,
        snapshot: &Snapshot,
    ) -> Result<(), Status> {
        let usable = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if id.is_empty() || id.len() > MAX_ID_BYTES || !id.chars().all(usable) {
            let reason = format!("{:?} is no name of a worker", shown(id));
            return Err(statuses::invalid_argument("worker_id", reason));
        }
        let mut known: Vec<String> =
            self.parts.control.workers().into_iter().filter_map(|worker| worker.id).collect();
        known.extend(record.into_iter().flat_map(|record| record.workers.iter().cloned()));
        // Of one that has gone since, so that it can be undone.
        known.extend(status::ordered(snapshot));
        if known.iter().any(|known| known == id) {
            return Ok(());
        }
        known.sort();
        known.dedup();
        let names = if known.is_empty() { "nobody".to_owned() } else { known.join(", ") };
        Err(statuses::not_found("worker", id, format!("no worker is called {id}; known: {names}")))
    }

    /// Writes an order. `undone_by`: the command that takes it back.
    async fn write(
        &self,
        conditions: Vec<Condition>,
        write: Vec<Write>,
        undone_by: &str,
    ) -> Result<(), Status> {
        match self.parts.control.store().write(conditions, write).await {
            Ok(Written::Done(_)) => Ok(()),
            Ok(Written::Conflict) => Err(statuses::aborted(
                "PLACEMENT_CHANGED",
                "the placement changed meanwhile; nothing was written, ask again",
            )),
            Err(StoreError::Unsupported { detail }) => {
                Err(statuses::failed_precondition("STORE_UNSUPPORTED", detail))
            }
            Err(error) => {
                let message = status::uncertain(&error, undone_by);
                Err(statuses::unavailable("STORE_AWAY", message, None))
            }
        }
    }

    /// Why there is no rebalance, with the address of whoever can be asked.
    fn refuse_rebalance(&self, error: &ControlError) -> Status {
        let message = error.to_string();
        let error = match error {
            ControlError::Rebalance(error) => error,
            ControlError::Ending => return statuses::unavailable("SHUTTING_DOWN", message, None),
        };
        match error {
            RebalanceError::StoreAway => statuses::unavailable("STORE_AWAY", message, None),
            RebalanceError::NotLeader { leader } => {
                let all = status::coordinators(&self.snapshot(), &self.parts.coordinator_id, 0);
                let at = all.into_iter().find(|coordinator| coordinator.id == *leader);
                let at = at.map(|coordinator| coordinator.admin_endpoint).unwrap_or_default();
                let message =
                    if at.is_empty() { message } else { format!("{message}: --admin {at}") };
                statuses::failed_precondition("NOT_LEADER", message)
            }
            _ => statuses::failed_precondition("NO_REBALANCE", message),
        }
    }
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn get_status(
        &self,
        _: Request<GetStatusRequest>,
    ) -> Result<Response<GetStatusResponse>, Status> {
        Ok(Response::new(self.status()))
    }

    async fn get_placement(
        &self,
        request: Request<GetPlacementRequest>,
    ) -> Result<Response<GetPlacementResponse>, Status> {
        let wanted = request.into_inner().layer;
        let snapshot = self.snapshot();
        let Some(record) = Self::placement(&snapshot)? else {
            return Ok(Response::new(GetPlacementResponse::default()));
        };
        if let Some(layer) = wanted
            && !record.layers.iter().any(|found| found.layer == layer)
        {
            let reason = format!("layer {layer} has no routed experts");
            return Err(statuses::invalid_argument("layer", reason));
        }
        let heat = status::heat(&snapshot);
        let layers = record.layers.iter().filter(|found| wanted.is_none_or(|l| l == found.layer));
        Ok(Response::new(GetPlacementResponse {
            generation: record.generation,
            reason: record.reason.clone(),
            layers: layers.map(|layer| status::layer(layer, &heat)).collect(),
            workers: record.workers,
        }))
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        let DrainRequest { worker_id, undo } = request.into_inner();
        let snapshot = self.snapshot();
        let record = Self::placement(&snapshot)?;
        self.worker(&worker_id, record.as_ref(), &snapshot)?;
        let key = format!("{DRAINS}{worker_id}");
        if undo {
            let again = format!("shimmer drain {worker_id}");
            self.write(Vec::new(), vec![Write::Delete { key }], &again).await?;
            tracing::info!(
                worker = worker_id,
                "an operator takes a worker back into the placement"
            );
            return Ok(Response::new(DrainResponse { moves: 0 }));
        }
        let others = self.parts.control.workers().into_iter().any(|worker| {
            worker.id.as_deref() != Some(&*worker_id)
                && !worker.draining
                && worker.state == "serving"
        });
        if !others {
            return Err(statuses::failed_precondition(
                "LAST_WORKER",
                format!("no other worker serves that could take the experts of {worker_id}"),
            ));
        }
        let (first, copies) =
            status::shares(record.as_ref()).get(&*worker_id).copied().unwrap_or_default();
        let undo = format!("shimmer drain {worker_id} --undo");
        self.write(Vec::new(), vec![Write::Put { key, value: "{}".to_owned() }], &undo).await?;
        tracing::info!(worker = worker_id, experts = first + copies, "an operator drains a worker");
        Ok(Response::new(DrainResponse { moves: first + copies }))
    }

    async fn rebalance(
        &self,
        request: Request<RebalanceRequest>,
    ) -> Result<Response<RebalanceResponse>, Status> {
        let RebalanceRequest { dry_run, max_moves } = request.into_inner();
        if max_moves == Some(0) {
            return Err(statuses::invalid_argument("max_moves", "0 moves change nothing"));
        }
        let record = Self::placement(&self.snapshot())?;
        let experts = record.map_or(0, |record| record.layers.iter().map(|l| l.copies.len()).sum());
        let most = max_moves.map_or((experts / 10).max(1), |given| given as usize);
        let plan = self.parts.control.rebalance(most.min(experts.max(1))).await;
        let plan = plan.map_err(|error| self.refuse_rebalance(&error))?;
        let name = |worker: usize| plan.workers.get(worker).cloned().unwrap_or_default();
        let moves: Vec<Move> = plan
            .rebalance
            .moves
            .iter()
            .map(|m| Move {
                layer: m.layer,
                expert: m.expert,
                from: m.from.map_or_else(String::new, name),
                to: name(m.to),
                bytes: m.bytes,
                heat: m.heat,
            })
            .collect();
        let mut generation = None;
        if !dry_run && !moves.is_empty() {
            let again = "shimmer rebalance";
            self.write(plan.write.conditions, plan.write.writes, again).await?;
            generation = Some(plan.record.generation);
            tracing::info!(moves = moves.len(), generation, "an operator rebalances");
        }
        Ok(Response::new(RebalanceResponse {
            moves,
            imbalance_before: plan.rebalance.imbalance_before,
            imbalance_after: plan.rebalance.imbalance_after,
            generation,
        }))
    }

    async fn readmit(
        &self,
        request: Request<ReadmitRequest>,
    ) -> Result<Response<ReadmitResponse>, Status> {
        let ReadmitRequest { worker_id } = request.into_inner();
        let snapshot = self.snapshot();
        self.worker(&worker_id, Self::placement(&snapshot)?.as_ref(), &snapshot)?;
        let key = format!("{QUARANTINES}{worker_id}");
        if !snapshot.entries.contains_key(&key) {
            let message = format!("worker {worker_id} is not in quarantine");
            return Err(statuses::failed_precondition("NOT_QUARANTINED", message));
        }
        let drain = format!("shimmer drain {worker_id}");
        self.write(Vec::new(), vec![Write::Delete { key }], &drain).await?;
        tracing::info!(
            worker = worker_id,
            "an operator readmits a worker; it must pass its self-tests"
        );
        Ok(Response::new(ReadmitResponse {}))
    }
}
