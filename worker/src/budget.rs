//! How much memory the experts of this process may take, and which limit says so.

use std::{fmt, path::Path};

use crate::error::Error;

/// Kept free beside the experts for everything else in the process: buffers of connections, pools, code.
const RESERVE_BYTES: u64 = 256 << 20;

/// The limit that binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BudgetTerm {
    /// The setting.
    Setting,
    /// Memory available on the host.
    Host,
    /// Memory limit of the control group.
    ControlGroup,
    /// The setting of slots per layer.
    Cap,
    /// Neither could be read.
    Unknown,
}

impl fmt::Display for BudgetTerm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setting => "--ram",
            Self::Cap => "--cap",
            Self::Host => "the memory available on this host",
            Self::ControlGroup => "the memory limit of the control group",
            Self::Unknown => "the address space",
        })
    }
}

/// Bytes for people: two or three digits and a unit, rounded down, so that a limit is never overstated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let Some((unit, name)) = units.into_iter().find(|(unit, _)| self.0 >= *unit) else {
            return write!(f, "{} bytes", self.0);
        };
        let (whole, rest) = (self.0 / unit, self.0 % unit);
        match whole {
            0..10 => write!(f, "{whole}.{:02} {name}", rest * 100 / unit),
            10..100 => write!(f, "{whole}.{} {name}", rest * 10 / unit),
            _ => write!(f, "{whole} {name}"),
        }
    }
}

/// Bytes for expert slabs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamBudget {
    /// The bytes.
    pub bytes: u64,
    /// What limits them.
    pub term: BudgetTerm,
}

impl RamBudget {
    /// Takes the setting if it fits what this process can have, else refuses it; without a setting takes what there is.
    pub fn measure(requested: Option<u64>) -> Result<Self, Error> {
        Self::decide(requested, host_available(), control_group_available())
    }

    fn decide(
        requested: Option<u64>,
        host: Option<u64>,
        group: Option<u64>,
    ) -> Result<Self, Error> {
        let limits = [(host, BudgetTerm::Host), (group, BudgetTerm::ControlGroup)];
        let (available, term) = limits
            .into_iter()
            .filter_map(|(bytes, term)| Some((bytes?.saturating_sub(RESERVE_BYTES), term)))
            .min_by_key(|&(bytes, _)| bytes)
            .unwrap_or((u64::MAX >> 1, BudgetTerm::Unknown));
        match requested {
            None => Ok(Self { bytes: available, term }),
            Some(0) => {
                let reason = "expected at least one byte";
                Err(Error::Setting { name: "ram_budget", value: "0".to_owned(), reason })
            }
            Some(requested) if requested > available => {
                Err(Error::Budget { requested, available, term })
            }
            Some(bytes) => Ok(Self { bytes, term: BudgetTerm::Setting }),
        }
    }
}

fn host_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The tightest limit on the way from this process's group to the root, less what the group holds that cannot be
/// reclaimed. Page cache does not count as used.
fn control_group_available() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/');
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(path);
    own.ancestors()
        .take_while(|group| group.starts_with(root))
        .filter_map(|group| {
            let limit = std::fs::read_to_string(group.join("memory.max"))
                .ok()?
                .trim()
                .parse::<u64>()
                .ok()?;
            let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
            Some(limit.saturating_sub(unreclaimable(&stat)))
        })
        .min()
}

/// Anonymous, kernel and locked bytes of a control group's `memory.stat`.
fn unreclaimable(stat: &str) -> u64 {
    let fields = stat.lines().filter_map(|line| line.split_once(' '));
    fields
        .filter(|(name, _)| matches!(*name, "anon" | "kernel" | "unevictable"))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn check(
        requested: Option<u64>,
        host: Option<u64>,
        group: Option<u64>,
        expected: Result<(u64, BudgetTerm), &str>,
    ) {
        let found = RamBudget::decide(requested, host, group);
        match expected {
            Ok((bytes, term)) => assert_eq!(found.unwrap(), RamBudget { bytes, term }),
            Err(text) => assert!(found.unwrap_err().to_string().contains(text)),
        }
    }

    #[test]
    fn the_smallest_limit_binds_and_is_named() {
        check(None, Some(8 * GIB), None, Ok((8 * GIB - RESERVE_BYTES, BudgetTerm::Host)));
        check(
            None,
            Some(8 * GIB),
            Some(4 * GIB),
            Ok((4 * GIB - RESERVE_BYTES, BudgetTerm::ControlGroup)),
        );
        check(Some(GIB), Some(8 * GIB), None, Ok((GIB, BudgetTerm::Setting)));
        check(
            Some(9 * GIB),
            Some(8 * GIB),
            None,
            Err("the memory available on this host leaves 8321499136 bytes"),
        );
        check(
            Some(5 * GIB),
            Some(8 * GIB),
            Some(4 * GIB),
            Err("the memory limit of the control group"),
        );
        check(Some(0), Some(8 * GIB), None, Err("ram_budget"));
        check(None, Some(1), None, Ok((0, BudgetTerm::Host)));
    }

    #[test]
    fn page_cache_is_not_used_memory() {
        assert_eq!(unreclaimable("anon 10\nfile 1000\nkernel 5\nunevictable 2\n"), 17);
    }

    #[test]
    fn this_host_has_memory() {
        assert!(RamBudget::measure(None).unwrap().bytes > 0);
    }
}
