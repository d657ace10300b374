//! A container that comes into a directory piece by piece, from wherever somebody reads it.
//!
//! Files grow below `.fetch` beside the place that they will have, each with a record of how far every piece of it has
//! come. The record is a hint and no proof: before a file gets its name, every byte of it is read back and compared with
//! the manifest. So nothing that was received is asked for twice after a kill, and nothing that a power failure took is
//! believed. The manifest comes last, so that a directory with one is a whole container.

mod file;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::container::Container;
use crate::convert::ConvertProgress;
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{FileEntry, MANIFEST_FILE, Manifest};
use crate::parts::parts;
use crate::place;
use crate::schema::{self, EXPERTS_DIRECTORY, TEXT_FILES, TRUNK_FILE};

pub use file::{Fault, IncomingFile, Settled};

/// Below the container while it comes.
const DIRECTORY: &str = ".fetch";

/// How a directory stands to a container that is wanted there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is there, with that many files and bytes.
    Whole(usize, u64),
    /// It is not, or not all of it.
    Wanting,
}

impl Standing {
    /// Looks at the manifest, and at lengths and headers of all files. Reads no weights and writes nothing.
    ///
    /// # Errors
    /// The directory holds something else, by name.
    pub fn of(directory: &Path, digest: &str) -> Result<Self> {
        place::check(directory, DIRECTORY, digest, "container")?;
        if !directory.join(MANIFEST_FILE).exists() {
            return Ok(Self::Wanting);
        }
        Ok(match Container::open(directory) {
            Ok(found) if found.absent_layers().is_empty() => {
                let files = &found.manifest().files;
                Self::Whole(files.len(), files.iter().map(|entry| entry.bytes).sum())
            }
            _ => Self::Wanting,
        })
    }
}

/// A manifest that is the wanted one.
#[derive(Debug)]
pub struct Offer(Manifest);

impl Offer {
    /// Checks the bytes of a manifest; `source` is where they came from, for messages. Nothing is written.
    ///
    /// # Errors
    /// It is damaged, of another container, or lists what no container has.
    pub fn check(source: &str, bytes: &[u8], digest: &str) -> Result<Self> {
        let place = PathBuf::from(source);
        let manifest = Manifest::parse(&place, bytes)?;
        if manifest.digest != digest {
            let problem = format!("has digest {}, not {digest}", manifest.digest);
            let hint = "it is another container: correct the source or the digest";
            return Err(Error::Manifest { file: place, problem, hint });
        }
        check(&manifest, &place)?;
        Ok(Self(manifest))
    }

    /// The one that a directory has already, if it has.
    ///
    /// # Errors
    /// It cannot be read, or is not the wanted one.
    pub fn of_directory(directory: &Path, digest: &str) -> Result<Option<Self>> {
        let file = directory.join(MANIFEST_FILE);
        if !file.exists() {
            return Ok(None);
        }
        let bytes = files::read_small(&file)?;
        Self::check(&file.to_string_lossy(), &bytes, digest).map(Some)
    }
}

/// A container that comes into a directory which nobody else writes to meanwhile.
#[derive(Debug)]
pub struct Incoming {
    directory: PathBuf,
    manifest: Manifest,
    /// Names of files that are there and hold something else than the manifest says.
    damaged: Vec<String>,
    _lock: File,
}

impl Incoming {
    /// Begins, or continues what was begun; `None` while another process brings it into the same directory.
    ///
    /// # Errors
    /// The directory holds something else, or cannot be written.
    pub fn begin(directory: &Path, offer: &Offer) -> Result<Option<Self>> {
        let manifest = offer.0.clone();
        place::check(directory, DIRECTORY, &manifest.digest, "container")?;
        let state = directory.join(DIRECTORY);
        files::create_directory(&state)?;
        let Some(lock) = place::lock(&state)? else { return Ok(None) };
        // Between the look and the lock another process may have begun with something else.
        place::check(directory, DIRECTORY, &manifest.digest, "container")?;
        files::create_directory(&directory.join(EXPERTS_DIRECTORY))?;
        files::create_directory(&state.join(EXPERTS_DIRECTORY))?;
        files::write_atomic(&state.join(MANIFEST_FILE), &manifest.encode())?;
        let directory = directory.to_path_buf();
        Ok(Some(Self { directory, manifest, damaged: Vec::new(), _lock: lock }))
    }

