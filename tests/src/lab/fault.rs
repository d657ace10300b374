//! What can happen to a worker.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use shimmer_model::Container;
use tempfile::TempDir;

use super::{
    deployment::{Deployment, Plan, WorkerPlan},
    memory::Weights,
    network::Cut,
    slow::Slow,
    wire::{Bit, Way},
};
use crate::{control_group::MemoryGroup, faults::Faults, wait::wait_for};

const MIB: u64 = 1 << 20;
/// What is left to a group before its memory is eaten up.
const ROOM_BYTES: u64 = 16 * MIB;
/// No group ever reaches this by itself.
const UNLIMITED_BYTES: u64 = 16 << 30;
/// For what the kernel does at once.
const SOON: Duration = Duration::from_secs(20);

/// One kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT after some time.
    Stop,
    /// Frames are lost in both directions, between the worker and everybody.
    Partition,
    /// Frames that the worker sends are lost.
    Mute,
    /// Frames that are sent to the worker are lost.
    Deaf,
    /// It runs for a tenth of the time.
    Slow,
    /// A bit flips in work on its way to the worker.
    FlippedWork,
    /// A bit flips in a result on its way from the worker.
    FlippedResult,
    /// A bit flips in what frames the messages of the connection.
    FlippedFraming,
    /// A bit flips in every expert that the worker holds in memory.
    FlippedMemory,
    /// A bit flips in slabs on the worker's drive that it has not read yet.
    FlippedSlab,
    /// The worker's drive gives errors only.
    DriveError,
    /// The kernel kills it for memory.
    OutOfMemory,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Kill,
        Self::Stop,
        Self::Partition,
        Self::Mute,
        Self::Deaf,
        Self::Slow,
        Self::FlippedWork,
        Self::FlippedResult,
        Self::FlippedFraming,
        Self::FlippedMemory,
        Self::FlippedSlab,
        Self::DriveError,
        Self::OutOfMemory,
    ];

    /// As it stands in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Stop => "SIGSTOP",
            Self::Partition => "cut off, both ways",
            Self::Mute => "cut off, what it sends",
            Self::Deaf => "cut off, what is sent to it",
            Self::Slow => "10x slow",
            Self::FlippedWork => "flipped bit in work",
            Self::FlippedResult => "flipped bit in a result",
            Self::FlippedFraming => "flipped bit in framing",
            Self::FlippedMemory => "flipped bits in memory",
            Self::FlippedSlab => "flipped bits in slabs",
            Self::DriveError => "EIO of its drive",
            Self::OutOfMemory => "killed for memory",
        }
    }
}

/// A fault that is prepared for one worker of a cluster that is not started yet.
#[derive(Debug)]
pub struct Trap {
    fault: Fault,
    victim: usize,
    drive: Option<Faults>,
    copy: Option<TempDir>,
}

impl Trap {
    /// Prepares a plan for the fault.
    ///
    /// # Errors
    /// Why this machine cannot have the fault.
    ///
    /// # Panics
    /// The container cannot be copied.
    pub fn prepare(fault: Fault, victim: usize, plan: &mut Plan) -> Result<Self, String> {
        let mut trap = Self { fault, victim, drive: None, copy: None };
        let worker = &mut plan.workers[victim];
        match fault {
            Fault::FlippedWork | Fault::FlippedResult | Fault::FlippedFraming => {
                worker.wire = Some(Duration::ZERO);
            }
            Fault::FlippedMemory => plan.args.extend(["--audit", "100"].map(str::to_owned)),
            Fault::FlippedSlab => {
                let copy = TempDir::new().expect("a temporary directory can be made");
                worker.container = Some(copy_of(&plan.container, &copy));
                trap.copy = Some(copy);
                trap.drive = Some(watched_drive(worker)?);
            }
            Fault::DriveError => {
                trap.drive = Some(watched_drive(worker)?);
            }
            Fault::OutOfMemory => {
                // Before the cluster is started for nothing.
                drop(MemoryGroup::new("lab-try", UNLIMITED_BYTES)?);
            }
            _ => {}
        }
        Ok(trap)
    }

    fn drive(&self) -> &Faults {
        self.drive.as_ref().expect("the fault is one of a drive")
    }

