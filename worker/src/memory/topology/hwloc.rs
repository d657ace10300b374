//! What hwloc says about nodes and processors.

use hwlocality::{
    Topology,
    object::{TopologyObject, types::ObjectType},
};

use super::{Core, Node};

/// Why hwloc's answer cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum HwlocError {
    #[error("hwloc failed: {0}")]
    Failed(String),
    #[error("hwloc names no processor of any node")]
    Empty,
}

pub(super) fn read() -> Result<Vec<Node>, HwlocError> {
    let topology = Topology::new().map_err(|error| HwlocError::Failed(error.to_string()))?;
    let mut cores = cores(&topology, ObjectType::Core);
    if cores.is_empty() {
        cores = self::cores(&topology, ObjectType::PU);
    }
    let node = |object: &TopologyObject| {
        let id = u32::try_from(object.os_index()?).ok()?;
        let cpus = cpus(object);
        let inside = |core: &&Core| core.cpus.iter().any(|cpu| cpus.contains(cpu));
        Some(Node { id, cores: cores.iter().filter(inside).cloned().collect() })
    };
    let nodes: Vec<_> = topology.objects_with_type(ObjectType::NUMANode).filter_map(node).collect();
    if nodes.iter().all(|node| node.cores.is_empty()) { Err(HwlocError::Empty) } else { Ok(nodes) }
}

fn cores(topology: &Topology, kind: ObjectType) -> Vec<Core> {
    let core = |object| Core { cpus: cpus(object) };
    topology.objects_with_type(kind).map(core).filter(|core| !core.cpus.is_empty()).collect()
}

fn cpus(object: &TopologyObject) -> Vec<u32> {
    let set = object.cpuset();
    let indices = set.iter().flat_map(|set| set.iter_set());
    indices.filter_map(|index| u32::try_from(usize::from(index)).ok()).collect()
}
