use std::{fs, path::Path, time::Duration};

use shimmer_proto::tls::Dialer;
use shimmer_worker::{budget::Available, io::probe::Speed};

use super::{facts::Opened, *};

const GIB: u64 = 1 << 30;

fn unread<T>() -> Known<T> {
    Err("permission denied".to_owned())
}

/// A host on which everything is as it should be.
fn good() -> Facts {
    Facts {
        host: HostFacts {
            kernel: Ok("6.12.0".to_owned()),
            cpus: 8,
            isa: "avx512".to_owned(),
            quota: Ok(None),
            throttled: Ok(0),
            open_files: Ok(Some(65_536)),
            nodes: 1,
            cores: 8,
            numa_balancing: Ok(0),
            zone_reclaim: Ok(0),
        },
        memory: MemoryFacts {
            available: Available { host: Some(64 * GIB), group: None },
            lock_limit: Ok(None),
            max_map_count: Ok(262_144),
            huge_pages: Ok("madvise".to_owned()),
            huge_reserved: Ok(0),
            swap: Ok(0),
        },
        gpu: GpuFacts {
            driver: Ok(Some("550.54.15".to_owned())),
            devices: vec!["nvidia0".to_owned()],
            library: Ok(()),
        },
        drive: DriveFacts {
            path: Some("file".to_owned()),
            uring: Ok(()),
            uring_disabled: Ok(0),
            direct: Some(Ok(512)),
            network: None,
            speed: Some(Ok(Speed { bytes: 4 * GIB, seconds: 2.0, direct: true })),
        },
        clock: ClockFacts {
            source: Ok("tsc".to_owned()),
            drift: Duration::from_micros(80),
            looked: Duration::from_secs(2),
            offset: Some(Ok(0.0)),
            year: 2026,
        },
        container: Some(ContainerFacts {
            path: "glm".to_owned(),
            there: true,
            opened: Ok(Opened {
                digest: "ab".repeat(32),
                files: 34,
                expert_bytes: 8 * GIB,
                absent_layers: 0,
            }),
            verified: Some(Ok((9 * GIB, Vec::new()))),
            fits: Ok(1000),
        }),
        etcd: Some(EtcdFacts {
            name: "etcd at https://e:2379, cluster c".to_owned(),
            answer: Ok((Duration::from_millis(40), 3, Ok(Duration::from_millis(2)))),
            tls: true,
            user: true,
        }),
        peers: vec![PeerFacts {
            address: "a:1".to_owned(),
            answer: Ok((
                Duration::from_millis(1),
                Duration::from_micros(200),
                PeerKind::Worker {
                    id: "w".to_owned(),
                    build: "shimmer/1".to_owned(),
                    draining: false,
                },
            )),
        }],
    }
}

#[test]
fn a_good_host_is_ok_in_every_respect() {
    let findings = judge(&good());
    let bad: Vec<_> = findings.iter().filter(|finding| finding.level != Level::Ok).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert_eq!(findings.len(), 24);
    assert!(findings.iter().all(|finding| finding.fix.is_none()));
}

/// Changes one fact; one finding changes, to this level, with these parts of its text and its fix.
fn check(change: impl FnOnce(&mut Facts), name: &str, level: Level, found: &str, fix: &str) {
    let mut facts = good();
    change(&mut facts);
    let (before, after) = (judge(&good()), judge(&facts));
    let changed: Vec<_> = after.iter().filter(|finding| !before.contains(finding)).collect();
    let [finding] = changed.as_slice() else { panic!("{name}: {changed:#?}") };
    assert_eq!((finding.check.as_str(), finding.level), (name, level), "{finding:#?}");
    assert!(finding.found.contains(found), "{:?} lacks {found:?}", finding.found);
    match (&finding.fix, fix) {
        (None, "") => {
            assert!(finding.level < Level::Warn, "nobody is told what to do: {finding:#?}")
        }
        (Some(found), part) if !part.is_empty() => assert!(found.contains(part), "{found}"),
        (found, _) => panic!("{found:?} instead of {fix:?}"),
    }
}

