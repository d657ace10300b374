//! From which nodes the pages of slots come.
//!
//! Weights go round the allowed nodes, page by page, because any thread may compute any block of rows of any expert: then
//! every thread reads from every memory controller alike, whichever experts a step wants. One policy for a whole mapping
//! keeps mappings few. Staging buffers are never placed like this: a device reads them from one place.

use std::io;

use super::{
    system::{Kernel, System, page_bytes},
    topology::Topology,
};
use crate::tier_options::NumaSetting;

/// What was decided at start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MemoryPlacement {
    /// The system decides: there is one node, or the setting is off.
    #[default]
    System,
    /// Pages come from these nodes in turn.
    Interleaved(NodeSet),
    /// There are several nodes, but the system lets this process place nothing.
    Refused,
}

/// At least two nodes of this machine, tried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSet {
    ids: Vec<u32>,
}

/// The system calls a placement wrong that should be right.
#[derive(Debug, thiserror::Error)]
#[error(
    "placing memory on nodes {nodes:?} failed; permission is not what is missing, so this is a bug: please report it, and set \
     numa to off meanwhile"
)]
pub struct PlacementError {
    /// The nodes.
    pub nodes: Vec<u32>,
    /// What the system said.
    pub source: io::Error,
}

impl NodeSet {
    /// Their numbers, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

impl MemoryPlacement {
    /// Decides, and tries it out on one page if there is a choice.
    ///
    /// # Errors
    /// The trial failed for another reason than missing permission.
    pub fn decide(setting: NumaSetting, topology: &Topology) -> Result<Self, PlacementError> {
        Self::decide_with(setting, topology, &Kernel)
    }

    fn decide_with(
        setting: NumaSetting,
        topology: &Topology,
        system: &dyn System,
    ) -> Result<Self, PlacementError> {
        if setting == NumaSetting::Off || !topology.is_numa() {
            return Ok(Self::System);
        }
        let nodes: Vec<u32> = topology.nodes().iter().map(|node| node.id).collect();
        let trial = system.map(page_bytes()).and_then(|arena| system.interleave(&arena, &nodes));
        match trial {
            Ok(()) => Ok(Self::Interleaved(NodeSet { ids: nodes })),
            // Container engines refuse the call unless the container has the capability SYS_NICE.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => {
                tracing::warn!(
                    %error,
                    ?nodes,
                    "memory for experts is not spread over the nodes of this machine: the system does not allow mbind (in a \
                     container, add the capability SYS_NICE)",
                );
                Ok(Self::Refused)
            }
            Err(source) => Err(PlacementError { nodes, source }),
        }
    }

    /// The nodes that pages come from in turn; none if the system decides.
    pub fn nodes(&self) -> &[u32] {
        match self {
            Self::Interleaved(nodes) => nodes.ids(),
            Self::System | Self::Refused => &[],
        }
    }
}

#[cfg(test)]
mod tests;