    /// Reads every byte that is there; files that differ from the manifest will come anew, and are named.
    ///
    /// # Errors
    /// A file cannot be read, or `progress` said stop.
    pub fn verify(&mut self, progress: &dyn ConvertProgress) -> Result<&[String]> {
        let mut there: Vec<&FileEntry> = self.manifest.files.iter().collect();
        there.retain(|entry| is_there(&self.directory, entry));
        progress.start(there.iter().map(|entry| entry.bytes).sum());
        let mut damaged = Vec::new();
        for entry in there {
            progress.file(&entry.file);
            let path = self.directory.join(&entry.file);
            if !file::faults(&self.manifest, entry, &path, progress)?.is_empty() {
                damaged.push(entry.file.clone());
            }
        }
        self.damaged = damaged;
        Ok(&self.damaged)
    }

    /// The files that are still to come, in the manifest's order; each comes in pieces of `piece_bytes`.
    ///
    /// # Errors
    /// A file cannot be made, or what is missing does not fit: with both numbers.
    pub fn missing(&self, piece_bytes: u64) -> Result<Vec<IncomingFile>> {
        let state = self.directory.join(DIRECTORY);
        let wanted = |entry: &&FileEntry| {
            !is_there(&self.directory, entry) || self.damaged.contains(&entry.file)
        };
        let wanted: Vec<&FileEntry> = self.manifest.files.iter().filter(wanted).collect();
        // What has come has its place already.
        let needed = wanted.iter().map(|entry| {
            let placed =
                fs::metadata(state.join(&entry.file)).map_or(0, |meta| meta.blocks() * 512);
            entry.bytes.saturating_sub(placed)
        });
        files::require_space(&self.directory, needed.fold(0, u64::saturating_add))?;
        let open = |entry: &&FileEntry| {
            IncomingFile::open(&self.directory, &state, &self.manifest, entry, piece_bytes)
        };
        wanted.iter().map(open).collect()
    }

    /// Files of the container, and their bytes.
    #[must_use]
    pub fn total(&self) -> (usize, u64) {
        let files = &self.manifest.files;
        (files.len(), files.iter().map(|entry| entry.bytes).sum())
    }

    /// Gives the directory its manifest, once every file has its name.
    ///
    /// # Errors
    /// What is there is no container: a file that was kept from earlier is damaged.
    pub fn finish(self) -> Result<()> {
        let (state, manifest) =
            (self.directory.join(DIRECTORY), self.directory.join(MANIFEST_FILE));
        Container::check(&self.directory, &self.manifest)?;
        if !manifest.exists() {
            files::write_atomic(&manifest, &self.manifest.encode())?;
        }
        match fs::remove_dir_all(&state) {
            // Somebody who waited for the lock has just made a new one, and will remove it.
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed.map_err(Error::io("removing", &state)),
        }
    }
}

/// A file that has its name was complete when it got it.
fn is_there(directory: &Path, entry: &FileEntry) -> bool {
    fs::metadata(directory.join(&entry.file))
        .is_ok_and(|meta| meta.is_file() && meta.len() == entry.bytes)
}

/// A manifest from elsewhere lists only files that a container has, and each of their bytes has a digest.
fn check(manifest: &Manifest, place: &Path) -> Result<()> {
    let refuse = |problem: String| {
        let hint = "it was not made by shimmer convert: do not use this source";
        Err(Error::Manifest { file: place.to_path_buf(), problem, hint })
    };
    if let Some(fault) = manifest.config.fault() {
        return refuse(fault);
    }
    let mut names: Vec<&str> = manifest.files.iter().map(|entry| entry.file.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return refuse(format!("file {:?} has two entries", twice[0]));
    }
    let layers: Vec<String> =
        manifest.config.moe_layers().map(|(layer, _)| schema::expert_file(layer)).collect();
    let needed = layers.iter().map(String::as_str).chain([TRUNK_FILE]);
    if let Some(absent) = needed.into_iter().find(|name| names.binary_search(name).is_err()) {
        return refuse(format!("file {absent:?} has no entry"));
    }
    let mut total = 0u64;
    for entry in &manifest.files {
        let name = entry.file.as_str();
        let known =
            name == TRUNK_FILE || TEXT_FILES.contains(&name) || layers.iter().any(|it| it == name);
        if !known {
            return refuse(format!("file name {name:?} is none that a container has"));
        }
        let Some(sum) = total.checked_add(entry.bytes) else {
            return refuse("its files have more bytes than a number can say".to_owned());
        };
        total = sum;
        let parts = parts(manifest, entry);
        let mut at = parts.first().map_or(0, |part| part.offset);
        for part in &parts {
            let end = part.offset.checked_add(part.bytes);
            match end {
                Some(end) if part.offset == at && end <= entry.bytes => at = end,
                _ => return refuse(format!("{} of {name:?} is not where it can be", part.name)),
            }
        }
        if at != entry.bytes {
            return refuse(format!(
                "the last {} bytes of {name:?} have no digest",
                entry.bytes - at
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
