//! The directory of a journal: names, and the order of calls that makes a file whole before it has its name, on local
//! file systems as on network ones, with several coordinators at work.

use std::fs::{self, File};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::JournalError;
use super::retention::Fact;

/// Ending of a request's file.
const SUFFIX: &str = ".journal";
/// Ending of a file that has no name yet.
const DRAFT: &str = ".draft";
/// Characters of a request id that a file's name shows.
const SHOWN: usize = 40;
/// Largest file that is read: a request of the largest message of the API and an id for each token of its answer.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Where the files of a journal lie.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
}

/// A whole file that has no name yet; it goes away with this value.
#[derive(Debug)]
struct Draft {
    path: PathBuf,
    file: File,
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After a rename there is none; otherwise the next clean-up finds what cannot be removed now.
        drop(fs::remove_file(&self.path));
    }
}

impl Directory {
    /// Makes the directory where there is none, and tries every kind of call that the journal will make.
    pub(super) fn open(path: &Path) -> Result<Self, JournalError> {
        let failed = |source| JournalError::Directory { path: path.to_owned(), source };
        fs::create_dir_all(path).map_err(failed)?;
        let directory = Self { path: path.to_owned() };
        let probe = format!("probe-{:016x}", draw());
        let target = path.join(&probe);
        let tried = directory.draft(b"probe").and_then(|draft| {
            fs::hard_link(&draft.path, &target)?;
            directory.sync()
        });
        drop(fs::remove_file(&target));
        tried.map_err(failed)?;
        Ok(directory)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Name of a request's file: what of its id is harmless, for people, and a digest of all of it.
    pub(super) fn name(id: &str) -> String {
        let harmless = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
        let shown: String = id.chars().take(SHOWN).map(harmless).collect();
        format!("{shown}-{}{SUFFIX}", &blake3::hash(id.as_bytes()).to_hex()[..32])
    }

    /// The path of a request's file.
    pub(super) fn file(&self, id: &str) -> PathBuf {
        self.path.join(Self::name(id))
    }

    /// Makes the file of a new request; it and its name are on the drive when this returns. None if the id has one.
    pub(super) fn publish(&self, id: &str, bytes: &[u8]) -> io::Result<Option<File>> {
        let draft = self.draft(bytes)?;
        // A link never replaces: of two coordinators that take the same id, one hears so.
        match fs::hard_link(&draft.path, self.file(id)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(error),
        }
        self.sync()?;
        draft.file.try_clone().map(Some)
    }

    /// Puts another file in the place of a request's, in one step. Whoever writes the old one writes into nothing.
    pub(super) fn replace(&self, id: &str, bytes: &[u8]) -> io::Result<File> {
        let draft = self.draft(bytes)?;
        let file = draft.file.try_clone()?;
        fs::rename(&draft.path, self.file(id))?;
        self.sync()?;
        Ok(file)
    }

    /// What a request's file holds; none if there is none.
    pub(super) fn read(&self, id: &str) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.file(id)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("larger than {MAX_FILE_BYTES} bytes")));
        }
        Ok(Some(bytes))
    }

    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path.join(name)) {
            // Another coordinator was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Every file of a request, and every draft that somebody left. Ages are by the file system's own clock, which an empty
    /// file shows even where there is no room.
    pub(super) fn facts(&self, open: impl Fn(&str) -> bool) -> io::Result<Vec<Fact>> {
        let now = self.draft(b"")?.file.metadata()?.modified()?;
        let mut facts = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if !name.ends_with(SUFFIX) && !name.ends_with(DRAFT) {
                continue;
            }
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // Another coordinator has removed it since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let age = age(now, metadata.modified()?);
            facts.push(Fact { open: open(&name), bytes: metadata.len(), age, name });
        }
        Ok(facts)
    }

    fn draft(&self, bytes: &[u8]) -> io::Result<Draft> {
        let path = self.path.join(format!("{:016x}{DRAFT}", draw()));
        let file = File::options().read(true).append(true).create_new(true).open(&path)?;
        let mut draft = Draft { path, file };
        draft.file.write_all(bytes)?;
        draft.file.sync_all()?;
        Ok(draft)
    }

    /// Names that were given are on the drive.
    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

fn age(now: SystemTime, then: SystemTime) -> Duration {
    // A file of the future is a fresh one.
    now.duration_since(then).unwrap_or(Duration::ZERO)
}

/// A number that nobody else draws: the keys of the standard library's hash maps come from the system.
fn draw() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
