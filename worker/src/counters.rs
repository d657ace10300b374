//! What a worker counts. Every frame or peer that was refused is visible here.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters, shared by all connections.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        pub struct CountersSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Reads all counters.
            pub fn snapshot(&self) -> CountersSnapshot {
                CountersSnapshot { $($name: self.$name.load(Relaxed),)* }
            }
        }

        impl CountersSnapshot {
            /// Names and values, for a table or an exporter.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Connections accepted.
    connections,
    /// Connections closed at once because too many were open.
    connections_refused,
    /// Connections that made no call before the hello deadline.
    connections_silent,
    /// Connections that spoke plaintext to TLS or TLS to plaintext, or whose certificate was refused.
    handshakes_failed,
    /// Streams whose hello was accepted.
    sessions,
    /// Streams refused because the hello did not fit, or did not come.
    hellos_refused,
    /// Frames larger than the announced limit.
    frames_oversized,
    /// Frames that are no message, or were cut off.
    frames_malformed,
    /// Frames whose content does not match their checksum.
    frames_corrupt,
    /// Work of another epoch or placement generation.
    work_stale,
    /// Work whose counts, indices or lengths do not fit together.
    work_malformed,
    /// Work for experts that are not assigned.
    work_not_owned,
    /// Work whose result left the exact range.
    work_overflowed,
    /// Work refused because an expert could not be read.
    work_not_loaded,
    /// Messages out of order.
    messages_out_of_order,
    /// Hints handed to the store.
    hints_taken,
    /// Hints whose content does not match their checksum.
    hints_corrupt,
    /// Hints of another epoch or placement generation, or before an assignment.
    hints_stale,
    /// Hints whose counts or indices do not fit together.
    hints_malformed,
    /// Hints for experts that are not assigned.
    hints_not_owned,
    /// Assignments that could not be loaded.
    loads_failed,
    /// Experts of other workers that this one stands in for, each time that it was asked to.
    experts_adopted,
    /// Requests to stand in that named something this worker cannot have.
    adopts_refused,
    /// Assignments that a coordinator has given back because a later one is in force.
    assignments_released,
    /// 1 once the worker was asked to stop.
    draining,
    /// Work answered with a result.
    work_done,
    /// (row, expert) pairs computed.
    rows_done,
    /// Microseconds spent on computing work.
    compute_us,
}

impl Counters {
    /// Adds one.
    pub fn bump(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    /// Adds some.
    pub fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Relaxed);
    }
}
