//! Fills [`Facts`](super::Facts) from this host. Files are read below a root, so that tests can show another one.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use shimmer_kernels::Kernels;
use shimmer_model::{Container, MANIFEST_FILE, Manifest, verify};
use shimmer_worker::{
    TierOptions,
    budget::Available,
    io::probe,
    memory::{Topology, library_loads},
};

use super::{
    ClockFacts, ContainerFacts, DriveFacts, GpuFacts, HostFacts, Known, MemoryFacts, facts::Opened,
};
use crate::local::ProcessPlan;

/// A speed test reads this much at most, and for as long at most.
const SPEED_BYTES: u64 = 512 << 20;
const SPEED_LIMIT: Duration = Duration::from_secs(2);
/// Threads of a speed test: as many as a worker reads with.
const SPEED_THREADS: usize = 4;
/// Size of a file that is made for a speed test where there is no container.
const FILE_BYTES: usize = 64 << 20;

/// The text of a file below a root, without the end of its line; or why it cannot be read.
fn text(root: &Path, path: &str) -> Known<String> {
    match fs::read_to_string(root.join(path)) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) => Err(format!("/{path}: {error}")),
    }
}

fn number(root: &Path, path: &str) -> Known<u64> {
    let text = text(root, path)?;
    text.parse().map_err(|_| format!("/{path}: {text:?} is no number"))
}

/// Kernel, processors and limits.
pub(crate) fn host(root: &Path) -> HostFacts {
    let topology = Topology::detect();
    HostFacts {
        kernel: text(root, "proc/sys/kernel/osrelease"),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        isa: Kernels::new(None).map_or_else(|error| error.to_string(), |k| k.isa().to_string()),
        quota: quota(root),
        throttled: throttled(root),
        open_files: limit(root, "Max open files"),
        nodes: topology.nodes().len(),
        cores: topology.cores(),
        numa_balancing: number(root, "proc/sys/kernel/numa_balancing"),
        zone_reclaim: number(root, "proc/sys/vm/zone_reclaim_mode"),
    }
}

/// The soft limit of this process; none if it is unlimited.
fn limit(root: &Path, name: &str) -> Known<Option<u64>> {
    const PATH: &str = "proc/self/limits";
    let limits = text(root, PATH)?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name));
    let soft = line.and_then(|line| line.split_whitespace().next());
    match soft {
        Some("unlimited") => Ok(None),
        Some(soft) => {
            soft.parse().map(Some).map_err(|_| format!("/{PATH}: {name}: {soft:?} is no number"))
        }
        None => Err(format!("/{PATH} does not name {name}")),
    }
}