#[test]
fn each_fault_of_a_host_is_found_with_its_fix() {
    use Level::{Fail, Note, Warn};
    check(|f| f.host.isa = "scalar".to_owned(), "processor", Warn, "without AVX2", "-cpu host");
    check(|f| f.host.quota = Ok(Some(2.5)), "cpu limit", Warn, "allows 2.50", "--threads 2");
    check(|f| f.host.quota = Ok(Some(0.5)), "cpu limit", Warn, "allows 0.50", "--threads 1");
    let throttled = |f: &mut Facts| (f.host.quota, f.host.throttled) = (Ok(Some(8.0)), Ok(7));
    check(throttled, "cpu limit", Note, "stood still in 7 periods", "");
    check(|f| f.host.open_files = Ok(Some(512)), "open files", Warn, "up to 512", "LimitNOFILE");
    check(|f| f.host.open_files = Ok(Some(64)), "open files", Fail, "up to 64", "ulimit -n");
    let nodes = |f: &mut Facts| (f.host.nodes, f.host.numa_balancing) = (2, Ok(1));
    check(nodes, "numa", Note, "2 memory nodes", "kernel.numa_balancing=0");
    let nodes = |f: &mut Facts| (f.host.nodes, f.host.zone_reclaim) = (2, Ok(1));
    check(nodes, "numa", Warn, "2 memory nodes", "vm.zone_reclaim_mode=0");
    check(|f| f.memory.available = Available::default(), "memory", Warn, "neither", "--ram");
    check(|f| f.memory.lock_limit = Ok(Some(1)), "locked memory", Note, "1 bytes", "LimitMEMLOCK");
    check(|f| f.memory.max_map_count = Ok(1000), "max_map_count", Warn, "1000", "262144");
    let never = |f: &mut Facts| f.memory.huge_pages = Ok("never".to_owned());
    check(never, "huge pages", Warn, "never", "echo madvise");
    check(|f| f.memory.huge_reserved = Ok(GIB), "reserved pages", Warn, "1.00 GiB", "nr_hugepages");
    check(|f| f.memory.swap = Ok(GIB), "swap", Note, "1.00 GiB", "swapoff");
    let slow = |f: &mut Facts| f.clock.source = Ok("hpet".to_owned());
    check(slow, "clock source", Warn, "hpet", "echo tsc");
    check(|f| f.clock.year = 1970, "clock", Fail, "1970", "set-ntp");
    let step = |f: &mut Facts| f.clock.drift = Duration::from_secs(3);
    check(step, "clock", Warn, "3000 ms", "makestep");
    check(|f| f.clock.offset = Some(Ok(-5.0)), "clock offset", Warn, "-5 s", "set-ntp");
    check(|f| f.clock.offset = None, "clock offset", Note, "not compared", "");
}

#[test]
fn each_fault_of_devices_and_containers_is_found_with_its_fix() {
    use Level::{Fail, Note, Warn};
    let none = |f: &mut Facts| {
        f.gpu = GpuFacts { driver: Ok(None), devices: Vec::new(), library: unread() };
    };
    check(none, "gpu", Note, "no NVIDIA driver", "");
    check(|f| f.gpu.devices.clear(), "gpu", Warn, "no device file", "--gpus all");
    let library = |f: &mut Facts| f.gpu.library = Err("not found".to_owned());
    check(library, "gpu", Warn, "libcuda does not load: not found", "compute,utility");
    check(|f| f.gpu.driver = unread(), "gpu", Note, "permission denied", "");
    let half = |f: &mut Facts| (f.gpu.driver, f.gpu.devices) = (Ok(None), Vec::new());
    check(half, "gpu", Warn, "kernel module is not", "modprobe");
    check(|f| f.drive.uring = unread(), "io_uring", Note, "--io pread", "seccomp");
    let off = |f: &mut Facts| (f.drive.uring, f.drive.uring_disabled) = (unread(), Ok(2));
    check(off, "io_uring", Note, "io_uring_disabled is 2", "kernel.io_uring_disabled=0");
    check(|f| f.drive.direct = Some(unread()), "O_DIRECT", Warn, "page cache", "ext4 or XFS");
    check(|f| f.drive.network = Some("NFS"), "file system", Warn, "NFS", "mirror stage");
    let slow = |f: &mut Facts| {
        f.drive.speed = Some(Ok(Speed { bytes: GIB, seconds: 8.0, direct: true }));
    };
    check(slow, "drive speed", Warn, "0.13 GB/s", "NVMe");
    let cached = |f: &mut Facts| {
        f.drive.speed = Some(Ok(Speed { bytes: GIB, seconds: 8.0, direct: false }));
    };
    check(cached, "drive speed", Note, "through the page cache", "");
    check(|f| f.drive.speed = Some(unread()), "drive speed", Fail, "permission denied", "--disk");
    let of = |f: &mut Facts| f.container.take().unwrap();
    let changed = |change: fn(&mut ContainerFacts)| {
        move |f: &mut Facts| {
            let mut container = of(f);
            change(&mut container);
            f.container = Some(container);
        }
    };
    check(changed(|c| c.verified = None), "contents", Note, "not hashed", "--full");
    let fault = changed(|c| c.verified = Some(Ok((1, vec!["trunk: damaged".to_owned()]))));
    check(fault, "contents", Fail, "1 faults, the first: trunk: damaged", "remove the named file");
    check(changed(|c| c.fits = unread()), "plan", Fail, "denied", "shimmer plan --container glm");
    let unhashed = changed(|c| c.verified = Some(unread()));
    check(unhashed, "contents", Fail, "permission denied", "let this user read");
    let absent = changed(|c| c.opened.as_mut().unwrap().absent_layers = 3);
    check(absent, "container", Note, "3 layers have no file here", "");
}

