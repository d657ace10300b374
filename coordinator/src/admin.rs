//! What operators ask and order: status, placement, draining, rebalancing, readmission, on a port of their own.
//!
//! Orders are written into the membership store, where every coordinator and the leader see them; nothing is done here. So
//! any coordinator takes any order but a rebalance, which only the leader can compute. Start reading at [`ClusterControl`],
//! which is what the service needs of the rest of the coordinator.

mod server;
mod service;
mod status;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc, time::Duration};

use shimmer_proto::membership::MembershipStore;

use crate::membership::leader::{RebalanceError, RebalancePlan};

pub use server::{AdminError, AdminOptions, serve};
pub use service::{Admin, AdminParts};

/// What a coordinator knows of its cluster and lets an operator do with it.
#[tonic::async_trait]
pub trait ClusterControl: Send + Sync + fmt::Debug {
    /// Where members, placement and orders stand.
    fn store(&self) -> Arc<dyn MembershipStore>;

    /// Every worker that this coordinator has a seat for, by seat.
    fn workers(&self) -> Vec<KnownWorker>;

    /// The generation in force here, 0 before the first one, and the one that is being loaded.
    fn generations(&self) -> (u64, Option<u64>);

    /// Whether every routed expert can be computed.
    fn is_complete(&self) -> bool;

    /// Sessions with workers that broke.
    fn losses(&self) -> u64;

    /// The moves that level the load of the workers, at most so many.
    async fn rebalance(&self, max_moves: usize) -> Result<RebalancePlan, ControlError>;
}

/// Why an order is not carried out.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ControlError {
    /// The coordinator is about to end.
    #[error("this coordinator is ending")]
    Ending,
    /// See [`RebalanceError`].
    #[error(transparent)]
    Rebalance(#[from] RebalanceError),
}

/// A worker as its seat knows it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KnownWorker {
    /// Its name; none before its first hello if it comes from a list of addresses.
    pub id: Option<String>,
    /// `host:port`.
    pub address: String,
    /// What fails as one with it.
    pub host: String,
    /// Name of the state of its link.
    pub state: &'static str,
    /// Why it is in that state.
    pub detail: String,
    /// It leaves, by an operator's order or its own.
    pub draining: bool,
    /// Experts that it has loaded.
    pub loaded_experts: u64,
    /// Bytes of them.
    pub loaded_bytes: u64,
    /// RAM that it was given for experts.
    pub ram_budget_bytes: u64,
    /// Relative capacity.
    pub weight: f64,
    /// The slowest of its recent replies.
    pub p99: Duration,
}
