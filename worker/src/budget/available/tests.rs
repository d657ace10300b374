use std::fs;

use super::*;

const MIB: u64 = 1 << 20;

/// Writes files and measures in their tree.
fn check(files: &[(&str, &str)], expected: Available) {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    assert_eq!(Available::read(root.path()), expected, "{files:?}");
}

#[test]
fn the_host_says_what_it_can_give() {
    let host = |bytes| Available { host: Some(bytes), group: None };
    let plain = "MemTotal: 24684100 kB\nMemFree: 100 kB\nMemAvailable:   1048576 kB\n";
    check(&[("proc/meminfo", plain)], host(1024 * MIB));
    let older = "MemFree: 65536 kB\nActive(file): 65536 kB\nInactive(file): 131072 kB\n";
    check(&[("proc/meminfo", older)], host(256 * MIB));
}

/// A probe that gives 0 must not become a budget of 0.
#[test]
fn impossible_figures_are_not_believed() {
    check(&[], Available::default());
    check(&[("proc/meminfo", "MemAvailable: 0 kB\n")], Available::default());
    check(&[("proc/meminfo", "MemAvailable: many\n")], Available::default());
    let group = [
        ("proc/self/cgroup", "0::/\n"),
        ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("sys/fs/cgroup/memory.max", "4096\n"),
    ];
    check(&group, Available::default());
}

#[test]
fn this_host_has_memory() {
    let (bytes, _) = Available::measure().smallest().expect("this host says what it has");
    assert!(bytes > 0);
    assert!(anonymous_bytes().is_some_and(|held| held > 0));
}

#[test]
fn anonymous_memory_is_read_from_the_status() {
    let status = "VmRSS:\t   20000 kB\nRssAnon:\t    1234 kB\nRssFile:\t   18766 kB\n";
    assert_eq!(parse_anonymous(status), Some(1234 << 10));
    assert_eq!(parse_anonymous("VmRSS:\t 20000 kB\n"), None);
}