    fn container(&self) -> PathBuf {
        container_in(self.copy.as_ref().expect("the fault is one of a copy"))
    }

    /// Looks for what takes time, so that [`Aimed::strike`] takes none.
    ///
    /// # Panics
    /// The victim cannot be looked into.
    pub fn aim<'a>(&'a self, deployment: &Deployment) -> Aimed<'a> {
        let pid = deployment.workers()[self.victim].process().pid();
        let mut aimed = Aimed { trap: self, pid, weights: None, group: None };
        match self.fault {
            Fault::FlippedMemory => {
                let container =
                    Container::open(deployment.container()).expect("the container opens");
                let weights = Weights::find(pid, &container);
                assert!(!weights.is_empty(), "the worker holds experts as the container has them");
                aimed.weights = Some(weights);
            }
            Fault::OutOfMemory => {
                let group =
                    MemoryGroup::new("lab", UNLIMITED_BYTES).expect("it worked a moment ago");
                group.take(pid);
                // The first of its group to be chosen.
                fs::write(format!("/proc/{pid}/oom_score_adj"), "1000")
                    .expect("a child can be made the first choice");
                aimed.group = Some(group);
            }
            _ => {}
        }
        aimed
    }
}

/// A fault that is about to happen.
#[derive(Debug)]
pub struct Aimed<'a> {
    trap: &'a Trap,
    pid: u32,
    weights: Option<Weights>,
    group: Option<MemoryGroup>,
}

impl<'a> Aimed<'a> {
    /// Lets it happen.
    ///
    /// # Panics
    /// It does not happen.
    pub fn strike(self, deployment: &mut Deployment) -> Lasting<'a> {
        let Self { trap, pid, weights, group } = self;
        let host = deployment.workers()[trap.victim].host;
        let mut lasting = Lasting {
            trap,
            struck: Instant::now(),
            slow: None,
            eater: None,
            group: None,
            flipped: Vec::new(),
        };
        let wire = |way, bit| {
            let wire = deployment.workers()[trap.victim].wire.as_ref();
            wire.expect("the trap has planned it").flip(way, bit);
        };
        match trap.fault {
            Fault::Kill => deployment.kill_worker(trap.victim),
            Fault::Stop => deployment.workers()[trap.victim].process().signal("STOP"),
            Fault::Partition => deployment.network().cut(host, Cut::Both),
            Fault::Mute => deployment.network().cut(host, Cut::From),
            Fault::Deaf => deployment.network().cut(host, Cut::To),
            Fault::Slow => lasting.slow = Some(Slow::new(pid)),
            Fault::FlippedWork => wire(Way::There, Bit::Content),
            Fault::FlippedResult => wire(Way::Back, Bit::Content),
            Fault::FlippedFraming => wire(Way::Back, Bit::Framing),
            Fault::FlippedMemory => {
                assert!(weights.is_some_and(|weights| weights.flip()), "the victim is alive");
            }
            Fault::FlippedSlab => {
                // What is read meanwhile would be compared before its bit flips, and not again.
                let process = deployment.workers()[trap.victim].process();
                process.signal("STOP");
                lasting.flipped = flip_unread(&trap.container(), &trap.drive().reads());
                process.signal("CONT");
            }
            Fault::DriveError => trap.drive().set("eio /"),
            Fault::OutOfMemory => {
                let group = group.expect("it was made when aiming");
                group.leave_room(ROOM_BYTES);
                lasting.eater = Some(Eater::new(&group));
                wait_for("the kernel to kill the worker", SOON, || deployment.ended(trap.victim));
                lasting.group = Some(group);
            }
        }
        lasting
    }
}

/// A fault that has happened.
#[derive(Debug)]
pub struct Lasting<'a> {
    trap: &'a Trap,
    struck: Instant,
    slow: Option<Slow>,
    // Ends before its group does.
    eater: Option<Eater>,
    group: Option<MemoryGroup>,
    flipped: Vec<Place>,
}

