//! What the links agree on: who has been greeted, and the placement that follows from it.
//!
//! The placement needs every worker's hello, so the first one is made when the last worker has been greeted. A worker that
//! was lost keeps its experts; a worker that comes back as another one (other name, weight or layers) makes a new
//! placement with a higher generation.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shimmer_proto::{
    address::PeerAddress, expert::v1::WorkerHello, identity::shown, v1::WorkerStatus,
};
use tokio::sync::watch;

use super::{
    ClusterModel,
    status::{ClusterStatus, LinkState},
};
use crate::placement::{Candidate, PlacedLayer, Placement, PlacementError};

/// A placement that is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) generation: u64,
    pub(super) placement: Arc<Placement>,
}

/// Shared by all links and the step thread.
#[derive(Debug)]
pub(super) struct Board {
    state: Mutex<State>,
    plan: watch::Sender<Option<Plan>>,
    status: watch::Sender<ClusterStatus>,
    layers: Vec<PlacedLayer>,
}

#[derive(Debug)]
struct State {
    seats: Vec<Seat>,
    generation: u64,
    /// Why there is no placement although every worker is known.
    fault: Option<PlacementError>,
}

#[derive(Debug)]
struct Seat {
    address: PeerAddress,
    candidate: Option<Candidate>,
    state: LinkState,
    detail: String,
    experts: u64,
    bytes: u64,
}

impl Board {
    pub(super) fn new(addresses: &[PeerAddress], model: &ClusterModel) -> Self {
        let seat = |address: &PeerAddress| Seat {
            address: address.clone(),
            candidate: None,
            state: LinkState::Connecting,
            detail: "not connected yet".to_owned(),
            experts: 0,
            bytes: 0,
        };
        let layers = model
            .layers
            .iter()
            .map(|l| PlacedLayer {
                layer: l.layer,
                experts: u32::try_from(l.self_tests.len()).unwrap_or(u32::MAX),
                slab_bytes: l.slab_bytes,
            })
            .collect();
        let state =
            State { seats: addresses.iter().map(seat).collect(), generation: 0, fault: None };
        let status = watch::Sender::new(state.status());
        Self { state: Mutex::new(state), plan: watch::Sender::new(None), status, layers }
    }

    /// Seats a worker by its hello. The refusal names what does not fit.
    pub(super) fn greet(&self, worker: usize, hello: &WorkerHello) -> Result<(), String> {
        let candidate = Candidate {
            id: hello.worker_id.clone(),
            weight: hello.weight,
            absent_layers: hello.absent_layers.clone(),
            host: hello.host.clone(),
            ram_budget_bytes: hello.ram_budget_bytes,
        };
        // One candidate alone: its name and weight are checked before it can spoil the placement of all.
        Placement::compute(&[], std::slice::from_ref(&candidate))
            .map_err(|error| error.to_string())?;
        if candidate.id.is_empty() || candidate.id.len() > 64 {
            return Err(format!(
                "worker id {} is empty or longer than 64 bytes",
                shown(&candidate.id)
            ));
        }
        let mut state = self.lock();
        let mut others = state.seats.iter_mut().enumerate().filter(|(other, _)| *other != worker);
        if let Some((_, seat)) =
            others.find(|(_, seat)| seat.candidate.as_ref().is_some_and(|c| c.id == candidate.id))
        {
            if matches!(seat.state, LinkState::Loading | LinkState::Serving) {
                let id = shown(&candidate.id);
                return Err(format!(
                    "worker id {id} is already used by {}; ids must be unique",
                    seat.address
                ));
            }
            // The worker has moved to another address of the list.
            seat.candidate = None;
        }
        if state.seats[worker].candidate.as_ref() != Some(&candidate) {
            state.seats[worker].candidate = Some(candidate);
            self.place(&mut state);
        }
        if let Some(fault) = &state.fault {
            return Err(fault.to_string());
        }
        Ok(())
    }

    fn place(&self, state: &mut State) {
        let candidates: Option<Vec<Candidate>> =
            state.seats.iter().map(|seat| seat.candidate.clone()).collect();
        let Some(candidates) = candidates else { return };
        match Placement::compute(&self.layers, &candidates) {
            Ok(placement) => {
                state.generation += 1;
                state.fault = None;
                let placement = Arc::new(placement);
                self.plan.send_replace(Some(Plan { generation: state.generation, placement }));
            }
            Err(error) => state.fault = Some(error),
        }
    }

    /// Follows the placement.
    pub(super) fn plan(&self) -> watch::Receiver<Option<Plan>> {
        self.plan.subscribe()
    }

    /// Follows the status.
    pub(super) fn status(&self) -> watch::Receiver<ClusterStatus> {
        self.status.subscribe()
    }

    /// Tells where a link has got to, and why.
    pub(super) fn tell(&self, worker: usize, link: LinkState, detail: impl Into<String>) {
        self.update(worker, |seat| {
            seat.state = link;
            seat.detail = detail.into();
        });
    }

    /// Tells what a worker holds.
    pub(super) fn tell_resident(&self, worker: usize, experts: u64, bytes: u64) {
        self.update(worker, |seat| (seat.experts, seat.bytes) = (experts, bytes));
    }

