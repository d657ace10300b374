//! Which counter is shown under which name.

use prometheus_client::metrics::MetricType;

/// A metric of counters that differ in one label.
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) kind: MetricType,
    /// Empty for none.
    pub(super) label: &'static str,
    /// Value of the label, and the counter. Microseconds are shown as seconds.
    pub(super) series: &'static [(&'static str, &'static str)],
}

const fn counter(
    name: &'static str,
    help: &'static str,
    label: &'static str,
    series: &'static [(&'static str, &'static str)],
) -> Family {
    Family { name, help, kind: MetricType::Counter, label, series }
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    label: &'static str,
    series: &'static [(&'static str, &'static str)],
) -> Family {
    Family { name, help, kind: MetricType::Gauge, label, series }
}

/// Everything but the demand reads.
pub(super) const FAMILIES: &[Family] = &[
    counter("shimmer_worker_connections", "Connections accepted.", "", &[("", "connections")]),
    counter(
        "shimmer_worker_connections_closed",
        "Connections closed by the worker: too many were open, no call came, or TLS failed.",
        "reason",
        &[
            ("handshake", "handshakes_failed"),
            ("limit", "connections_refused"),
            ("silent", "connections_silent"),
        ],
    ),
    counter(
        "shimmer_worker_sessions",
        "Streams whose hello was accepted.",
        "",
        &[("", "sessions")],
    ),
    counter(
        "shimmer_worker_hellos_refused",
        "Streams whose hello did not fit, or did not come.",
        "",
        &[("", "hellos_refused")],
    ),
    counter(
        "shimmer_worker_frames_refused",
        "Frames that were not read or not used.",
        "reason",
        &[
            ("oversized", "frames_oversized"),
            ("malformed", "frames_malformed"),
            ("corrupt", "frames_corrupt"),
            ("out_of_order", "messages_out_of_order"),
        ],
    ),
    counter(
        "shimmer_worker_work_refused",
        "Work that was read and not computed, or whose result left the exact range.",
        "reason",
        &[
            ("stale", "work_stale"),
            ("malformed", "work_malformed"),
            ("not_owned", "work_not_owned"),
            ("not_loaded", "work_not_loaded"),
            ("overflow", "work_overflowed"),
        ],
    ),
    counter(
        "shimmer_worker_hints",
        "Prefetch hints handed to the store.",
        "",
        &[("", "hints_taken")],
    ),
    counter(
        "shimmer_worker_hints_dropped",
        "Prefetch hints that were dropped before the store saw them.",
        "reason",
        &[
            ("corrupt", "hints_corrupt"),
            ("stale", "hints_stale"),
            ("malformed", "hints_malformed"),
            ("not_owned", "hints_not_owned"),
        ],
    ),
    counter(
        "shimmer_worker_loads_failed",
        "Assignments that could not be loaded.",
        "",
        &[("", "loads_failed")],
    ),
    counter(
        "shimmer_worker_assignments_released",
        "Assignments that a coordinator gave back because a later one is in force.",
        "",
        &[("", "assignments_released")],
    ),
    counter(
        "shimmer_worker_experts_adopted",
        "Experts of other workers that this one stands in for, each time that it was asked to.",
        "",
        &[("", "experts_adopted")],
    ),
    counter(
        "shimmer_worker_adopts_refused",
        "Requests to stand in that named something this worker cannot have.",
        "",
        &[("", "adopts_refused")],
    ),
    gauge(
        "shimmer_worker_draining",
        "1 once the worker was asked to stop.",
        "",
        &[("", "draining")],
    ),
    counter("shimmer_worker_work", "Work answered with a result.", "", &[("", "work_done")]),
    counter(
        "shimmer_worker_expert_rows",
        "Pairs of row and expert computed.",
        "",
        &[("", "rows_done")],
    ),
    counter(
        "shimmer_worker_compute_seconds",
        "Time spent on answered work, waiting for experts included.",
        "",
        &[("", "compute_us")],
    ),
    counter(
        "shimmer_expert_hits",
        "Wanted experts that were in memory, once for each work.",
        "tier",
        &[("pinned", "hits_pinned"), ("cache", "hits_cache")],
    ),
    counter(
        "shimmer_expert_misses",
        "Wanted experts that were not in memory, those under way to it included, once for each work.",
        "",
        &[("", "misses")],
    ),
    counter("shimmer_expert_works", "Works that wanted experts.", "", &[("", "works")]),
    counter("shimmer_expert_reads", "Experts read, for whatever reason.", "", &[("", "reads")]),
    counter(
        "shimmer_expert_read_bytes",
        "Bytes read from files for experts, failed tries included.",
        "",
        &[("", "read_bytes")],
    ),
    counter(
        "shimmer_expert_read_service_seconds",
        "Time inside reads, added over threads.",
        "",
        &[("", "read_service_us")],
    ),
    gauge("shimmer_expert_reads_in_flight", "Reads under way.", "", &[("", "loads_in_flight")]),
    gauge(
        "shimmer_expert_reads_in_flight_max",
        "Most reads that were under way at a time.",
        "",
        &[("", "loads_in_flight_max")],
    ),
    counter(
        "shimmer_expert_read_errors",
        "Experts that could not be read from any copy.",
        "",
        &[("", "read_errors")],
    ),
    counter(
        "shimmer_expert_read_fallbacks",
        "Reads by another copy, files read through the page cache because reading past it was refused, readers without io_uring because it was refused.",
        "reason",
        &[
            ("mirror", "mirror_fallbacks"),
            ("direct", "direct_fallbacks"),
            ("uring", "uring_fallbacks"),
        ],
    ),
    counter(
        "shimmer_expert_slabs_checked",
        "Experts compared with the manifest, once for each copy.",
        "",
        &[("", "slabs_checked")],
    ),
    counter(
        "shimmer_expert_slabs_damaged",
        "Experts that were not as the manifest says.",
        "",
        &[("", "slabs_damaged")],
    ),
    counter(
        "shimmer_expert_copies_set_aside",
        "Times that a copy of the container was set aside because it kept failing.",
        "",
        &[("", "copies_set_aside")],
    ),
    counter("shimmer_prefetch_issued", "Prefetches begun.", "", &[("", "prefetch_issued")]),
    counter(
        "shimmer_prefetch_useful",
        "Prefetched experts that were wanted while they were in memory.",
        "",
        &[("", "prefetch_useful")],
    ),
    counter(
        "shimmer_prefetch_late",
        "Prefetched experts that were wanted before they had come.",
        "",
        &[("", "prefetch_late")],
    ),
    counter(
        "shimmer_prefetch_dropped",
        "Hinted experts that were not read ahead.",
        "reason",
        &[
            ("ring_full", "prefetch_dropped_ring_full"),
            ("started", "prefetch_dropped_started"),
            ("guard", "prefetch_dropped_guard"),
            ("duplicate", "prefetch_dropped_duplicate"),
            ("no_room", "prefetch_dropped_no_room"),
            ("failed", "prefetch_dropped_failed"),
        ],
    ),
    counter(
        "shimmer_expert_evictions",
        "Experts that left memory.",
        "reason",
        &[
            ("demand", "evictions_demand"),
            ("prefetch", "evictions_prefetch"),
            ("shrink", "evictions_shrink"),
            ("claim", "evictions_claim"),
        ],
    ),
    counter(
        "shimmer_expert_repins",
        "Pairs of experts that changed places between pinned and cache.",
        "",
        &[("", "repins")],
    ),
    counter(
        "shimmer_usage_history_save_failures",
        "Times that the usage history could not be written.",
        "",
        &[("", "usage_save_failures")],
    ),
    counter(
        "shimmer_memory_guard_shrinks",
        "Times that the cache was made smaller because memory ran short.",
        "",
        &[("", "guard_shrinks")],
    ),
    gauge("shimmer_memory_mappings", "Mappings that hold slots.", "", &[("", "mappings")]),
    gauge(
        "shimmer_memory_locked_bytes",
        "Bytes of slots that are never swapped out.",
        "",
        &[("", "locked_bytes")],
    ),
    gauge(
        "shimmer_memory_huge_page_bytes",
        "Bytes of slots that lie in huge pages.",
        "",
        &[("", "huge_bytes")],
    ),
    gauge(
        "shimmer_memory_placement_refused",
        "1 if memory should be spread over several nodes and the system refused.",
        "",
        &[("", "placement_refused")],
    ),
    gauge(
        "shimmer_memory_off_node_pages",
        "Pages of slots on another node than asked for.",
        "",
        &[("", "off_node_pages")],
    ),
    gauge(
        "shimmer_expert_resident",
        "Experts in memory, those of them that are pinned.",
        "which",
        &[("all", "experts_resident"), ("pinned", "experts_pinned")],
    ),
    gauge(
        "shimmer_expert_slots",
        "Slots of all layers, those of them without an expert.",
        "which",
        &[("all", "slots"), ("free", "slots_free")],
    ),
    gauge("shimmer_expert_slot_bytes", "Bytes of all slots.", "", &[("", "slot_bytes")]),
];
