//! Memory that this process can have.

use std::path::Path;

use super::{BudgetTerm, Size, groups};

/// No host and no control group that runs a process has less. A smaller figure is a sign of an odd `/proc`.
const PLAUSIBLE_BYTES: u64 = 16 << 20;

/// What was measured. Absent is what could not be read, or has no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Available {
    /// Bytes that the host can give without swapping.
    pub host: Option<u64>,
    /// Bytes that the tightest control group on the way to the root still allows.
    pub group: Option<u64>,
}

impl Available {
    /// Measures on this host, and says what it does not believe.
    pub fn measure() -> Self {
        let (available, odd) = look(Path::new("/"));
        if let Some(limit) = odd {
            tracing::warn!(
                limit = %Size(limit),
                "a control group says that no process can run in it; ignoring its limit"
            );
        }
        if available.host.is_none() {
            tracing::warn!(
                "the memory of this host cannot be read, or is none; only a control group limits experts now"
            );
        }
        available
    }

    /// Measures in a file tree with `proc` and `sys` of some host, without a word.
    pub fn read(root: &Path) -> Self {
        look(root).0
    }

    /// The smaller one, and which it is.
    pub fn smallest(&self) -> Option<(u64, BudgetTerm)> {
        let limits = [(self.host, BudgetTerm::Host), (self.group, BudgetTerm::ControlGroup)];
        limits
            .into_iter()
            .filter_map(|(bytes, term)| Some((bytes?, term)))
            .min_by_key(|limit| limit.0)
    }
}

/// What there is, and the limit of a group that is not believed.
fn look(root: &Path) -> (Available, Option<u64>) {
    let memory = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    // An exhausted group holds the process that asks, so its headroom may be nothing, but its limit may not.
    let plausible = |group: &&groups::Group| group.limit >= PLAUSIBLE_BYTES;
    let groups = groups::groups(root);
    let odd = groups.iter().find(|group| !plausible(group)).map(|group| group.limit);
    let left = groups.iter().filter(plausible).map(|group| group.limit.saturating_sub(group.held));
    (Available { host: host(&memory), group: left.min() }, odd)
}

/// `MemAvailable`; on kernels without it what is free or holds file contents.
fn host(memory: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = memory.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let older = || {
        let cached = ["Active(file)", "Inactive(file)"].map(|name| field(name).unwrap_or(0));
        Some(cached.into_iter().fold(field("MemFree")?, u64::saturating_add))
    };
    field("MemAvailable").or_else(older).filter(|bytes| *bytes >= PLAUSIBLE_BYTES)
}

/// Anonymous bytes that this process holds now; none where the kernel does not say.
pub fn anonymous_bytes() -> Option<u64> {
    parse_anonymous(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn parse_anonymous(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests;
