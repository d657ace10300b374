//! Memory and threads on machines with several nodes: natively as far as this machine allows, and in an emulated machine
//! with two nodes. That proves where pages and threads lie, and nothing about speed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Where `./test` has put a kernel for the emulated machine.
const KERNEL: &str = "SHIMMER_TEST_GUEST_KERNEL";
const PROBE: &str = env!("CARGO_BIN_EXE_numa_probe");
/// Pages of what the scenario `spread` touches.
const PAGES: u64 = 10_240;

/// A report's placement: the nodes found, the kernel's name of the policy, the processors of each thread.
fn check(report: &Value, nodes: &[u32], policy: &str, threads: &[&str]) {
    assert_eq!(report["nodes"], serde_json::json!(nodes), "{report}");
    assert_eq!(report["found"]["policy"], policy, "{report}");
    assert_eq!(report["thread_cpus"], serde_json::json!(threads), "{report}");
    let memory = &report["found"]["memory"];
    let interleaved = if policy == "default" { 0 } else { nodes.len() };
    assert_eq!(memory["interleaved_nodes"], interleaved, "{report}");
    assert_eq!(memory["placement_refused"], 0, "{report}");
    assert_eq!(memory["mappings"], 1, "{report}");
}

/// Pages by node, as the kernel counts them.
fn pages(report: &Value) -> BTreeMap<u32, u64> {
    let pages = report["found"]["pages"].as_object().unwrap();
    pages.iter().map(|(node, pages)| (node.parse().unwrap(), pages.as_u64().unwrap())).collect()
}

/// A model of 76 layers with 256 experts each needs few of the mappings that the kernel allows.
fn check_mappings(report: &Value) {
    let found = &report["found"];
    assert_eq!(found["slots"], 19_456, "{report}");
    assert_eq!(found["mappings"], 76, "{report}");
    let [all, allowed] =
        ["mappings_of_the_process", "mappings_allowed"].map(|key| found[key].as_u64());
    assert!(all.unwrap() < 1_000 && 1_000 < allowed.unwrap() / 10, "{report}");
}

fn probe(scenario: &str) -> Value {
    let output = Command::new(PROBE).arg(scenario).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn on_one_node_memory_and_threads_are_left_alone() {
    for scenario in ["spread", "off"] {
        let report = probe(scenario);
        let several = report["nodes"].as_array().unwrap().len() > 1;
        if several && scenario == "spread" {
            println!(
                "this machine has several nodes; the emulated one says what is expected of them"
            );
            continue;
        }
        let nodes: Vec<u32> = serde_json::from_value(report["nodes"].clone()).unwrap();
        let own = report["own_cpus"].as_str().unwrap();
        if report["found"]["policy"].is_null() {
            println!("this kernel says nothing about nodes");
            continue;
        }
        check(&report, &nodes, "default", &[own, own]);
        assert_eq!(pages(&report).values().sum::<u64>(), PAGES);
        assert_eq!(report["found"]["survey"]["off_node_pages"], 0);
    }
}

#[test]
fn all_slots_of_a_large_model_are_few_mappings_of_the_process() {
    check_mappings(&probe("slots"));
}

/// Boots the emulated machine; reports by situation.
fn boot(kernel: &Path) -> BTreeMap<String, Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("numa/boot.sh");
    let output = Command::new(script).arg(kernel).arg(PROBE).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let failed = || format!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", failed());
    let reports: BTreeMap<_, _> = text
        .lines()
        .filter_map(|line| line.split_once("RESULT ")?.1.split_once(' '))
        .map(|(name, json)| {
            let report = serde_json::from_str(json);
            (name.to_owned(), report.unwrap_or_else(|error| panic!("{error}: {}", failed())))
        })
        .collect();
    assert_eq!(reports.len(), 7, "{}", failed());
    reports
}

#[test]
fn two_nodes_share_the_pages_of_slots_and_the_threads() {
    let Some(kernel) = std::env::var_os(KERNEL).map(PathBuf::from) else {
        println!("skipped: {KERNEL} names no kernel for an emulated machine with two nodes");
        return;
    };
    let reports = boot(&kernel);

    for (name, source) in [("spread", "hwloc"), ("sysfs", "sysfs")] {
        let report = &reports[name];
        assert_eq!(report["source"], source, "{report}");
        check(report, &[0, 1], "interleave:0-1", &["0", "1"]);
        // One thread wrote all pages, half of them twice with a release between. Huge pages may make the halves uneven.
        let pages = pages(report);
        assert_eq!(pages.values().sum::<u64>(), PAGES, "{report}");
        assert!(pages.values().all(|count| count.abs_diff(PAGES / 2) <= 1024), "{report}");
        assert_eq!(report["found"]["survey"]["off_node_pages"], 0, "{report}");
        assert_eq!(report["own_cpus"], "0-1", "the mask of the process is as it was");
    }

    check(&reports["off"], &[0, 1], "default", &["0-1", "0-1"]);

    // A control group that allows the second node's memory: threads run anywhere, and nothing is refused.
    let report = &reports["one_node_of_memory"];
    check(report, &[1], "default", &["0-1", "0-1"]);
    assert_eq!(pages(report), BTreeMap::from([(1, PAGES)]), "{report}");

    // Started with one processor: that mask is kept, and its node is the only one.
    let report = &reports["one_processor"];
    check(report, &[1], "default", &["1", "1"]);
    assert_eq!(pages(report), BTreeMap::from([(1, PAGES)]), "{report}");

    check_mappings(&reports["slots"]);

    // The second node is full: the first gives what it cannot, and the survey says so.
    let report = &reports["crowded"];
    let pages = pages(report);
    let uneven = pages[&0] - pages[&1];
    let off_node = report["found"]["survey"]["off_node_pages"].as_u64().unwrap();
    assert!(off_node > 0 && off_node < uneven, "{report}");
}
