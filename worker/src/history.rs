//! The usage history of a worker as a file: which experts its runs used, so that the next start pins those.
//!
//! One JSON file, replaced as a whole. A history that cannot be written costs speed after the next start and nothing else,
//! so it is never a reason to stop serving.

use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::residency::{LayerUsage, Usage};

/// A history above this is not one: a model with a million experts takes a tenth of it.
const BYTES_MAX: u64 = 256 << 20;

/// Version of the file's structure.
const VERSION: u32 = 1;

/// Why a history cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The file cannot be read.
    #[error("reading the usage history {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is none.
    #[error("{} is not a usage history of this version: {problem}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// It was kept for another model.
    #[error(
        "the usage history {} belongs to container {found}, this worker serves {expected}: give another file",
        file.display()
    )]
    OtherContainer {
        /// The file.
        file: PathBuf,
        /// Digest of the worker's container.
        expected: String,
        /// Digest in the file.
        found: String,
    },
    /// The file cannot be written.
    #[error("writing the usage history {}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    container_digest: String,
    layers: Vec<LayerUsage>,
}

/// Reads the history of a container; `None` when there is no such file.
pub fn load(file: &Path, container_digest: &str) -> Result<Option<Usage>, HistoryError> {
    let read = |source| HistoryError::Read { file: file.to_owned(), source };
    let malformed = |problem: String| HistoryError::Malformed { file: file.to_owned(), problem };
    let bytes = match fs::metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(read(error)),
        Ok(metadata) if !metadata.is_file() => {
            return Err(malformed("it is not an ordinary file".to_owned()));
        }
        Ok(metadata) if metadata.len() > BYTES_MAX => {
            return Err(malformed(format!("{} bytes", metadata.len())));
        }
        Ok(_) => fs::read(file).map_err(read)?,
    };
    let content: File =
        serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))?;
    if content.version != VERSION {
        return Err(malformed(format!("version {}, expected {VERSION}", content.version)));
    }
    if content.container_digest != container_digest {
        return Err(HistoryError::OtherContainer {
            file: file.to_owned(),
            expected: container_digest.to_owned(),
            found: content.container_digest,
        });
    }
    Ok(Some(Usage::new(content.layers)))
}

/// Replaces the history as a whole: a reader, or a run after a crash, finds the old one or the new one.
pub fn save(file: &Path, container_digest: &str, usage: &Usage) -> Result<(), HistoryError> {
    let content = File {
        version: VERSION,
        container_digest: container_digest.to_owned(),
        layers: usage.layers().to_vec(),
    };
    let write = || {
        let directory = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let mut fresh = tempfile::NamedTempFile::new_in(directory)?;
        serde_json::to_writer(&mut fresh, &content)?;
        fresh.write_all(b"\n")?;
        fresh.as_file().sync_all()?;
        fresh.persist(file)?;
        fs::File::open(directory)?.sync_all()
    };
    write().map_err(|source| HistoryError::Write { file: file.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage() -> Usage {
        let uses = vec![3, 0, u64::MAX];
        Usage::new(vec![LayerUsage::default(), LayerUsage { works: 7, uses }])
    }

    #[test]
    fn a_history_comes_back_for_its_container_only() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("usage.json");
        assert_eq!(load(&file, "aa").unwrap(), None);
        save(&file, "aa", &usage()).unwrap();
        assert_eq!(load(&file, "aa").unwrap(), Some(usage()));
        save(&file, "aa", &Usage::default()).unwrap();
        assert_eq!(load(&file, "aa").unwrap(), Some(Usage::default()));
        let error = load(&file, "bb").unwrap_err().to_string();
        assert!(error.contains("usage.json belongs to container aa, this worker serves bb"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no leftovers");
    }

    #[test]
    fn damage_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("usage.json");
        for (text, problem) in [
            ("", "EOF"),
            ("{\"version\":1}", "missing field"),
            ("{\"version\":2,\"container_digest\":\"aa\",\"layers\":[]}", "version 2, expected 1"),
            ("{\"version\":1,\"container_digest\":\"aa\",\"layers\":[[-1]]}", "invalid"),
        ] {
            fs::write(&file, text).unwrap();
            let error = load(&file, "aa").unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("usage.json"), "{error}");
        }
    }

    #[test]
    fn what_is_no_file_is_refused() {
        for path in ["/dev/zero", "/"] {
            let error = load(Path::new(path), "aa").unwrap_err().to_string();
            assert!(error.contains("not an ordinary file"), "{error}");
        }
    }

    #[test]
    fn a_history_that_cannot_be_written_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("missing").join("usage.json");
        assert!(matches!(save(&file, "aa", &usage()), Err(HistoryError::Write { .. })));
    }
}
