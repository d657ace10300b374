//! End-to-end suites of Shimmer in one binary: a line per suite; the sandbox they share is the library of this crate.
