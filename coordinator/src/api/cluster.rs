//! What the API knows about the workers.

use shimmer_proto::v1::WorkerStatus;

/// State of every configured worker, published by the transport whenever it changes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterStatus {
    /// One per configured worker, in the order of the configuration.
    pub workers: Vec<WorkerStatus>,
    /// Every routed expert has a live owner, so that any request can be served.
    pub complete: bool,
}
