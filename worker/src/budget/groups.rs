//! Control groups: what the groups of this process allow, and what they hold that cannot be given up.
//!
//! Version 1, version 2 and both at once; whole hierarchies and those of which a container sees only its own part.

use std::path::{Component, Path, PathBuf};

/// A limit above this is the kernel's way to say that there is none.
const NO_LIMIT: u64 = 1 << 60;

/// A group that limits the memory of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    /// Bytes that may be held.
    pub(super) limit: u64,
    /// Bytes held that no reclaim gives back: page cache does not count.
    pub(super) held: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A mounted hierarchy: the directory `point` shows the group `root` and what is below it.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    root: PathBuf,
    point: PathBuf,
}

/// The groups from this process's own to the root, as far as they can be seen, that have a limit. `root` is the root of
/// the file tree.
pub(super) fn groups(root: &Path) -> Vec<Group> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let (paths, mounts) = (read("proc/self/cgroup"), mounts(&read("proc/self/mountinfo")));
    let mut found = Vec::new();
    for version in [Version::One, Version::Two] {
        let Some(path) = own_path(&paths, version) else { continue };
        for directory in directories(root, &mounts, version, path) {
            found.extend(match version {
                Version::One => version_one(&directory),
                Version::Two => version_two(&directory),
            });
        }
    }
    found
}

/// The path of this process in the hierarchy that governs memory.
fn own_path(groups: &str, version: Version) -> Option<&Path> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let ours = match version {
            Version::One => controllers.split(',').any(|name| name == "memory"),
            Version::Two => controllers.is_empty(),
        };
        ours.then(|| Path::new(path))
    })
}

fn mounts(mountinfo: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (unescape(place.next()?), unescape(place.next()?));
        let mut kind = kind.split(' ');
        let (kind, options) = (kind.next()?, kind.nth(1)?);
        let version = match kind {
            "cgroup2" => Version::Two,
            "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
            _ => return None,
        };
        Some(Mount { version, root, point })
    };
    mountinfo.lines().filter_map(mount).collect()
}

/// The kernel writes blanks of a path in octal.
fn unescape(path: &str) -> PathBuf {
    let decoded = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (code, character)| path.replace(code, character));
    PathBuf::from(decoded)
}

/// The directories of the own group and those above it.
fn directories(root: &Path, mounts: &[Mount], version: Version, path: &Path) -> Vec<PathBuf> {
    let below = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    let of_version = || mounts.iter().filter(|mount| mount.version == version);
    let seen = of_version().find_map(|mount| {
        let inside = path.strip_prefix(&mount.root).ok()?;
        let plain = inside.components().all(|part| matches!(part, Component::Normal(_)));
        let (top, own) = (below(&mount.point), below(&mount.point).join(inside));
        (plain && own.is_dir()).then(|| {
            let up = own.ancestors().take_while(|directory| directory.starts_with(&top));
            up.map(Path::to_owned).collect()
        })
    });
    // A container without a namespace of its own reads a path of the host's, but sees its own group where the hierarchy
    // is mounted.
    seen.unwrap_or_else(|| of_version().map(|mount| below(&mount.point)).collect())
}

/// The lines `name value` of a statistic.
struct Statistic(String);

impl Statistic {
    fn read(path: &Path) -> Self {
        Self(std::fs::read_to_string(path).unwrap_or_default())
    }

    fn get(&self, name: &str) -> Option<u64> {
        let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
        self.0.lines().find_map(value)
    }

    /// The sum of those that are there; none if none is.
    fn sum(&self, names: &[&str]) -> Option<u64> {
        names.iter().filter_map(|name| self.get(name)).reduce(u64::saturating_add)
    }
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Pages are counted by their list, since each is on one list only: a locked anonymous page is both "anon" and
/// "unevictable".
fn version_two(directory: &Path) -> Option<Group> {
    // Above `memory.high` a group is slowed down until it is as good as dead.
    let limits = ["memory.max", "memory.high"].map(|name| number(&directory.join(name)));
    let limit = limits.into_iter().flatten().filter(|limit| *limit < NO_LIMIT).min()?;
    let statistic = Statistic::read(&directory.join("memory.stat"));
    let pages = statistic
        .sum(&["inactive_anon", "active_anon"])
        .or_else(|| statistic.sum(&["anon", "shmem"]))
        .unwrap_or(0);
    let kernel = statistic
        .get("kernel")
        .or_else(|| statistic.sum(&["kernel_stack", "pagetables", "percpu", "sock", "slab"]))
        .unwrap_or(0)
        .saturating_sub(statistic.get("slab_reclaimable").unwrap_or(0));
    let held = [pages, statistic.get("unevictable").unwrap_or(0), kernel];
    Some(Group { limit, held: held.into_iter().fold(0, u64::saturating_add) })
}

/// As above. The statistic also names the tightest limit of the groups above, which a container cannot see otherwise.
fn version_one(directory: &Path) -> Option<Group> {
    let statistic = Statistic::read(&directory.join("memory.stat"));
    let own = number(&directory.join("memory.limit_in_bytes"));
    let limits = [own, statistic.get("hierarchical_memory_limit")];
    let limit = limits.into_iter().flatten().filter(|limit| *limit < NO_LIMIT).min()?;
    let pages = statistic
        .sum(&["total_inactive_anon", "total_active_anon"])
        .or_else(|| statistic.sum(&["total_rss", "total_shmem"]))
        .unwrap_or(0);
    let kernel = number(&directory.join("memory.kmem.usage_in_bytes")).unwrap_or(0);
    let held = [pages, statistic.get("total_unevictable").unwrap_or(0), kernel];
    Some(Group { limit, held: held.into_iter().fold(0, u64::saturating_add) })
}

#[cfg(test)]
mod tests;
