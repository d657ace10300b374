use super::*;

fn node(id: u32, cores: &[&[u32]]) -> Node {
    Node { id, cores: cores.iter().map(|cpus| Core { cpus: cpus.to_vec() }).collect() }
}

/// Two nodes of two cores with two hardware threads each, numbered as Linux does.
fn two_nodes() -> Vec<Node> {
    vec![node(0, &[&[0, 4], &[1, 5]]), node(1, &[&[2, 6], &[3, 7]])]
}

#[test]
fn lists_of_the_kernel_are_read() {
    for (text, expected) in [
        ("0-3,8,10-11\n", Some(vec![0, 1, 2, 3, 8, 10, 11])),
        ("\t0", Some(vec![0])),
        ("\n", Some(vec![])),
        ("3-1", None),
        ("a", None),
        ("0-4294967295", None),
    ] {
        assert_eq!(parse_list(text), expected, "{text:?}");
    }
}

#[test]
fn only_allowed_processors_and_nodes_are_used() {
    let check = |status: &str, expected: Vec<Node>| {
        assert_eq!(Allowed::parse(status).restrict(two_nodes()), expected, "{status}");
    };
    check("", two_nodes());
    check("Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0-1\n", two_nodes());
    check("Mems_allowed_list:\t1\n", vec![node(1, &[&[2, 6], &[3, 7]])]);
    check("Cpus_allowed_list:\t1,3,6\n", vec![node(0, &[&[1]]), node(1, &[&[3], &[6]])]);
    // Memory without processors beside it is left alone.
    check("Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0-1\n", vec![node(0, &[&[0], &[1]])]);
}

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    root
}

#[test]
fn sysfs_describes_nodes_and_cores() {
    let root = tree(&[
        ("node/online", "0-2\n"),
        ("node/node0/cpulist", "0-1,4-5\n"),
        ("node/node1/cpulist", "2-3,6-7\n"),
        ("node/node2/cpulist", "\n"),
        ("cpu/cpu0/topology/core_cpus_list", "0,4\n"),
        ("cpu/cpu4/topology/core_cpus_list", "0,4\n"),
        ("cpu/cpu1/topology/thread_siblings_list", "1,5\n"),
        ("cpu/cpu5/topology/thread_siblings_list", "1,5\n"),
    ]);
    let found = sysfs::read(root.path());
    let lonely = node(1, &[&[2], &[3], &[6], &[7]]);
    assert_eq!(found, [node(0, &[&[0, 4], &[1, 5]]), lonely.clone(), node(2, &[])]);
    assert_eq!(Allowed::default().restrict(found), [node(0, &[&[0, 4], &[1, 5]]), lonely]);
}

#[test]
fn a_system_that_describes_nothing_is_one_node() {
    assert_eq!(sysfs::read(Path::new("/nonexistent")), [node(0, &[&[0]])]);
    let root = tree(&[("cpu/online", "0-2")]);
    assert_eq!(sysfs::read(root.path()), [node(0, &[&[0], &[1], &[2]])]);
}

#[test]
fn this_machine_is_described_alike_by_both_sources() {
    let detected = Topology::detect();
    assert!(detected.cores() > 0);
    let allowed = Allowed::of_this_thread();
    let nodes = allowed.restrict(sysfs::read(Path::new("/sys/devices/system")));
    assert_eq!(detected.nodes(), nodes, "{}", detected.source());
    let built_in =
        if cfg!(feature = "hwloc") { TopologySource::Hwloc } else { TopologySource::Sysfs };
    assert_eq!(detected.source(), built_in);
}
