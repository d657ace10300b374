//! What was read. Whatever could not be carries the reason, since a container may hide anything.

use std::time::Duration;

use shimmer_worker::{budget::Available, io::probe::Speed};

/// A value, or why it is not known.
pub(crate) type Known<T> = Result<T, String>;

/// Everything that is judged.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) host: HostFacts,
    pub(crate) memory: MemoryFacts,
    pub(crate) gpu: GpuFacts,
    pub(crate) drive: DriveFacts,
    pub(crate) clock: ClockFacts,
    /// Absent when no container was named.
    pub(crate) container: Option<ContainerFacts>,
    /// Absent when no etcd was named.
    pub(crate) etcd: Option<EtcdFacts>,
    pub(crate) peers: Vec<PeerFacts>,
}

/// Kernel, processors and limits.
#[derive(Debug, Clone)]
pub(crate) struct HostFacts {
    pub(crate) kernel: Known<String>,
    /// Processors that this process may run on.
    pub(crate) cpus: usize,
    /// Instruction set of the kernels.
    pub(crate) isa: String,
    /// Processors' worth of time that the control group allows; none without a limit.
    pub(crate) quota: Known<Option<f64>>,
    /// Periods in which the control group stood still for its quota.
    pub(crate) throttled: Known<u64>,
    /// Most open files of a process; none without a limit.
    pub(crate) open_files: Known<Option<u64>>,
    /// Memory nodes, and physical cores of all of them.
    pub(crate) nodes: usize,
    pub(crate) cores: usize,
    pub(crate) numa_balancing: Known<u64>,
    pub(crate) zone_reclaim: Known<u64>,
}

/// Memory and how it is given.
#[derive(Debug, Clone)]
pub(crate) struct MemoryFacts {
    pub(crate) available: Available,
    /// Bytes that may be locked; none without a limit.
    pub(crate) lock_limit: Known<Option<u64>>,
    pub(crate) max_map_count: Known<u64>,
    /// The chosen word of `transparent_hugepage/enabled`.
    pub(crate) huge_pages: Known<String>,
    /// Bytes set aside as explicit huge pages, which nothing here uses.
    pub(crate) huge_reserved: Known<u64>,
    pub(crate) swap: Known<u64>,
}

/// What there is of NVIDIA's driver.
#[derive(Debug, Clone)]
pub(crate) struct GpuFacts {
    /// First line of the kernel module's version; none without the module.
    pub(crate) driver: Known<Option<String>>,
    /// Device files of GPUs.
    pub(crate) devices: Vec<String>,
    /// Whether the loader finds libcuda.
    pub(crate) library: Known<()>,
}

/// How a drive can be read.
#[derive(Debug, Clone)]
pub(crate) struct DriveFacts {
    /// What was read: a file of the container, or one made for it.
    pub(crate) path: Option<String>,
    pub(crate) uring: Known<()>,
    /// `kernel.io_uring_disabled`.
    pub(crate) uring_disabled: Known<u64>,
    /// Alignment of reads past the page cache, or why there are none.
    pub(crate) direct: Option<Known<usize>>,
    pub(crate) network: Option<&'static str>,
    pub(crate) speed: Option<Known<Speed>>,
}

/// How time passes here.
#[derive(Debug, Clone)]
pub(crate) struct ClockFacts {
    pub(crate) source: Known<String>,
    /// How far the wall clock left the steady one while we looked, and for how long we looked.
    pub(crate) drift: Duration,
    pub(crate) looked: Duration,
    /// Seconds by which an etcd's clock is ahead, to one second.
    pub(crate) offset: Option<Known<f64>>,
    /// The year of the wall clock.
    pub(crate) year: i64,
}

/// A container directory.
#[derive(Debug, Clone)]
pub(crate) struct ContainerFacts {
    pub(crate) path: String,
    /// It has a manifest.
    pub(crate) there: bool,
    /// Digest, files by count, and bytes of experts; or why it cannot be opened.
    pub(crate) opened: Known<Opened>,
    /// Bytes checked and faults found, when every byte was asked for.
    pub(crate) verified: Option<Known<(u64, Vec<String>)>>,
    /// Whether a worker of this host could hold it: experts pinned at start in thousandths, or the refusal.
    pub(crate) fits: Known<u64>,
}

/// An open container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) digest: String,
    pub(crate) files: u64,
    pub(crate) expert_bytes: u64,
    pub(crate) absent_layers: usize,
}

/// The membership store.
#[derive(Debug, Clone)]
pub(crate) struct EtcdFacts {
    pub(crate) name: String,
    /// Time to the first answer, members, and time of one transaction.
    pub(crate) answer: Known<(Duration, usize, Known<Duration>)>,
    pub(crate) tls: bool,
    pub(crate) user: bool,
}

/// A member that was asked.
#[derive(Debug, Clone)]
pub(crate) struct PeerFacts {
    pub(crate) address: String,
    /// Time to connect and to answer, and what it is.
    pub(crate) answer: Known<(Duration, Duration, PeerKind)>,
}

/// What a peer turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PeerKind {
    /// A worker that took our hello.
    Worker { id: String, build: String, draining: bool },
    /// A worker that was not told a container to compare.
    Healthy,
    /// It answers health checks as etcd does, and is no member.
    Stranger,
    /// A coordinator.
    Coordinator { build: String, digest: String },
    /// It answers, and refuses us.
    Refuses(String),
}
