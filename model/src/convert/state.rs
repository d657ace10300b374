//! What a stopped conversion leaves behind so that the next call can continue.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Unit;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::MANIFEST_FILE;
use crate::schema::EXPERTS_DIRECTORY;

/// Below the container directory while it is being made.
const DIRECTORY: &str = ".convert";

/// How a conversion begins.
#[derive(Debug)]
pub(super) enum Start {
    /// It was finished before.
    Complete(Box<Container>),
    /// There is something to do.
    Work(State),
}

/// The state directory, locked while this lives.
#[derive(Debug)]
pub(super) struct State {
    out: PathBuf,
    directory: PathBuf,
    _lock: File,
}

#[derive(Debug, Serialize, Deserialize)]
struct Job {
    fingerprint: String,
}

impl State {
    pub(super) fn begin(out: &Path, source: &Path, fingerprint: &str) -> Result<Start> {
        files::create_directory(out)?;
        let directory = out.join(DIRECTORY);
        let refuse = |problem: &str, hint| {
            Err(Error::Output { path: out.to_path_buf(), problem: problem.to_owned(), hint })
        };
        let same = |path: &Path| path.canonicalize().map_err(Error::io("looking up", path));
        if same(out)? == same(source)? {
            return refuse(
                "is the checkpoint itself",
                "choose another directory for the container",
            );
        }
        if out.join(MANIFEST_FILE).exists() {
            let container = match Container::open(out) {
                Ok(container) => container,
                Err(error) => {
                    let problem = format!("holds a container that cannot be opened ({error})");
                    return refuse(
                        &problem,
                        "choose another directory, or remove this one and convert again",
                    );
                }
            };
            if container.manifest().source.fingerprint == fingerprint {
                if directory.exists() {
                    fs::remove_dir_all(&directory).map_err(Error::io("removing", &directory))?;
                }
                return Ok(Start::Complete(Box::new(container)));
            }
            return refuse(
                "holds the container of another checkpoint, of other text files or of other formats",
                "choose another directory, or remove this one if you no longer need it",
            );
        }
        if !directory.exists() && !files::names(out)?.is_empty() {
            return refuse(
                "is not empty and not a conversion that was stopped",
                "choose an empty or new directory",
            );
        }
        files::create_directory(&directory)?;
        let state = Self { out: out.to_path_buf(), _lock: lock(out, &directory)?, directory };
        state.check_job(fingerprint)?;
        state.remove_temporaries()?;
        Ok(Start::Work(state))
    }

    /// The job of a stopped conversion must be this one.
    fn check_job(&self, fingerprint: &str) -> Result<()> {
        let path = self.directory.join("job.json");
        if !path.exists() {
            let job = Job { fingerprint: fingerprint.to_owned() };
            return files::write_atomic(
                &path,
                &serde_json::to_vec(&job).expect("a string is valid JSON"),
            );
        }
        let job: Job =
            serde_json::from_slice(&files::read_small(&path)?).map_err(Error::json(&path))?;
        if job.fingerprint == fingerprint {
            return Ok(());
        }
        Err(Error::Output {
            path: self.out.clone(),
            problem: "holds a stopped conversion of another checkpoint, of other text files or of other formats"
                .to_owned(),
            hint: "continue it with its own options, or remove the directory",
        })
    }

    /// Files that were being written when the conversion stopped.
    fn remove_temporaries(&self) -> Result<()> {
        for directory in
            [self.out.clone(), self.out.join(EXPERTS_DIRECTORY), self.directory.clone()]
        {
            if !directory.is_dir() {
                continue;
            }
            for name in files::names(&directory)?.iter().filter(|name| name.ends_with(".tmp")) {
                let path = directory.join(name);
                fs::remove_file(&path).map_err(Error::io("removing", &path))?;
            }
        }
        Ok(())
    }

    fn record_path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{}.json", name.replace('/', "-")))
    }

    /// The record of a finished file, if the file is still there with its length.
    pub(super) fn recorded(&self, name: &str) -> Result<Option<Unit>> {
        let path = self.record_path(name);
        if !path.exists() {
            return Ok(None);
        }
        let unit: Unit =
            serde_json::from_slice(&files::read_small(&path)?).map_err(Error::json(&path))?;
        let length = fs::metadata(self.out.join(name)).map(|meta| meta.len()).ok();
        Ok((unit.entry.file == name && length == Some(unit.entry.bytes)).then_some(unit))
    }

    pub(super) fn record(&self, name: &str, unit: &Unit) -> Result<()> {
        let bytes = serde_json::to_vec(unit).expect("a unit has no value that JSON lacks");
        files::write_atomic(&self.record_path(name), &bytes)
    }

    /// The container is complete.
    pub(super) fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.directory).map_err(Error::io("removing", &self.directory))
    }
}

/// Two conversions into one directory would write over each other.
fn lock(out: &Path, directory: &Path) -> Result<File> {
    let path = directory.join("lock");
    let file = File::create(&path).map_err(Error::io("creating", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Output {
            path: out.to_path_buf(),
            problem: "another conversion is writing to it".to_owned(),
            hint: "wait until it has ended",
        }),
        Err(TryLockError::Error(source)) => Err(Error::Io { action: "locking", path, source }),
    }
}
