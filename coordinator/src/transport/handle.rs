//! What operators may know of the links and the placement, and order.

use std::sync::{Arc, atomic::Ordering};

use shimmer_proto::membership::MembershipStore;
use tokio::sync::{mpsc, oneshot};

use super::{board::Board, lane::Lane};
use crate::{
    admin::{ClusterControl, ControlError, KnownWorker},
    membership::leader::{RebalanceError, RebalancePlan},
};

/// Orders that may wait for the control task.
const ORDERS: usize = 8;

/// Asks the control task for a rebalance.
#[derive(Debug)]
pub(super) struct RebalanceOrder {
    pub(super) max_moves: usize,
    pub(super) answer: oneshot::Sender<Result<RebalancePlan, RebalanceError>>,
}

/// See [`ClusterControl`]. Clones share everything.
#[derive(Debug, Clone)]
pub struct ClusterHandle {
    board: Arc<Board>,
    store: Arc<dyn MembershipStore>,
    orders: mpsc::Sender<RebalanceOrder>,
}

impl ClusterHandle {
    /// A handle, and what the control task has to answer.
    pub(super) fn new(
        board: Arc<Board>,
        store: Arc<dyn MembershipStore>,
    ) -> (Self, mpsc::Receiver<RebalanceOrder>) {
        let (orders, taken) = mpsc::channel(ORDERS);
        (Self { board, store, orders }, taken)
    }
}

#[tonic::async_trait]
impl ClusterControl for ClusterHandle {
    fn store(&self) -> Arc<dyn MembershipStore> {
        Arc::clone(&self.store)
    }

    fn workers(&self) -> Vec<KnownWorker> {
        self.board.known()
    }

    fn generations(&self) -> (u64, Option<u64>) {
        let plans = self.board.plans();
        let plans = plans.borrow();
        let generation = |plan: &Option<super::plans::Plan>| plan.as_ref().map(|p| p.generation);
        (generation(&plans.in_force).unwrap_or(0), generation(&plans.next))
    }

    fn is_complete(&self) -> bool {
        self.board.status().borrow().complete
    }

    fn losses(&self) -> u64 {
        let count = |lane: &Lane| lane.counters.losses.load(Ordering::Relaxed);
        self.board.roster().borrow().iter().map(|member| count(&member.lane)).sum()
    }

    async fn rebalance(&self, max_moves: usize) -> Result<RebalancePlan, ControlError> {
        let (answer, plan) = oneshot::channel();
        let order = RebalanceOrder { max_moves, answer };
        self.orders.send(order).await.map_err(|_| ControlError::Ending)?;
        Ok(plan.await.map_err(|_| ControlError::Ending)??)
    }
}
