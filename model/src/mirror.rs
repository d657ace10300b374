//! Copies of a container on further drives, from which workers read experts as well.
//!
//! A mirror is a container directory of its own, with all layer files or some. Staging copies file by file: each is
//! compared with the manifest's digests on the way, written under a temporary name, flushed and renamed. The manifest
//! comes last, so that a directory with one is a whole mirror; stopped at any point, the same command continues.

mod copy;
mod layers;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::container::Container;
use crate::convert::ConvertProgress;
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{FileEntry, MANIFEST_FILE};
use crate::place;
use crate::schema::{self, EXPERTS_DIRECTORY};
pub use layers::{Layers, ParseLayersError};

/// Below the mirror while it is being made.
const DIRECTORY: &str = ".mirror";

/// What to copy, and to where.
#[derive(Debug, Clone)]
pub struct MirrorOptions {
    /// A container, or a mirror of it.
    pub source: PathBuf,
    /// Directory of the mirror; made if it does not exist.
    pub target: PathBuf,
    /// Layers whose experts are copied; all that the source has if not given.
    pub layers: Option<Layers>,
}

/// What staging would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorPlan {
    /// Identity of the container.
    pub digest: String,
    /// Files of the mirror, in order.
    pub files: Vec<PlannedFile>,
    /// Bytes that the target's file system has free for this user.
    pub free_bytes: u64,
    /// Layers with experts of which neither this plan nor the target has a file.
    pub absent_layers: Vec<u32>,
}

/// One file of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Path below both directories.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// Whether the target has it.
    pub present: bool,
}

/// What staging did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorReport {
    /// Identity of the container.
    pub digest: String,
    /// Files that were copied, and their bytes.
    pub copied: (usize, u64),
    /// Files that were there, and their bytes.
    pub kept: (usize, u64),
    /// Layers whose experts are not in the mirror.
    pub absent_layers: Vec<u32>,
}

impl MirrorPlan {
    /// Bytes that are still to be copied.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.files.iter().filter(|file| !file.present).map(|file| file.bytes).sum()
    }

    fn tally(&self, present: bool) -> (usize, u64) {
        let files = self.files.iter().filter(|file| file.present == present);
        files.fold((0, 0), |(count, bytes), file| (count + 1, bytes + file.bytes))
    }
}

/// Says what [`stage_mirror`] would copy. Reads no data and writes nothing.
pub fn plan_mirror(options: &MirrorOptions) -> Result<MirrorPlan> {
    let source = Container::open(&options.source)?;
    check_target(&source, &options.target)?;
    plan(&source, options)
}

/// Copies what a mirror lacks. A second call on the same directory continues, or adds layers.
pub fn stage_mirror(
    options: &MirrorOptions,
    progress: &dyn ConvertProgress,
) -> Result<MirrorReport> {
    let source = Container::open(&options.source)?;
    let target = &options.target;
    check_target(&source, target)?;
    files::create_directory(&target.join(EXPERTS_DIRECTORY))?;
    let state = target.join(DIRECTORY);
    files::create_directory(&state)?;
    let _lock = lock(target, &state)?;
    files::write_atomic(&state.join(MANIFEST_FILE), &source.manifest().encode())?;

    let plan = plan(&source, options)?;
    let missing: Vec<_> = plan.files.iter().filter(|file| !file.present).collect();
    files::require_space(target, plan.missing_bytes())?;
    progress.start(plan.missing_bytes());
    missing.par_iter().try_for_each(|file| {
        progress.file(&file.file);
        copy::file(&source, target, &file.file, progress)
    })?;
    let manifest = target.join(MANIFEST_FILE);
    if !manifest.exists() {
        files::write_atomic(&manifest, &source.manifest().encode())?;
    }
    // What was kept from an earlier call may have been damaged or replaced since.
    Container::open(target)?;
    fs::remove_dir_all(&state).map_err(Error::io("removing", &state))?;
    let MirrorPlan { digest, absent_layers, .. } = &plan;
    Ok(MirrorReport {
        digest: digest.clone(),
        copied: plan.tally(false),
        kept: plan.tally(true),
        absent_layers: absent_layers.clone(),
    })
}

fn plan(source: &Container, options: &MirrorOptions) -> Result<MirrorPlan> {
    let MirrorOptions { target, layers, .. } = options;
    let manifest = source.manifest();
    let with_experts: Vec<u32> = manifest.config.moe_layers().map(|(layer, _)| layer).collect();
    let absent = source.absent_layers();
    if let Some(layers) = layers {
        if let Some(unknown) = layers.iter().find(|layer| !with_experts.contains(layer)) {
            return Err(Error::NoSuch {
                place: source.dir().to_path_buf(),
                what: format!(
                    "layer {unknown} with experts; they are in {}",
                    Layers::of(&with_experts)
                ),
            });
        }
        if let Some(&layer) = absent.iter().find(|layer| layers.contains(**layer)) {
            let file = source.dir().join(schema::expert_file(layer));
            return Err(Error::AbsentLayer { file, layer });
        }
    }
    let wanted = |layer: u32| layers.as_ref().is_none_or(|layers| layers.contains(layer));
    let (mut files, mut absent_layers) = (Vec::new(), Vec::new());
    for entry in &manifest.files {
        let layer = with_experts.iter().find(|layer| schema::expert_file(**layer) == entry.file);
        let present = is_present(target, entry);
        if let Some(&layer) = layer
            && (absent.contains(&layer) || !wanted(layer))
        {
            if !present {
                absent_layers.push(layer);
            }
            continue;
        }
        files.push(PlannedFile { file: entry.file.clone(), bytes: entry.bytes, present });
    }
    let free_bytes = files::free_space(existing(target))?;
    Ok(MirrorPlan { digest: manifest.digest.clone(), files, free_bytes, absent_layers })
}

/// A file that has its name was complete when it got it.
fn is_present(target: &Path, entry: &FileEntry) -> bool {
    fs::metadata(target.join(&entry.file)).is_ok_and(|meta| meta.len() == entry.bytes)
}

/// The nearest directory above a path that exists.
fn existing(path: &Path) -> &Path {
    let above = path.ancestors().find(|path| path.exists());
    above.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The target is new, empty, a mirror of this container, or one that was begun.
fn check_target(source: &Container, target: &Path) -> Result<()> {
    let same = |path: &Path| path.canonicalize().map_err(Error::io("looking up", path));
    if target.exists() && same(target)? == same(source.dir())? {
        return Err(Error::Output {
            path: target.to_path_buf(),
            problem: "is the container itself".to_owned(),
            hint: "choose a directory on another drive",
        });
    }
    place::check(target, DIRECTORY, source.digest(), "mirror")
}

/// Two calls for one directory would write over each other.
fn lock(target: &Path, state: &Path) -> Result<File> {
    place::lock(state)?.ok_or_else(|| Error::Output {
        path: target.to_path_buf(),
        problem: "another process is writing to it".to_owned(),
        hint: "wait until it has ended",
    })
}

#[cfg(test)]
mod tests;
