//! What the outside is told about the workers.

pub use crate::api::ClusterStatus;

/// Where a link has got to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// No hello yet.
    Connecting,
    /// Greeted; experts are placed, loaded or tested.
    Loading,
    /// Takes work.
    Serving,
    /// Takes work if nobody else can: it owes an answer for longer than is usual.
    Suspect,
    /// Leaves: serves until others hold its experts, then its stream is closed.
    Draining,
    /// Was connected, is tried again.
    Lost,
    /// Has gone and is waited for no more: it said goodbye, or has been lost for long.
    Left,
    /// Does not fit this cluster; tried again slowly.
    Refused,
    /// Computed something else than others; not asked until it is readmitted.
    Quarantined,
}

impl LinkState {
    /// Every state.
    pub const ALL: [Self; 9] = [
        Self::Connecting,
        Self::Loading,
        Self::Serving,
        Self::Suspect,
        Self::Draining,
        Self::Lost,
        Self::Left,
        Self::Refused,
        Self::Quarantined,
    ];

    /// The name in the public API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Loading => "loading",
            Self::Serving => "serving",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Lost => "lost",
            Self::Left => "left",
            Self::Refused => "refused",
            Self::Quarantined => "quarantined",
        }
    }
}