#[test]
fn a_container_that_cannot_be_opened_fails_alone() {
    let mut facts = good();
    facts.container.as_mut().unwrap().opened = Err("manifest.json: not there".to_owned());
    let findings = judge(&facts);
    let failed: Vec<_> = findings.iter().filter(|finding| finding.level == Level::Fail).collect();
    assert_eq!(failed.len(), 1, "{failed:#?}");
    assert!(failed[0].fix.as_ref().unwrap().contains("shimmer verify glm"));
    facts.container.as_mut().unwrap().there = false;
    let findings = judge(&facts);
    let failed = findings.iter().find(|finding| finding.level == Level::Fail).unwrap();
    assert!(failed.fix.as_ref().unwrap().contains("shimmer convert"), "{failed:#?}");
}

#[test]
fn each_fault_of_members_is_found_with_its_fix() {
    use Level::{Fail, Note, Warn};
    let etcd = |change: fn(&mut EtcdFacts)| move |f: &mut Facts| change(f.etcd.as_mut().unwrap());
    let gone = |f: &mut Facts| {
        f.etcd.as_mut().unwrap().answer = Err("no answer within 5 s".to_owned());
    };
    let mut facts = good();
    gone(&mut facts);
    let failed = judge(&facts).into_iter().filter(|finding| finding.level == Fail).count();
    assert_eq!(failed, 1);
    let plain = etcd(|e| (e.tls, e.name) = (false, "etcd at http://e:2379".to_owned()));
    check(plain, "etcd", Note, "plaintext", "--etcd-ca");
    let local = etcd(|e| (e.tls, e.name) = (false, "etcd at http://127.0.0.1:2379".to_owned()));
    check(local, "etcd", Level::Ok, "plaintext", "");
    let slow = etcd(|e| e.answer.as_mut().unwrap().2 = Ok(Duration::from_secs(1)));
    check(slow, "etcd latency", Warn, "1000.00 ms", "drive of its own");
    let refused = etcd(|e| e.answer.as_mut().unwrap().2 = Err("permission denied".to_owned()));
    check(refused, "etcd latency", Fail, "permission denied", "grant");
    let peer = |change: fn(&mut PeerFacts)| move |f: &mut Facts| change(&mut f.peers[0]);
    let silent = peer(|p| p.answer = Err("no answer within 5000 ms".to_owned()));
    check(silent, "peer a:1", Fail, "no answer", "NetworkPolicy");
    let far = peer(|p| p.answer.as_mut().unwrap().1 = Duration::from_millis(9));
    check(far, "peer a:1", Warn, "9.00 ms", "rack or zone");
    let other = peer(|p| {
        p.answer.as_mut().unwrap().2 = PeerKind::Refuses("container_digest differs".to_owned());
    });
    check(other, "peer a:1", Fail, "container_digest differs", "same container");
    let stranger = peer(|p| p.answer.as_mut().unwrap().2 = PeerKind::Stranger);
    check(stranger, "peer a:1", Fail, "neither worker nor coordinator", "--listen");
    let leaving = peer(|p| {
        let (id, build) = ("w".to_owned(), "b".to_owned());
        p.answer.as_mut().unwrap().2 = PeerKind::Worker { id, build, draining: true };
    });
    check(leaving, "peer a:1", Note, "about to leave", "");
    let alive = peer(|p| p.answer.as_mut().unwrap().2 = PeerKind::Healthy);
    check(alive, "peer a:1", Level::Ok, "--container compares more", "");
    let coordinator = peer(|p| {
        let (build, digest) = ("b".to_owned(), "ab".repeat(32));
        p.answer.as_mut().unwrap().2 = PeerKind::Coordinator { build, digest };
    });
    check(coordinator, "peer a:1", Level::Ok, "coordinator, b, container abababababab", "");
}

/// A tree with files of `/proc` and `/sys`.
fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

