use std::fs;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What version 1 says where there is no limit.
const UNLIMITED: &str = "9223372036854771712";

/// Writes files and lists the groups that limit a process there: limit and bytes held, from the inside out.
fn check(files: &[(&str, String)], expected: &[(u64, u64)]) {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let found: Vec<_> =
        groups(root.path()).into_iter().map(|group| (group.limit, group.held)).collect();
    assert_eq!(found, expected);
}

fn own_groups(text: &str) -> (&'static str, String) {
    ("proc/self/cgroup", text.to_owned())
}

fn mounted(lines: &[&str]) -> (&'static str, String) {
    let other = "22 27 0:21 / /proc rw,relatime - proc proc rw";
    ("proc/self/mountinfo", [&[other], lines].concat().join("\n"))
}

const UNIFIED: &str =
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";

fn statistic_two(anon: u64, file: u64, locked: u64) -> String {
    format!(
        "anon {}\nfile {file}\nkernel {}\nslab_reclaimable {}\ninactive_anon {anon}\nactive_anon 0\n\
         inactive_file {file}\nactive_file 0\nunevictable {locked}\n",
        anon + locked,
        3 * MIB,
        2 * MIB,
    )
}

#[test]
fn version_two_takes_every_limit_up_to_the_root() {
    let at = "sys/fs/cgroup/system.slice/shimmer.service";
    check(
        &[
            own_groups("0::/system.slice/shimmer.service\n"),
            mounted(&[UNIFIED]),
            (&format!("{at}/memory.max"), (4 * GIB).to_string()),
            (&format!("{at}/memory.high"), (3 * GIB).to_string()),
            (&format!("{at}/memory.stat"), statistic_two(GIB, 0, 0)),
            ("sys/fs/cgroup/system.slice/memory.max", "max\n".to_owned()),
            ("sys/fs/cgroup/system.slice/memory.high", format!("{}\n", 8 * GIB)),
            ("sys/fs/cgroup/system.slice/memory.stat", statistic_two(2 * GIB, 0, 0)),
        ],
        &[(3 * GIB, GIB + MIB), (8 * GIB, 2 * GIB + MIB)],
    );
}

/// A locked page counts once, page cache and what the kernel can give back not at all.
#[test]
fn page_cache_is_not_used_memory() {
    check(
        &[
            own_groups("0::/\n"),
            mounted(&[UNIFIED]),
            ("sys/fs/cgroup/memory.max", format!("{GIB}\n")),
            ("sys/fs/cgroup/memory.stat", statistic_two(100 * MIB, 800 * MIB, 50 * MIB)),
        ],
        &[(GIB, 151 * MIB)],
    );
}

/// Version 1 rules memory, version 2 is mounted beside it without controllers.
#[test]
fn a_hybrid_host_is_read_where_memory_is_ruled() {
    let memory = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory";
    let unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
    let cpu = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu";
    let statistic = |rss: u64| {
        format!(
            "cache 4247552\nrss {rss}\ninactive_anon 7\nhierarchical_memory_limit {}\ntotal_rss {rss}\n\
             total_inactive_anon {rss}\ntotal_active_anon 4096\ntotal_inactive_file 99999999\n\
             total_unevictable 0\n",
            2 * GIB
        )
    };
    check(
        &[
            own_groups("9:name=systemd:/\n4:memory:/jobs/one\n1:cpu:/\n0::/\n"),
            mounted(&[cpu, memory, unified]),
            ("sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", UNLIMITED.to_owned()),
            ("sys/fs/cgroup/memory/jobs/one/memory.stat", statistic(10 * MIB)),
            ("sys/fs/cgroup/memory/jobs/one/memory.kmem.usage_in_bytes", MIB.to_string()),
            ("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", (2 * GIB).to_string()),
            ("sys/fs/cgroup/memory/jobs/memory.stat", statistic(30 * MIB)),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED.to_owned()),
            ("sys/fs/cgroup/unified/cgroup.procs", String::new()),
        ],
        &[(2 * GIB, 11 * MIB + 4096), (2 * GIB, 30 * MIB + 4096)],
    );
}

/// The path is the host's, what is mounted is the container's own group.
#[test]
fn a_container_without_a_namespace_finds_its_group_at_the_mount() {
    let own = "35 31 0:32 /docker/4f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
    let limit = ("sys/fs/cgroup/memory/memory.limit_in_bytes", GIB.to_string());
    let groups = own_groups("4:memory:/docker/4f\n");
    check(&[groups.clone(), mounted(&[own]), limit.clone()], &[(GIB, 0)]);
    let unrelated = "35 31 0:32 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
    check(&[groups, mounted(&[unrelated]), limit.clone()], &[(GIB, 0)]);
    let outside = own_groups("4:memory:/../../jobs\n");
    check(&[outside, mounted(&[unrelated]), limit], &[(GIB, 0)]);
}

#[test]
fn mounts_may_lie_anywhere() {
    let point = "30 23 0:26 / /mnt/control\\040groups rw - cgroup2 cgroup2 rw";
    check(
        &[
            own_groups("0::/a\n"),
            mounted(&[point]),
            ("mnt/control groups/a/memory.max", GIB.to_string()),
        ],
        &[(GIB, 0)],
    );
}

#[test]
fn no_limit_is_no_group() {
    check(&[], &[]);
    check(&[own_groups("0::/\n"), mounted(&[UNIFIED])], &[]);
    check(&[own_groups("0::/a\n"), mounted(&[])], &[]);
    let max = ("sys/fs/cgroup/memory.max", "max\n".to_owned());
    check(&[own_groups("0::/\n"), mounted(&[UNIFIED]), max], &[]);
}
