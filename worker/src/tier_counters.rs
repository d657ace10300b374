//! What the tiers count. Counting decides nothing: no counter is read on the way of a byte.
//!
//! Experts are counted once for each work message that wants them. Rates and throughputs are made from a
//! [`TierSnapshot`], never kept.

mod waits;

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use serde::Serialize;

pub use waits::{WAIT_BOUNDS_US, WaitCounts, Waits};

use crate::io::ReadReport;

macro_rules! tier_counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters and gauges of one worker's tiers.
        #[derive(Debug, Default)]
        pub struct TierCounters {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// Demand reads of experts that were wanted long ago, or never.
            pub demand_cold: ReadClass,
            /// Demand reads of experts that were wanted a short while ago.
            pub demand_warm: ReadClass,
            /// How long compute stood still at a time.
            pub felt_waits: Waits,
        }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct TierSnapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// Demand reads of experts that were wanted long ago, or never.
            pub demand_cold: ReadClassSnapshot,
            /// Demand reads of experts that were wanted a short while ago.
            pub demand_warm: ReadClassSnapshot,
            /// How long compute stood still at a time.
            pub felt_waits: WaitCounts,
        }

        impl TierCounters {
            /// Reads all counters.
            pub fn snapshot(&self) -> TierSnapshot {
                TierSnapshot {
                    $($name: self.$name.load(Relaxed),)*
                    demand_cold: self.demand_cold.snapshot(),
                    demand_warm: self.demand_warm.snapshot(),
                    felt_waits: self.felt_waits.counts(),
                }
            }
        }

        impl TierSnapshot {
            /// Names and values of all but the read classes and the waits, for a table or an exporter.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

tier_counters! {
    /// Wanted experts that were pinned in memory.
    hits_pinned,
    /// Wanted experts that were in the cache.
    hits_cache,
    /// Wanted experts that were not in memory, those under way to it included.
    misses,
    /// Works that wanted experts of this worker.
    works,
    /// Slabs read, for whatever reason.
    reads,
    /// Bytes read from files, failed tries included.
    read_bytes,
    /// Microseconds inside reads, added over threads.
    read_service_us,
    /// Microseconds that compute stood still because nothing it wanted was in memory.
    felt_wait_us,
    /// Reads under way now.
    loads_in_flight,
    /// Most reads that were under way at a time.
    loads_in_flight_max,
    /// Slabs that could not be read from any copy.
    read_errors,
    /// Reads that another copy answered, because the first one failed.
    mirror_fallbacks,
    /// Files read through the page cache because reading past it was refused.
    direct_fallbacks,
    /// Readers that use threads because io_uring was refused.
    uring_fallbacks,
    /// Slabs compared with the manifest, once for each copy.
    slabs_checked,
    /// Slabs that were not as the manifest says.
    slabs_damaged,
    /// Times that a copy of the container was set aside because it kept failing.
    copies_set_aside,
    /// Prefetches begun.
    prefetch_issued,
    /// Prefetched experts that were wanted while they were in memory.
    prefetch_useful,
    /// Prefetched experts that were wanted before they had come.
    prefetch_late,
    /// Hints dropped because the ring was full.
    prefetch_dropped_ring_full,
    /// Hints dropped because work on their layer had begun.
    prefetch_dropped_started,
    /// Hints dropped because every victim was more used.
    prefetch_dropped_guard,
    /// Hints dropped because the expert was there or under way.
    prefetch_dropped_duplicate,
    /// Hints dropped because every slot was in use.
    prefetch_dropped_no_room,
    /// Prefetches that could not be read.
    prefetch_dropped_failed,
    /// Experts evicted because work wanted another one.
    evictions_demand,
    /// Experts evicted for a prefetched one.
    evictions_prefetch,
    /// Experts evicted because the cache shrank.
    evictions_shrink,
    /// Experts evicted because another assignment needed their room.
    evictions_claim,
    /// Pairs of experts that changed places between pinned and cache.
    repins,
    /// Times that the usage history could not be written.
    usage_save_failures,
    /// Times that the cache was made smaller because memory ran short.
    guard_shrinks,
    /// Mappings that hold slots.
    mappings,
    /// Bytes of mappings that are locked in memory.
    locked_bytes,
    /// Bytes of slots that lie in huge pages.
    huge_bytes,
    /// 1 if memory should be spread over several nodes and the system refused.
    placement_refused,
    /// Pages of slots on another node than asked for.
    off_node_pages,
    /// Experts in memory now.
    experts_resident,
    /// Experts pinned now.
    experts_pinned,
    /// Slots of all layers.
    slots,
    /// Slots without an expert.
    slots_free,
    /// Bytes of all slots.
    slot_bytes,
}

/// Demand reads of one class.
#[derive(Debug, Default)]
pub struct ReadClass {
    reads: AtomicU64,
    direct: AtomicU64,
    bytes: AtomicU64,
    service_us: AtomicU64,
    busy: Mutex<Busy>,
}

/// When at least one read was under way.
#[derive(Debug, Default)]
struct Busy {
    in_flight: u32,
    since: Option<Instant>,
    wall: Duration,
}

/// Demand reads of one class, at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ReadClassSnapshot {
    /// Slabs read.
    pub reads: u64,
    /// Those that passed the page cache by.
    pub direct: u64,
    /// Bytes from files.
    pub bytes: u64,
    /// Microseconds inside reads, added over threads: bytes by this is the throughput of one thread.
    pub service_us: u64,
    /// Microseconds in which at least one was under way: bytes by this is the throughput, service by this the concurrency.
    pub wall_us: u64,
}

