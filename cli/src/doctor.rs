//! What stands in the way of a worker or a coordinator on this host. [`Facts`] holds what was read, or why it could not be;
//! [`judge`] turns it into findings and reads nothing itself. [`read`] and [`reach`] are the shell that fills it.

mod devices;
mod facts;
mod host;
mod judged;
mod peers;
pub(crate) mod reach;
pub(crate) mod read;

#[cfg(test)]
mod tests;

pub(crate) use facts::{
    ClockFacts, ContainerFacts, DriveFacts, EtcdFacts, Facts, GpuFacts, HostFacts, Known,
    MemoryFacts, PeerFacts, PeerKind,
};
pub(crate) use judged::{Finding, Level};

/// Every finding, in a fixed order.
pub(crate) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = host::findings(&facts.host);
    findings.extend(host::memory(&facts.memory, facts.container.as_ref()));
    findings.extend(devices::gpu(&facts.gpu));
    findings.extend(devices::drive(&facts.drive));
    findings.extend(host::clock(&facts.clock));
    findings.extend(facts.container.iter().flat_map(devices::container));
    findings.extend(facts.etcd.iter().flat_map(peers::etcd));
    findings.extend(facts.peers.iter().map(peers::peer));
    findings
}
