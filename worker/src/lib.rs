//! The expert node: holds experts in memory and computes them for coordinators.
//!
//! It knows slabs, rows and fences. It never sees a token, a request or a sampler, and nothing that a peer does ends its
//! process. Start reading at [`expert_core`] for what a worker is, at [`session`] for what one coordinator may ask of it, and at
//! [`serve`](mod@serve) for the gRPC shell. [`store`] is the seam behind which experts live: memory, and the container's files
//! behind it.

pub mod budget;
mod check;
mod compute;
pub mod counters;
mod error;
pub mod expert_core;
pub mod generations;
pub mod guard;
pub mod history;
pub mod io;
mod joining;
pub mod memory;
pub mod metrics;
mod payload;
pub mod placement;
mod prefetch;
pub mod residency;
pub mod serve;
pub mod session;
pub mod store;
mod sync;
#[cfg(test)]
mod testing;
pub mod tier_counters;
pub mod tier_options;

pub use counters::{Counters, CountersSnapshot};
pub use error::Error;
pub use expert_core::{ExpertCore, WorkerConfig};
pub use serve::{ServeConfig, bind, serve};
pub use session::ExpertSession;
pub use tier_counters::{TierCounters, TierSnapshot};
pub use tier_options::TierOptions;