impl ReadClass {
    /// A read of this class begins.
    pub fn begin(&self, now: Instant) {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.in_flight += 1;
        busy.since.get_or_insert(now);
    }

    /// A read that [began](Self::begin) has ended; without a report it failed.
    pub fn end(&self, now: Instant, report: Option<&ReadReport>) {
        if let Some(report) = report {
            self.reads.fetch_add(1, Relaxed);
            self.direct.fetch_add(u64::from(report.direct), Relaxed);
            self.bytes.fetch_add(report.bytes, Relaxed);
            self.service_us.fetch_add(micros(report.service), Relaxed);
        }
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.in_flight = busy.in_flight.checked_sub(1).expect("an end follows a begin");
        if busy.in_flight == 0
            && let Some(since) = busy.since.take()
        {
            busy.wall += now.saturating_duration_since(since);
        }
    }

    fn snapshot(&self) -> ReadClassSnapshot {
        let wall = self.busy.lock().unwrap_or_else(PoisonError::into_inner).wall;
        ReadClassSnapshot {
            reads: self.reads.load(Relaxed),
            direct: self.direct.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            service_us: self.service_us.load(Relaxed),
            wall_us: micros(wall),
        }
    }
}

impl TierCounters {
    /// Compute has stood still for so long, because nothing it wanted was in memory.
    pub fn felt_wait(&self, waited: Duration) {
        let us = micros(waited);
        self.felt_wait_us.fetch_add(us, Relaxed);
        self.felt_waits.observe(us);
    }

    /// A read begins, whoever asked for it.
    pub fn read_begins(&self) {
        let now = self.loads_in_flight.fetch_add(1, Relaxed) + 1;
        self.loads_in_flight_max.fetch_max(now, Relaxed);
    }

    /// A read has ended; without a report it failed.
    pub fn read_ended(&self, report: Option<&ReadReport>) {
        self.loads_in_flight.fetch_sub(1, Relaxed);
        match report {
            Some(report) => {
                self.reads.fetch_add(1, Relaxed);
                self.read_bytes.fetch_add(report.bytes, Relaxed);
                self.read_service_us.fetch_add(micros(report.service), Relaxed);
            }
            None => {
                self.read_errors.fetch_add(1, Relaxed);
            }
        }
    }
}

impl TierSnapshot {
    /// Wanted experts that were in memory, as a share of all wanted ones; none if nothing was wanted.
    pub fn hit_rate(&self) -> Option<f64> {
        let hits = self.hits_pinned + self.hits_cache;
        let wanted = hits + self.misses;
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        (wanted > 0).then(|| hits as f64 / wanted as f64)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn overlapping_reads_count_their_wall_time_once() {
        let class = ReadClass::default();
        let start = Instant::now();
        let report = |service, direct| ReadReport { bytes: 100, service, direct };
        class.begin(start);
        class.begin(start + MS);
        class.end(start + 3 * MS, Some(&report(3 * MS, true)));
        class.end(start + 5 * MS, Some(&report(4 * MS, false)));
        class.begin(start + 100 * MS);
        class.end(start + 101 * MS, None);
        let expected =
            ReadClassSnapshot { reads: 2, direct: 1, bytes: 200, service_us: 7000, wall_us: 6000 };
        assert_eq!(class.snapshot(), expected);
    }

    #[test]
    fn the_most_reads_under_way_are_remembered() {
        let counters = TierCounters::default();
        counters.read_begins();
        counters.read_begins();
        counters.read_ended(Some(&ReadReport { bytes: 7, service: MS, direct: false }));
        counters.read_ended(None);
        let now = counters.snapshot();
        assert_eq!((now.loads_in_flight, now.loads_in_flight_max), (0, 2));
        assert_eq!((now.reads, now.read_bytes, now.read_errors), (1, 7, 1));
        assert_eq!(now.hit_rate(), None);
        counters.hits_cache.store(3, Relaxed);
        counters.misses.store(1, Relaxed);
        assert_eq!(counters.snapshot().hit_rate(), Some(0.75));
    }
}