#[test]
fn a_restricted_container_is_judged_by_what_it_shows() {
    let root = tempfile::tempdir().unwrap();
    let facts = Facts {
        host: read::host(root.path()),
        memory: read::memory(root.path()),
        gpu: read::gpu(root.path()),
        drive: read::drive(root.path(), None, None),
        clock: read::clock(root.path(), read::Clocks::now(), None),
        container: None,
        etcd: None,
        peers: Vec::new(),
    };
    let findings = judge(&facts);
    let failed: Vec<_> = findings.iter().filter(|finding| finding.level == Level::Fail).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let unread = |name: &str| {
        findings.iter().any(|f| f.check == name && f.found.starts_with("could not be read: /"))
    };
    for name in
        ["kernel", "cpu limit", "open files", "locked memory", "max_map_count", "huge pages"]
    {
        assert!(unread(name), "{name}: {findings:#?}");
    }
}

#[test]
fn files_of_the_kernel_are_read() {
    let root = tree(&[
        (
            "proc/self/limits",
            "Limit  Soft Hard Units\nMax open files            1024                 4096                 files\nMax locked memory         unlimited            unlimited            bytes\n",
        ),
        ("proc/self/cgroup", "0::/kube/pod\n"),
        ("sys/fs/cgroup/kube/pod/cpu.max", "250000 100000\n"),
        ("sys/fs/cgroup/kube/pod/cpu.stat", "usage_usec 5\nnr_throttled 12\n"),
        (
            "proc/meminfo",
            "MemAvailable: 1048576 kB\nSwapTotal:    2048 kB\nHugePages_Total:       3\nHugepagesize:       2048 kB\n",
        ),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ("proc/sys/vm/max_map_count", "65530\n"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n",
        ),
        ("dev/nvidia0", ""),
        ("dev/nvidia10", ""),
        ("dev/nvidiactl", ""),
    ]);
    let (host, memory, gpu) =
        (read::host(root.path()), read::memory(root.path()), read::gpu(root.path()));
    assert_eq!(host.open_files, Ok(Some(1024)));
    assert_eq!((host.quota, host.throttled), (Ok(Some(2.5)), Ok(12)));
    assert_eq!(memory.lock_limit, Ok(None));
    assert_eq!(memory.huge_pages.as_deref(), Ok("madvise"));
    assert_eq!((memory.huge_reserved, memory.swap), (Ok(6 << 20), Ok(2 << 20)));
    assert_eq!(memory.max_map_count, Ok(65_530));
    assert_eq!(gpu.driver, Ok(Some("550.54.15".to_owned())));
    assert_eq!(gpu.devices, ["nvidia0", "nvidia10"]);
}

#[test]
fn limits_of_older_control_groups_are_read() {
    let check = |files: &[(&str, &str)], expected: Known<Option<f64>>| {
        assert_eq!(read::host(tree(files).path()).quota, expected, "{files:?}");
    };
    check(&[("sys/fs/cgroup/cpu.max", "max 100000\n")], Ok(None));
    let one = |quota| {
        [
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000"),
        ]
    };
    check(&one("-1"), Ok(None));
    check(&one("150000"), Ok(Some(1.5)));
    check(&[("sys/fs/cgroup/other", "")], Ok(None));
    check(&[("sys/fs/cgroup/cpu.max", "what\n")], Err("cpu.max: \"what\"".to_owned()));
}

#[test]
fn a_file_that_is_made_for_a_speed_test_goes() {
    let directory = tempfile::tempdir().unwrap();
    let facts = read::drive(Path::new("/"), None, Some(directory.path()));
    let speed = facts.speed.unwrap().unwrap();
    assert!(speed.bytes > 0 && speed.bytes <= 64 << 20, "{speed:?}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let facts = read::drive(Path::new("/"), None, Some(Path::new("/nonexistent")));
    assert!(facts.speed.unwrap().unwrap_err().contains("cannot write a file"));
    assert_eq!(facts.path.as_deref(), Some("/nonexistent"));
}

#[test]
fn dates_of_http_are_seconds() {
    let check = |date: &str, expected| assert_eq!(reach::seconds_of(date), expected, "{date}");
    check("Thu, 01 Jan 1970 00:00:00 GMT", Some(0));
    check(" Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777));
    check("Thu, 29 Feb 2024 12:00:00 GMT", Some(1_709_208_000));
    check("Sun, 06 Nov 1994", None);
    check("", None);
}

#[test]
fn a_server_that_is_no_member_is_no_peer() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answer = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string().parse().unwrap();
        // As etcd: health checks of the whole server, and services of its own.
        let (_reporter, health) = tonic_health::server::health_reporter();
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = tonic::transport::Server::builder().add_service(health);
        let dialer = Dialer::plaintext();
        tokio::select! {
            ended = server.serve_with_incoming(incoming) => panic!("the server ended: {ended:?}"),
            peer = reach::peer(&address, &dialer, None) => peer.answer,
        }
    });
    assert!(matches!(answer, Ok((_, _, PeerKind::Stranger))), "{answer:?}");
}
