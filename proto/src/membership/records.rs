//! Keys of the membership store and what stands under them. Values are JSON; unknown fields are refused, so that two
//! versions of this build never half understand each other.
//!
//! | key | written by | gone when |
//! |---|---|---|
//! | `workers/<id>` | the worker | its lease ends |
//! | `coordinators/<id>` | the coordinator | its lease ends |
//! | `leader` | the coordinator that decides placements | its lease ends |
//! | `placement` | the leader, if it still leads and nobody wrote in between | never |
//! | `drains/<worker id>` | an operator, through a coordinator | undone |
//! | `quarantines/<worker id>` | a coordinator whose audit failed | readmitted |
//! | `heat/<coordinator id>` | each coordinator, now and then | its lease ends |

use serde::{Deserialize, Serialize};

/// Folder of workers.
pub const WORKERS: &str = "workers/";
/// Folder of coordinators.
pub const COORDINATORS: &str = "coordinators/";
/// Folder of workers that are to leave.
pub const DRAINS: &str = "drains/";
/// Folder of workers that computed something else than others.
pub const QUARANTINES: &str = "quarantines/";
/// Folder of how often experts are used.
pub const HEAT: &str = "heat/";
/// Who decides placements: a coordinator's id.
pub const LEADER: &str = "leader";
/// The placement in force: a [`PlacementRecord`].
pub const PLACEMENT: &str = "placement";

/// A worker that can be connected to. What it can do is in its hello.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerRecord {
    /// `host:port` as coordinators reach it.
    pub address: String,
    /// What fails as one; usually the machine.
    pub host: String,
    /// Relative capacity.
    pub weight: f64,
    /// Bytes of experts that it holds in memory at a time.
    pub ram_budget_bytes: u64,
    /// Layers with experts that it has no file of.
    pub absent_layers: Vec<u32>,
    /// Container that it serves.
    pub container_digest: String,
    /// Differs each time the process starts.
    pub incarnation: u64,
    /// Was asked to stop.
    pub draining: bool,
}

/// A coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoordinatorRecord {
    /// `host:port` of its public API, as clients reach it.
    pub address: String,
    /// `host:port` of its admin service; empty when it has none.
    pub admin_address: String,
    /// Container that it serves.
    pub container_digest: String,
    /// Differs each time the process starts.
    pub incarnation: u64,
    /// Generation of the placement that its work goes by; 0 before the first one.
    #[serde(default)]
    pub in_force: u64,
    /// The least generation by which the store's placement is the one that it follows. A store that lost its data, or was
    /// restored from a backup, may hold an earlier one, which it cannot go back to.
    #[serde(default)]
    pub follows: u64,
}

/// Who holds what. A generation is written once and never changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementRecord {
    /// Grows with every placement of the cluster.
    pub generation: u64,
    /// Container that it is for.
    pub container_digest: String,
    /// Coordinator that decided it.
    pub leader: String,
    /// Revision under which that coordinator became leader.
    pub leader_revision: u64,
    /// Why, for people.
    pub reason: String,
    /// Ids, ascending.
    pub workers: Vec<String>,
    /// Layers with routed experts, ascending.
    pub layers: Vec<LayerRecord>,
}

/// One layer of a placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRecord {
    /// Index in the model.
    pub layer: u32,
    /// Per expert the places in [`PlacementRecord::workers`] of those that hold it, first choice first; never empty.
    pub copies: Vec<Vec<u16>>,
}

/// Why a worker is quarantined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuarantineRecord {
    /// Which expert it computed differently, and how that was told.
    pub reason: String,
    /// Coordinator that found it.
    pub coordinator: String,
}

/// How often one coordinator used the experts of each layer lately.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeatRecord {
    /// Layer, then rows per expert, decayed.
    pub layers: Vec<(u32, Vec<f32>)>,
}

/// The id behind a folder's key, if the key is of that folder.
pub fn id_in<'a>(folder: &str, key: &'a str) -> Option<&'a str> {
    key.strip_prefix(folder).filter(|id| !id.is_empty())
}
