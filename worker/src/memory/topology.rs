//! Which memory and which processors this process may use, node by node.
//!
//! hwloc knows more machines than we do, so it is asked first; where it is not built in, or fails, sysfs is read. What the
//! process may use (its control group's sets, and the affinity mask it was started with) is applied to either answer.

#[cfg(feature = "hwloc")]
mod hwloc;
mod lists;
mod sysfs;

use std::{fmt, path::Path};

use self::lists::parse_list;

/// Nodes with memory and processors that this process may use, by ascending id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<Node>,
    source: TopologySource,
}

/// Memory, and the processors beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The system's number.
    pub id: u32,
    /// By their first processor.
    pub cores: Vec<Core>,
}

/// A physical core.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Core {
    /// Its hardware threads, ascending; at least one.
    pub cpus: Vec<u32>,
}

/// Who described the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopologySource {
    /// The hwloc library.
    Hwloc,
    /// Files of the kernel.
    Sysfs,
}

impl fmt::Display for TopologySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hwloc => "hwloc",
            Self::Sysfs => "sysfs",
        })
    }
}

/// What a process may use; absent where the system does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Allowed {
    cpus: Option<Vec<u32>>,
    nodes: Option<Vec<u32>>,
}

impl Topology {
    /// Asks this machine, on behalf of the calling thread.
    pub fn detect() -> Self {
        let allowed = Allowed::of_this_thread();
        let sysfs = || (sysfs::read(Path::new("/sys/devices/system")), TopologySource::Sysfs);
        #[cfg(feature = "hwloc")]
        let (nodes, source) = match hwloc::read() {
            Ok(nodes) => (nodes, TopologySource::Hwloc),
            Err(error) => {
                tracing::warn!(%error, "hwloc cannot describe this machine; reading sysfs");
                sysfs()
            }
        };
        #[cfg(not(feature = "hwloc"))]
        let (nodes, source) = sysfs();
        Self { nodes: allowed.restrict(nodes), source }
    }

    /// A machine as described.
    pub fn new(mut nodes: Vec<Node>, source: TopologySource) -> Self {
        nodes.sort_unstable_by_key(|node| node.id);
        Self { nodes, source }
    }

    /// The nodes. A node without processors (device or expansion memory) is not among them: weights are read where there
    /// is someone to compute.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Whether there is a choice between nodes.
    pub fn is_numa(&self) -> bool {
        self.nodes.len() > 1
    }

    /// Physical cores of all nodes.
    pub fn cores(&self) -> usize {
        self.nodes.iter().map(|node| node.cores.len()).sum()
    }

    /// Who described the machine.
    pub fn source(&self) -> TopologySource {
        self.source
    }
}

impl Allowed {
    fn of_this_thread() -> Self {
        std::fs::read_to_string("/proc/thread-self/status")
            .map_or_else(|_| Self::default(), |status| Self::parse(&status))
    }

    /// Reads the two lists of a `status` file.
    fn parse(status: &str) -> Self {
        let list =
            |name| status.lines().find_map(|line| line.strip_prefix(name)).and_then(parse_list);
        Self { cpus: list("Cpus_allowed_list:"), nodes: list("Mems_allowed_list:") }
    }

    fn restrict(&self, mut nodes: Vec<Node>) -> Vec<Node> {
        let allows = |list: &Option<Vec<u32>>, id: u32| match list {
            Some(list) => list.contains(&id),
            None => true,
        };
        nodes.retain(|node| allows(&self.nodes, node.id));
        for node in &mut nodes {
            for core in &mut node.cores {
                core.cpus.retain(|cpu| allows(&self.cpus, *cpu));
            }
            node.cores.retain(|core| !core.cpus.is_empty());
            node.cores.sort_unstable();
        }
        nodes.retain(|node| !node.cores.is_empty());
        nodes.sort_unstable_by_key(|node| node.id);
        nodes
    }
}

#[cfg(test)]
mod tests;
