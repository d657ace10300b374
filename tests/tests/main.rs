//! End-to-end suites of Shimmer in one binary: a line per suite; the sandbox they share is the library of this crate.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod api;
mod clients;
mod kernels_f64;
mod kernels_spec;
mod oracle_tiny;
mod tidy;
