//! Calls into the kernel that fail or fall short.

use serde_json::Value;
use shimmer_tests::{cluster::Cluster, faults::Faults, wait::wait_until};

use super::{Bench, SOON, Seen, count, slots, tiers};

/// The fault comes while the engine runs and goes again; before and after it everything is as without it. What the worker
/// has counted is looked at while it lasts.
fn check(fault: &str, mirrored: bool, seen: &Seen<'_>, counted: impl Fn(&Value)) {
    let Some(faults) = Faults::new() else { return };
    let bench = Bench::new();
    for io in ["pread", "buffered"] {
        let cluster = Cluster::start(&bench.options(io, mirrored, Some(&faults)));
        bench.check_same(&cluster, "before the fault");
        let before = slots(&cluster);
        faults.set(fault);
        bench.check_seen(&cluster, seen);
        assert_eq!(slots(&cluster), before, "{fault}");
        counted(&tiers(&cluster));
        faults.set("none");
        bench.check_same(&cluster, "after the fault");
        assert_eq!(slots(&cluster), before, "after {fault}");
    }
}

#[test]
fn short_reads_are_continued_in_a_running_worker() {
    check("short 5000", false, &Seen::Bytes, |tiers| assert_eq!(count(tiers, "read_errors"), 0));
}

#[test]
fn interrupted_reads_are_repeated_in_a_running_worker() {
    check("interrupt", false, &Seen::Bytes, |tiers| assert_eq!(count(tiers, "read_errors"), 0));
}

#[test]
fn a_drive_that_dies_is_replaced_by_its_mirror() {
    check("eio /mirror/", true, &Seen::Bytes, |tiers| {
        assert!(count(tiers, "mirror_fallbacks") > 0 && count(tiers, "read_errors") == 0);
        assert_eq!(count(tiers, "copies_set_aside"), 1);
    });
}

#[test]
fn drives_that_all_die_end_requests_until_one_is_back() {
    let parts = ["reading expert ", " of layer ", "layer-0", "(os error 5)"];
    check("eio /", true, &Seen::Error(&parts), |tiers| assert!(count(tiers, "read_errors") > 0));
    check("eio /", false, &Seen::Error(&parts), |tiers| assert!(count(tiers, "read_errors") > 0));
}

#[test]
fn reading_ahead_may_fail_unseen() {
    check("pilots", false, &Seen::Bytes, |tiers| {
        assert!(count(tiers, "prefetch_dropped_failed") > 0, "{tiers}");
    });
}

#[test]
fn memory_that_is_refused_in_mid_load_is_named_and_asked_for_again() {
    let Some(faults) = Faults::new() else { return };
    let bench = Bench::new();
    // The slots of the first layer are mapped, those of the second are not.
    faults.set("enomem 1");
    let mut cluster = Cluster::launch(&bench.options("pread", false, Some(&faults)));
    wait_until("the refusal", SOON, || {
        let statuses = cluster.worker_statuses().unwrap_or_default();
        statuses.iter().any(|worker| {
            worker.state == "refused" && worker.detail.contains("bytes for experts of layer")
        })
    });
    assert_eq!(count(&tiers(&cluster), "experts_resident"), 0);
    faults.set("none");
    cluster.wait_until_serving(1);
    assert_eq!(slots(&cluster), 6, "two slots for each of three layers");
    bench.check_same(&cluster, "after the refusal");
    assert_eq!(slots(&cluster), 6);
}
