//! What a cluster that is not there yet would do: where its experts would lie, and how long its tokens would take.
//!
//! [`Hosts`] is what is written about the machines, [`Costs`] what was measured on one of them, [`Trace`] which experts are
//! wanted. [`mod@place`] asks the coordinator's and the worker's own placement, [`mod@replay`] sends the trace through the worker's
//! own residency, [`Prediction`] adds the times up. All of it is plain functions; docs/PLANNING.md has the formulas.

mod costs;
mod hosts;
mod place;
mod predict;
mod replay;
mod trace;

#[cfg(test)]
mod tests;

pub(crate) use costs::{Costs, Curve};
pub(crate) use hosts::{Host, Hosts, Worker};
pub(crate) use place::{Placed, PlacedWorker, alone, place};
pub(crate) use predict::{Load, Parts, Prediction, predict};
pub(crate) use replay::{Memory, Replayed, replay};
pub(crate) use trace::{Shape, Trace};

/// Why a plan of hosts cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForecastError {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{path}: {message}")]
    Parse { path: String, message: String },
}
