//! End-to-end suites of Shimmer in one binary: a line per suite; the sandbox they share is the library of this crate.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(
    clippy::print_stdout,
    reason = "what was skipped and what was measured is for the person who reads the output"
)]

mod api;
mod api_reference;
mod chart;
mod clients;
mod containers;
mod faults;
mod fetch;
mod hosts;
mod kernels_f64;
mod kernels_spec;
mod membership;
mod memory_limit;
mod metrics;
mod numa;
mod operators;
mod oracle_smol;
mod oracle_tiny;
mod planning;
mod protocol;
mod resume;
mod same_bytes;
mod security;
mod simulated_network;
mod simulation;
mod tidy;
mod tiers;
mod traces;