    /// Name and address of a worker for messages.
    pub(super) fn name(&self, worker: usize) -> String {
        let state = self.lock();
        let seat = &state.seats[worker];
        match &seat.candidate {
            Some(candidate) => format!("worker {} ({})", shown(&candidate.id), seat.address),
            None => format!("worker at {}", seat.address),
        }
    }

    /// State of a link and why it is there.
    pub(super) fn told(&self, worker: usize) -> (LinkState, String) {
        let state = self.lock();
        let seat = &state.seats[worker];
        (seat.state, seat.detail.clone())
    }

    fn update(&self, worker: usize, change: impl FnOnce(&mut Seat)) {
        let mut state = self.lock();
        change(&mut state.seats[worker]);
        let status = state.status();
        self.status.send_if_modified(|old| {
            let differs = *old != status;
            *old = status;
            differs
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn status(&self) -> ClusterStatus {
        let workers = self.seats.iter().map(|seat| WorkerStatus {
            worker_id: seat.candidate.as_ref().map(|c| shown(&c.id)).unwrap_or_default(),
            endpoint: seat.address.to_string(),
            state: seat.state.name().to_owned(),
            experts: seat.experts,
            bytes: seat.bytes,
            detail: seat.detail.clone(),
        });
        let complete = self.seats.iter().all(|seat| seat.state == LinkState::Serving);
        ClusterStatus { workers: workers.collect(), complete }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board(workers: u16) -> Board {
        let addresses: Vec<PeerAddress> =
            (0..workers).map(|i| format!("h{i}:7000").parse().unwrap()).collect();
        let layer =
            super::super::ClusterLayer { layer: 1, slab_bytes: 4096, self_tests: vec![[0; 16]; 8] };
        let model = ClusterModel {
            identity: shimmer_proto::expert::v1::Identity::default(),
            row_bytes: 68,
            hidden: 64,
            layers: vec![layer],
        };
        Board::new(&addresses, &model)
    }

    fn hello(id: &str, weight: f64) -> WorkerHello {
        WorkerHello { worker_id: id.to_owned(), weight, ..WorkerHello::default() }
    }

    fn generation(board: &Board) -> Option<u64> {
        board.plan().borrow().as_ref().map(|plan| plan.generation)
    }

    #[test]
    fn the_placement_waits_for_the_last_hello_and_changes_only_with_the_workers() {
        let board = board(2);
        board.greet(0, &hello("a", 1.0)).unwrap();
        assert_eq!(generation(&board), None);
        board.greet(1, &hello("b", 1.0)).unwrap();
        assert_eq!(generation(&board), Some(1));
        board.tell(1, LinkState::Lost, "connection reset");
        board.greet(1, &hello("b", 1.0)).unwrap();
        assert_eq!(generation(&board), Some(1));
        board.greet(1, &hello("b", 2.0)).unwrap();
        assert_eq!(generation(&board), Some(2));
    }

    #[test]
    fn hellos_that_do_not_fit_are_refused_by_name() {
        let board = board(2);
        board.greet(0, &hello("a", 1.0)).unwrap();
        board.tell(0, LinkState::Loading, "");
        assert!(board.greet(1, &hello("a", 1.0)).unwrap_err().contains("already used by h0:7000"));
        assert!(board.greet(1, &hello("b", 0.0)).unwrap_err().contains("worker b has weight 0"));
        assert!(board.greet(1, &hello("", 1.0)).unwrap_err().contains("is empty"));
        let absent = WorkerHello { absent_layers: vec![1], ..hello("b", 1.0) };
        board.greet(1, &absent).unwrap();
        let absent = WorkerHello { absent_layers: vec![1], ..hello("a", 1.0) };
        assert!(
            board.greet(0, &absent).unwrap_err().contains("no worker has the experts of layer 1")
        );
        assert_eq!(board.greet(0, &hello("a", 1.0)), Ok(()));
    }

    #[test]
    fn workers_may_swap_addresses() {
        let board = board(2);
        board.greet(0, &hello("a", 1.0)).unwrap();
        board.greet(1, &hello("b", 1.0)).unwrap();
        board.tell(0, LinkState::Lost, "");
        board.tell(1, LinkState::Lost, "");
        board.greet(0, &hello("b", 1.0)).unwrap();
        board.greet(1, &hello("a", 1.0)).unwrap();
        assert_eq!(generation(&board), Some(2));
    }

    #[test]
    fn the_cluster_is_complete_when_all_serve() {
        let board = board(2);
        let status = board.status();
        board.tell(0, LinkState::Serving, "");
        assert!(!status.borrow().complete);
        board.tell(1, LinkState::Serving, "");
        board.tell_resident(1, 4, 16_384);
        assert!(status.borrow().complete);
        assert_eq!(status.borrow().workers[1].bytes, 16_384);
        board.tell(0, LinkState::Lost, "gone");
        assert!(!status.borrow().complete);
        assert_eq!(board.told(0), (LinkState::Lost, "gone".to_owned()));
    }
}
