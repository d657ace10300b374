//! A control group with a memory limit, for one child process.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::process::{shimmer_binary, without_variables};

/// For the kernel to let go of an empty group.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(10);

/// A group below the test's own one. It is removed when it is dropped; what runs in it by then goes on outside.
#[derive(Debug)]
pub struct MemoryGroup {
    directory: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl MemoryGroup {
    /// A group whose processes together hold at most `limit_bytes`, swap included.
    ///
    /// # Errors
    /// Why this test cannot have one: there is no hierarchy that rules memory, or it may not write there.
    pub fn new(name: &str, limit_bytes: u64) -> Result<Self, String> {
        let (parent, version) = own_group().ok_or("no control group rules memory here")?;
        let directory = parent.join(format!("shimmer-{name}-{}", std::process::id()));
        let failed = |doing: &str, error| format!("{doing} {}: {error}", directory.display());
        fs::create_dir(&directory).map_err(|error| failed("making", error))?;
        let group = Self { directory: directory.clone(), version };
        let file = match version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        fs::write(directory.join(file), limit_bytes.to_string())
            .map_err(|error| failed("limiting", error))?;
        Ok(group)
    }

    /// A command that runs `shimmer ARGS` in this group, without any `SHIMMER_` variable of the caller's.
    pub fn shimmer(&self, args: &[String]) -> Command {
        let mut command = Command::new("sh");
        let enter = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        command.args([OsStr::new("-c"), OsStr::new(enter), self.directory.as_os_str()]);
        command.arg(shimmer_binary()).args(args);
        without_variables(&mut command);
        command
    }

    /// Moves a running process into the group; what it holds already stays counted elsewhere.
    ///
    /// # Panics
    /// It has ended.
    pub fn take(&self, pid: u32) {
        self.write("cgroup.procs", &pid.to_string());
    }

    /// Leaves the group so much more than it holds now.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn leave_room(&self, bytes: u64) {
        let (used, limit) = match self.version {
            Version::One => ("memory.usage_in_bytes", "memory.limit_in_bytes"),
            Version::Two => ("memory.current", "memory.max"),
        };
        let used = fs::read_to_string(self.directory.join(used)).expect("a group counts its bytes");
        let used: u64 = used.trim().parse().expect("a number of bytes");
        self.write(limit, &(used + bytes).to_string());
    }

    fn write(&self, file: &str, value: &str) {
        let path = self.directory.join(file);
        fs::write(&path, value)
            .unwrap_or_else(|error| panic!("{} := {value}: {error}", path.display()));
    }

    /// Processes of the group that the kernel has killed for memory.
    ///
    /// # Panics
    /// The kernel does not say.
    pub fn killed(&self) -> u64 {
        let file = match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        let text = fs::read_to_string(self.directory.join(file)).expect("a group counts its kills");
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).expect("a group counts its kills")
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let parent = self.directory.parent().map(|parent| parent.join("cgroup.procs"));
        let begun = Instant::now();
        // A process that has just ended may still be on its way out of the group.
        while fs::remove_dir(&self.directory).is_err() && begun.elapsed() < REMOVAL_DEADLINE {
            let left = fs::read_to_string(self.directory.join("cgroup.procs")).unwrap_or_default();
            for pid in left.lines() {
                drop(parent.as_ref().map(|parent| fs::write(parent, pid)));
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The group of this process in the hierarchy that rules memory, if groups can be made below it.
fn own_group() -> Option<(PathBuf, Version)> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = |is_ours: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            is_ours(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let existing = |root: &Path, path: &str| {
        let own = root.join(path);
        if own.is_dir() { own } else { root.to_owned() }
    };
    if let Some(path) = own(&|controllers| controllers.split(',').any(|name| name == "memory")) {
        let root = Path::new("/sys/fs/cgroup/memory");
        return root.is_dir().then(|| (existing(root, &path), Version::One));
    }
    let path = own(&str::is_empty)?;
    let directory = existing(Path::new("/sys/fs/cgroup"), &path);
    let children = fs::read_to_string(directory.join("cgroup.subtree_control")).ok()?;
    children.split_whitespace().any(|name| name == "memory").then_some((directory, Version::Two))
}