/// Directories in which the control group of this process may show itself, its own first.
fn groups(root: &Path, file: &str) -> Vec<PathBuf> {
    let own = text(root, "proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let own = format!("sys/fs/cgroup/{path}");
    [own.as_str(), "sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/cpu"]
        .iter()
        .map(|directory| root.join(directory).join(file))
        .collect()
}

fn first_of(paths: &[PathBuf]) -> Option<String> {
    paths.iter().find_map(|path| fs::read_to_string(path).ok())
}

/// Processors' worth of time of the own control group, version 2 or 1.
fn quota(root: &Path) -> Known<Option<f64>> {
    let parse = |quota: &str, period: &str| {
        if quota == "max" || quota.starts_with('-') {
            return Some(None);
        }
        let (quota, period) = (quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?);
        (period > 0.0).then_some(Some(quota / period))
    };
    if let Some(text) = first_of(&groups(root, "cpu.max")) {
        let (quota, period) = text.trim().split_once(' ').unwrap_or((text.trim(), "100000"));
        return parse(quota, period).ok_or_else(|| format!("cpu.max: {:?}", text.trim()));
    }
    let version_one = ["cpu.cfs_quota_us", "cpu.cfs_period_us"].map(|f| first_of(&groups(root, f)));
    if let [Some(quota), Some(period)] = version_one {
        return parse(quota.trim(), period.trim())
            .ok_or_else(|| format!("cpu.cfs_quota_us: {:?}", quota.trim()));
    }
    // The root of a hierarchy has no such file, and no limit.
    if root.join("sys/fs/cgroup").is_dir() {
        return Ok(None);
    }
    Err("/sys/fs/cgroup is not there".to_owned())
}

fn throttled(root: &Path) -> Known<u64> {
    let text = first_of(&groups(root, "cpu.stat")).ok_or("no cpu.stat")?;
    let value = text.lines().find_map(|line| line.strip_prefix("nr_throttled "));
    value.and_then(|value| value.trim().parse().ok()).ok_or_else(|| "no nr_throttled".to_owned())
}

/// Memory and how it is given.
pub(crate) fn memory(root: &Path) -> MemoryFacts {
    let field = |name: &str| {
        let meminfo = text(root, "proc/meminfo")?;
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(|line| line.trim().to_owned())
            .ok_or_else(|| format!("/proc/meminfo does not name {name}"))
    };
    let kib = |name: &str| {
        let text = field(name)?;
        let kib = text.trim_end_matches(" kB").parse::<u64>();
        kib.map(|kib| kib.saturating_mul(1024)).map_err(|_| format!("/proc/meminfo: {name}"))
    };
    let count =
        |name: &str| field(name)?.parse::<u64>().map_err(|_| format!("/proc/meminfo: {name}"));
    MemoryFacts {
        available: Available::read(root),
        lock_limit: limit(root, "Max locked memory"),
        max_map_count: number(root, "proc/sys/vm/max_map_count"),
        huge_pages: text(root, "sys/kernel/mm/transparent_hugepage/enabled").and_then(|text| {
            let chosen = text.split('[').nth(1).and_then(|rest| rest.split(']').next());
            chosen.map(str::to_owned).ok_or_else(|| format!("{text:?} chooses nothing"))
        }),
        huge_reserved: count("HugePages_Total")
            .and_then(|pages| Ok(pages.saturating_mul(kib("Hugepagesize")?))),
        swap: kib("SwapTotal"),
    }
}

/// NVIDIA's driver, as far as it shows itself.
pub(crate) fn gpu(root: &Path) -> GpuFacts {
    const VERSION: &str = "proc/driver/nvidia/version";
    let driver = match fs::read_to_string(root.join(VERSION)) {
        Ok(text) => {
            let line = text.lines().next().unwrap_or_default();
            // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ..."
            let version = line.split_whitespace().find(|word| {
                word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.')
            });
            Ok(Some(version.unwrap_or(line).to_owned()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("/{VERSION}: {error}")),
    };
    let entries = fs::read_dir(root.join("dev")).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_gpu = |name: &String| {
        let number = name.strip_prefix("nvidia");
        number.is_some_and(|n| !n.is_empty() && n.chars().all(|c| c.is_ascii_digit()))
    };
    let mut devices: Vec<String> = names.filter(is_gpu).collect();
    devices.sort();
    GpuFacts { driver, devices, library: library_loads("libcuda.so.1") }
}

/// The drive below a container, or below a directory in which a file is made and removed.
pub(crate) fn drive(root: &Path, container: Option<&Path>, disk: Option<&Path>) -> DriveFacts {
    let mut facts = DriveFacts {
        path: None,
        uring: probe::uring().map_err(|error| error.to_string()),
        uring_disabled: number(root, "proc/sys/kernel/io_uring_disabled"),
        direct: None,
        network: None,
        speed: None,
    };
    let made = disk.map(Made::new);
    let path = match &made {
        Some(Ok(made)) => Some(made.0.clone()),
        Some(Err(why)) => {
            facts.path = disk.map(|disk| disk.display().to_string());
            facts.speed = Some(Err(why.clone()));
            return facts;
        }
        None => container.and_then(largest),
    };
    let Some(path) = path else { return facts };
    facts.path = Some(path.display().to_string());
    let flat = |error: std::io::Error| error.to_string();
    let cannot_read = |error: std::io::Error| format!("cannot be read: {error}");
    facts.network = probe::network(&path).unwrap_or_default();
    facts.direct = Some(probe::direct(&path).map_err(flat).and_then(|direct| direct));
    facts.speed = Some(
        probe::read_speed(&path, SPEED_THREADS, SPEED_BYTES, SPEED_LIMIT).map_err(cannot_read),
    );
    facts
}

/// The largest file of a directory: a layer of experts, where it is a container.
fn largest(directory: &Path) -> Option<PathBuf> {
    let mut files = Vec::new();
    let mut open = vec![directory.to_path_buf()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(data) if data.is_dir() => open.push(entry.path()),
                Ok(data) if data.is_file() => files.push((data.len(), entry.path())),
                _ => {}
            }
        }
    }
    files.into_iter().max().map(|(_, path)| path)
}

/// A file that goes when this does.
struct Made(PathBuf);

impl Made {
    fn new(directory: &Path) -> Known<Self> {
        let path = directory.join(format!(".shimmer-doctor-{}", std::process::id()));
        let fail =
            |error: std::io::Error| format!("cannot write a file for a speed test there: {error}");
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).open(&path).map_err(fail)?;
        let made = Self(path.clone());
        // Not zeros: some drives and file systems keep those as a note.
        let block: Vec<u8> =
            (0..1_u32 << 20).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
        for _ in 0..FILE_BYTES >> 20 {
            file.write_all(&block).map_err(fail)?;
        }
        file.sync_all().map_err(fail)?;
        Ok(made)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

/// Both clocks at one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clocks(Instant, SystemTime);

impl Clocks {
    pub(crate) fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }
}

/// How the clocks went since a moment.
pub(crate) fn clock(root: &Path, began: Clocks, offset: Option<Known<f64>>) -> ClockFacts {
    let (looked, wall) = (began.0.elapsed(), SystemTime::now());
    let passed = wall.duration_since(began.1).unwrap_or_default();
    let seconds = wall.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // 365.2425 days; a day before the end of a year is near enough.
    let year = 1970 + i64::try_from(seconds / 31_556_952).unwrap_or(0);
    ClockFacts {
        source: text(root, "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        drift: looked.abs_diff(passed),
        looked,
        offset,
        year,
    }
}

/// A container; every byte of it if `full`.
pub(crate) fn container(path: &Path, full: bool) -> ContainerFacts {
    let opened = Container::open(path).map_err(|error| error.to_string());
    let described = opened.as_ref().map(described).map_err(Clone::clone);
    let verified = full.then(|| {
        let hashed = crate::commands::convert::in_pool("verifying", None, {
            let path = path.to_path_buf();
            move |progress| verify(&path, progress)
        });
        match hashed {
            Ok(report) => Ok((report.bytes, report.faults)),
            Err(error) => Err(error.render().unwrap_or_default().replace('\n', " ")),
        }
    });
    let fits = opened.as_ref().map_err(Clone::clone).and_then(|container| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let plan =
            ProcessPlan::of_worker(container, &[1.0], 0, &TierOptions::default(), threads, 8);
        let plan = plan.map_err(|error| error.to_string())?;
        let tiers = &plan.workers[0].tiers;
        Ok((tiers.pinned * 1000).checked_div(tiers.experts).unwrap_or(1000))
    });
    let there = path.join(MANIFEST_FILE).is_file();
    ContainerFacts { path: path.display().to_string(), there, opened: described, verified, fits }
}

fn described(container: &Container) -> Opened {
    let manifest: &Manifest = container.manifest();
    Opened {
        digest: container.digest().to_owned(),
        files: manifest.files.len() as u64,
        expert_bytes: manifest.experts.iter().map(|expert| expert.bytes).sum(),
        absent_layers: container.absent_layers().len(),
    }
}
