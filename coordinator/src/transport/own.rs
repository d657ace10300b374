//! The coordinator's own copy of the experts, for when no worker is left that has them.

use std::fmt;

use shimmer_proto::expert::v1::{ExpertResult, ExpertWork, WorkerError};

/// Computes experts in this process. Whoever puts coordinator and worker code into one binary brings it along: the
/// coordinator itself has no expert function.
pub trait OwnExperts: Send + fmt::Debug {
    /// Layers whose experts can be computed, ascending.
    fn layers(&self) -> Vec<u32>;

    /// Computes work on the calling thread, whatever epoch and generation it is stamped with. The checksum is not looked at.
    fn compute(&mut self, work: &ExpertWork) -> Result<ExpertResult, WorkerError>;
}
