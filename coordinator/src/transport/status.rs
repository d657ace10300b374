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
    /// Was connected, is tried again.
    Lost,
    /// Does not fit this cluster; tried again slowly.
    Refused,
}

impl LinkState {
    /// The name in the public API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Loading => "loading",
            Self::Serving => "serving",
            Self::Lost => "lost",
            Self::Refused => "refused",
        }
    }
}
