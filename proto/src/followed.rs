//! Values made from files that change while the process runs: certificates, keys.
//!
//! The files are compared by content, not by time: a Kubernetes secret changes by a swap of a symbolic link, an editor by a
//! rename, a script by writing in place, and a clock of a file system is coarser than any of these.

use std::{
    fmt,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use xxhash_rust::xxh3::Xxh3;

/// The files are looked at no more often than this, whatever the number of connections. Reading a few kilobytes from the
/// page cache takes microseconds.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Largest file that is read. A bundle of every public authority of the web has a quarter of it.
pub const FILE_BYTES: u64 = 1 << 20;

/// A file that cannot be used, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct FileError {
    /// Which one.
    pub file: PathBuf,
    /// What is wrong with it, and where it helps, what to do.
    pub reason: String,
}

impl FileError {
    /// An error about `file`.
    pub fn new(file: &Path, reason: impl Into<String>) -> Self {
        Self { file: file.to_owned(), reason: reason.into() }
    }
}

/// What makes a value from the contents of the files, in their order.
type Make<T> = dyn Fn(&[Vec<u8>]) -> Result<T, FileError> + Send + Sync;

/// A value that follows its files.
pub struct Followed<T> {
    /// What it is, for the log.
    what: &'static str,
    files: Vec<PathBuf>,
    make: Box<Make<T>>,
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Arc<T>,
    /// Hash of the contents that were tried last, whether or not they could be used.
    tried: u128,
    /// Hash of the contents that the value was made from.
    used: u128,
    looked: Instant,
    complaint: Option<FileError>,
}

impl<T> Followed<T> {
    /// Reads the files and makes the first value.
    ///
    /// # Errors
    /// A file cannot be read, or `make` refuses it.
    pub fn load(
        what: &'static str,
        files: Vec<PathBuf>,
        make: impl Fn(&[Vec<u8>]) -> Result<T, FileError> + Send + Sync + 'static,
    ) -> Result<Self, FileError> {
        let contents = read_all(&files)?;
        let value = Arc::new(make(&contents)?);
        let used = fingerprint(&contents);
        let state = State { value, tried: used, used, looked: Instant::now(), complaint: None };
        Ok(Self { what, files, make: Box::new(make), state: Mutex::new(state) })
    }

    /// The value, made again if the files have changed. What cannot be used is told once and changes nothing: the value
    /// before it stays.
    pub fn current(&self) -> Arc<T> {
        self.current_at(Instant::now())
    }

    /// Whether the files cannot be used as they are now, so that the value is an older one.
    pub fn is_outdated(&self) -> bool {
        self.is_outdated_at(Instant::now())
    }

    fn is_outdated_at(&self, now: Instant) -> bool {
        drop(self.current_at(now));
        self.state.lock().unwrap_or_else(PoisonError::into_inner).complaint.is_some()
    }

    fn current_at(&self, now: Instant) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(state.looked) < LOOK_INTERVAL {
            return Arc::clone(&state.value);
        }
        state.looked = now;
        let made = match read_all(&self.files) {
            Err(error) => Some(Err(error)),
            Ok(contents) => {
                let found = fingerprint(&contents);
                let same = found == state.tried;
                state.tried = found;
                if found == state.used {
                    state.complaint = None;
                }
                // After an unreadable moment the same files may be back: then the old value is right again.
                (!same).then(|| (self.make)(&contents))
            }
        };
        match made {
            Some(Ok(value)) => {
                let files = self.names();
                tracing::info!(files, "{} read again: the files have changed", self.what);
                state.value = Arc::new(value);
                state.used = state.tried;
                state.complaint = None;
            }
            Some(Err(error)) if state.complaint.as_ref() != Some(&error) => {
                let FileError { file, reason } = &error;
                let what = self.what;
                tracing::error!(file = %file.display(), reason, "{what} cannot be read again; keeping what was read before");
                state.complaint = Some(error);
            }
            Some(Err(_)) | None => {}
        }
        Arc::clone(&state.value)
    }

    fn names(&self) -> String {
        let names: Vec<String> = self.files.iter().map(|file| file.display().to_string()).collect();
        names.join(", ")
    }
}

impl<T> fmt::Debug for Followed<T> {
    /// The files only: what is in them may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Followed").field("what", &self.what).field("files", &self.files).finish()
    }
}

