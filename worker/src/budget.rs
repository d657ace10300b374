//! How much memory the experts of this process may take, what else takes some, and which limit says so.
//!
//! [`Available`] measures what the process can have, a [`Budget`] takes off everything that is not an expert, and
//! [`placement`](crate::placement) divides the rest. What was promised is watched by
//! [`guard`](crate::guard).

mod available;
mod groups;
mod messages;
mod terms;
mod work;

use std::fmt;

pub use available::{Available, anonymous_bytes};
pub use messages::MessageShape;
pub use terms::{Budget, Kind, Term};
pub(crate) use work::SMALL_ROWS;
pub use work::{STEP_ROWS, WorkShape};

/// The limit that binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BudgetTerm {
    /// The setting.
    Setting,
    /// Memory available on the host.
    Host,
    /// Memory limit of the control group.
    ControlGroup,
    /// What a plan says that the process can have, on a host that is not looked at.
    Planned,
    /// The setting of slots per layer.
    Cap,
}

impl fmt::Display for BudgetTerm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setting => "--ram",
            Self::Cap => "--cap",
            Self::Host => "the memory available on this host",
            Self::Planned => "its ram in the file of hosts",
            Self::ControlGroup => "the memory limit of the control group",
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