impl Lasting<'_> {
    /// Whether the fault could be seen by the cluster: what was damaged has been met.
    pub fn was_met(&self, deployment: &Deployment) -> bool {
        let worker = &deployment.workers()[self.trap.victim];
        match self.trap.fault {
            Fault::FlippedWork | Fault::FlippedResult | Fault::FlippedFraming => {
                worker.wire.as_ref().is_some_and(|wire| wire.flipped() == 1)
            }
            Fault::FlippedSlab => count(deployment, self.trap.victim, "slabs_damaged") > 0,
            Fault::DriveError => count(deployment, self.trap.victim, "read_errors") > 0,
            _ => true,
        }
    }

    /// Ends the fault: continues, heals, restarts. A stopped process has stood still for `stopped` by then.
    pub fn end(mut self, deployment: &mut Deployment, stopped: Duration) {
        let victim = self.trap.victim;
        match self.trap.fault {
            Fault::Stop => {
                std::thread::sleep(stopped.saturating_sub(self.struck.elapsed()));
                deployment.workers()[victim].process().signal("CONT");
            }
            Fault::Partition | Fault::Mute | Fault::Deaf => deployment.network().heal(),
            Fault::Slow => drop(self.slow.take()),
            Fault::DriveError => self.trap.drive().set("none"),
            Fault::FlippedWork | Fault::FlippedResult | Fault::FlippedFraming => {}
            Fault::FlippedSlab => self.flipped.iter().for_each(Place::flip),
            Fault::Kill | Fault::FlippedMemory | Fault::OutOfMemory => {
                drop(self.eater.take());
                drop(self.group.take());
                deployment.launch_worker(victim);
            }
        }
    }
}

/// Fills a group with memory that is in nobody's interest, until the kernel has killed it as well.
#[derive(Debug)]
struct Eater(Child);

impl Eater {
    fn new(group: &MemoryGroup) -> Self {
        // `tail` keeps the line that it may have to print, and this one never ends. It waits to be in the group.
        let mut child = Command::new("sh")
            .args(["-c", "read -r _ && exec tail /dev/zero"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("there is a shell");
        group.take(child.id());
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(b"\n").expect("the shell reads");
        }
        Self(child)
    }
}

impl Drop for Eater {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn count(deployment: &Deployment, worker: usize, name: &str) -> u64 {
    deployment.figures(worker)["tiers"][name].as_u64().unwrap_or(0)
}

/// Few slots, so that experts are read while requests run, and a library between the worker and its drive.
fn watched_drive(worker: &mut WorkerPlan) -> Result<Faults, String> {
    worker.args.extend(["--cap", "2", "--pilot-workers", "0"].map(str::to_owned));
    let faults = Faults::new().ok_or("faults of drives cannot be made here")?;
    worker.envs = faults.envs();
    Ok(faults)
}

fn container_in(directory: &TempDir) -> PathBuf {
    directory.path().join("container")
}

fn copy_of(container: &Path, directory: &TempDir) -> PathBuf {
    let copy = container_in(directory);
    let status = Command::new("cp").arg("-r").args([container, &copy]).status();
    assert!(status.is_ok_and(|status| status.success()), "cannot copy {}", container.display());
    copy
}

/// A byte in a slab on a drive.
#[derive(Debug)]
struct Place {
    file: PathBuf,
    at: u64,
}

impl Place {
    fn flip(&self) {
        let open = File::options().read(true).write(true).open(&self.file);
        let flip = |file: File| -> io::Result<()> {
            let mut byte = [0];
            file.read_exact_at(&mut byte, self.at)?;
            file.write_all_at(&[byte[0] ^ 0x10], self.at)
        };
        open.and_then(flip).unwrap_or_else(|error| panic!("{}: {error}", self.file.display()));
    }
}

/// Flips one bit of every slab in which nothing was read yet.
fn flip_unread(container: &Path, reads: &[(PathBuf, u64)]) -> Vec<Place> {
    let container = Container::open(container).expect("the copy opens");
    let mut flipped = Vec::new();
    for (layer, experts) in container.config().moe_layers() {
        let file = container.expert_file(layer).expect("the copy is whole").1.to_owned();
        let file = file.canonicalize().expect("the copy is whole");
        for expert in 0..experts {
            let entry = container.expert_entry(layer, expert).expect("it has the expert");
            let slab = entry.offset..entry.offset + entry.bytes;
            if !reads.iter().any(|(path, at)| *path == file && slab.contains(at)) {
                let place = Place { file: file.clone(), at: entry.offset + 77 };
                place.flip();
                flipped.push(place);
            }
        }
    }
    flipped
}