fn read_all(files: &[PathBuf]) -> Result<Vec<Vec<u8>>, FileError> {
    files.iter().map(|file| read(file)).collect()
}

fn read(file: &Path) -> Result<Vec<u8>, FileError> {
    let failed = |error: io::Error| FileError::new(file, format!("cannot be read: {error}"));
    let mut contents = Vec::new();
    let mut limited = File::open(file).map_err(failed)?.take(FILE_BYTES + 1);
    limited.read_to_end(&mut contents).map_err(failed)?;
    if contents.len() as u64 > FILE_BYTES {
        return Err(FileError::new(file, format!("is larger than {} KiB", FILE_BYTES >> 10)));
    }
    Ok(contents)
}

fn fingerprint(contents: &[Vec<u8>]) -> u128 {
    let mut hasher = Xxh3::new();
    for content in contents {
        hasher.update(&(content.len() as u64).to_le_bytes());
        hasher.update(content);
    }
    hasher.digest128()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::symlink,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    fn number(file: &Path) -> impl Fn(&[Vec<u8>]) -> Result<u32, FileError> + use<> {
        let file = file.to_owned();
        move |contents| {
            let text = String::from_utf8_lossy(&contents[0]);
            text.trim().parse().map_err(|_| FileError::new(&file, "is no number"))
        }
    }

    fn later(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn a_change_is_seen_at_the_next_look_and_a_broken_one_keeps_the_value() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("n");
        fs::write(&file, "1").unwrap();
        let followed = Followed::load("the number", vec![file.clone()], number(&file)).unwrap();
        fs::write(&file, "2").unwrap();
        assert_eq!(*followed.current(), 1, "looked at a moment ago");
        assert_eq!(*followed.current_at(later(2)), 2);
        fs::write(&file, "x").unwrap();
        assert_eq!(*followed.current_at(later(4)), 2);
        fs::remove_file(&file).unwrap();
        assert_eq!(*followed.current_at(later(6)), 2);
        fs::write(&file, "3").unwrap();
        assert_eq!(*followed.current_at(later(8)), 3);
    }

    #[test]
    fn files_that_cannot_be_used_are_known_until_they_can() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("n");
        fs::write(&file, "1").unwrap();
        let followed = Followed::load("the number", vec![file.clone()], number(&file)).unwrap();
        let mut seconds = 0;
        let mut outdated = || {
            seconds += 2;
            followed.is_outdated_at(later(seconds))
        };
        assert!(!outdated());
        fs::write(&file, "").unwrap();
        assert!(outdated() && outdated());
        fs::write(&file, "1").unwrap();
        assert!(!outdated(), "as it was");
        fs::remove_file(&file).unwrap();
        assert!(outdated());
        fs::write(&file, "2").unwrap();
        assert!(!outdated());
    }

    #[test]
    fn the_swap_of_a_link_is_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let [old, new, data] = ["old", "new", "data"].map(|name| directory.path().join(name));
        for (version, content) in [(&old, "1"), (&new, "2")] {
            fs::create_dir(version).unwrap();
            fs::write(version.join("n"), content).unwrap();
        }
        symlink(&old, &data).unwrap();
        let file = data.join("n");
        let followed = Followed::load("the number", vec![file.clone()], number(&file)).unwrap();
        let swap = directory.path().join("swap");
        symlink(&new, &swap).unwrap();
        fs::rename(&swap, &data).unwrap();
        assert_eq!(*followed.current_at(later(2)), 2);
    }

    #[test]
    fn unchanged_files_are_not_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("n");
        fs::write(&file, "1").unwrap();
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        let make = move |_: &[Vec<u8>]| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let followed = Followed::load("nothing", vec![file.clone()], make).unwrap();
        for look in 1..5 {
            followed.current_at(later(2 * look));
        }
        assert_eq!(made.load(Ordering::Relaxed), 1);
        fs::write(&file, "1").unwrap();
        followed.current_at(later(20));
        assert_eq!(made.load(Ordering::Relaxed), 1, "the same bytes written again");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let (gone, large) = (directory.path().join("gone"), directory.path().join("large"));
        fs::write(&large, "x".repeat(1 + (1 << 20))).unwrap();
        for (file, reason) in [(&gone, "No such file"), (&large, "larger than 1024 KiB")] {
            let error = Followed::load("x", vec![file.clone()], |_| Ok(())).unwrap_err();
            assert_eq!(&error.file, file);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
