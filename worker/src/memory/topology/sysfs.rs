//! What the kernel's files say about nodes and processors.

use std::path::Path;

use super::{Core, Node, lists::parse_list};

/// All nodes below a directory like `/sys/devices/system`; one node of all processors if it describes none.
pub(super) fn read(system: &Path) -> Vec<Node> {
    let list = |path: &str| {
        let text = std::fs::read_to_string(system.join(path)).ok()?;
        parse_list(&text)
    };
    let core = |cpu: &u32| {
        let topology = format!("cpu/cpu{cpu}/topology");
        list(&format!("{topology}/core_cpus_list"))
            .or_else(|| list(&format!("{topology}/thread_siblings_list")))
            .filter(|cpus| cpus.contains(cpu))
            .unwrap_or_else(|| vec![*cpu])
    };
    let node = |id: u32, cpus: &[u32]| {
        let mut cores: Vec<_> = cpus.iter().map(core).map(|cpus| Core { cpus }).collect();
        cores.sort_unstable();
        cores.dedup();
        Node { id, cores }
    };
    let ids = list("node/online").unwrap_or_default();
    let nodes: Vec<_> = ids
        .into_iter()
        .filter_map(|id| Some(node(id, &list(&format!("node/node{id}/cpulist"))?)))
        .collect();
    if nodes.is_empty() {
        vec![node(0, &list("cpu/online").unwrap_or_else(|| vec![0]))]
    } else {
        nodes
    }
}
