//! Reads a whole container and names everything that is not as the manifest says.

use std::fs::File;
use std::path::Path;

use rayon::prelude::*;

use crate::container::Container;
use crate::convert::ConvertProgress;
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::Manifest;
use crate::schema::{self, TEXT_FILES, TRUNK_FILE};

/// Bytes hashed at once.
const PIECE_BYTES: usize = 4 << 20;

/// What a verification found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Identity of the container.
    pub digest: String,
    /// Tensors and files read.
    pub parts: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Layers whose file is not in this directory.
    pub absent_layers: Vec<u32>,
    /// Everything that is wrong; empty for a good container.
    pub faults: Vec<String>,
}

/// Something with a digest.
struct Part<'a> {
    file: String,
    name: String,
    offset: u64,
    bytes: u64,
    digest: &'a str,
}

/// Reads every byte of the container in `directory`. A manifest that cannot be used is an error; whatever else is wrong is
/// listed in the report, so that one run shows all of it.
pub fn verify(directory: &Path, progress: &dyn ConvertProgress) -> Result<VerifyReport> {
    let manifest = Manifest::read(directory)?;
    let mut faults = Vec::new();
    if let Err(error) = Container::open(directory) {
        faults.push(error.to_string());
    }
    let (parts, absent_layers) = parts(directory, &manifest);
    let bytes = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
    progress.start(bytes);
    let found: Vec<Option<String>> = parts
        .par_iter()
        .map(|part| check(directory, part, progress).err().map(|error| error.to_string()))
        .collect();
    if progress.stop() {
        return Err(Error::Stopped { path: directory.to_path_buf() });
    }
    for fault in found.into_iter().flatten() {
        if !faults.contains(&fault) {
            faults.push(fault);
        }
    }
    Ok(VerifyReport {
        digest: manifest.digest.clone(),
        parts: parts.len(),
        bytes,
        absent_layers,
        faults,
    })
}

/// Everything in the manifest that should be in the directory. Only the names that this version writes are opened.
fn parts<'a>(directory: &Path, manifest: &'a Manifest) -> (Vec<Part<'a>>, Vec<u32>) {
    let mut parts = Vec::new();
    for entry in manifest.files.iter().filter(|entry| TEXT_FILES.contains(&entry.file.as_str())) {
        let name = "the file".to_owned();
        parts.push(Part {
            file: entry.file.clone(),
            name,
            offset: 0,
            bytes: entry.bytes,
            digest: &entry.blake3,
        });
    }
    for entry in &manifest.tensors {
        let (file, name) = (TRUNK_FILE.to_owned(), format!("tensor {}", entry.name));
        parts.push(Part {
            file,
            name,
            offset: entry.offset,
            bytes: entry.bytes,
            digest: &entry.blake3,
        });
    }
    let mut absent = Vec::new();
    for entry in &manifest.experts {
        let file = schema::expert_file(entry.layer);
        if absent.last() == Some(&entry.layer) {
            continue;
        }
        if !directory.join(&file).exists() {
            absent.push(entry.layer);
            continue;
        }
        let name = schema::expert_name(entry.layer, entry.expert);
        parts.push(Part {
            file,
            name,
            offset: entry.offset,
            bytes: entry.bytes,
            digest: &entry.blake3,
        });
    }
    (parts, absent)
}

fn check(directory: &Path, part: &Part<'_>, progress: &dyn ConvertProgress) -> Result<()> {
    let path = directory.join(&part.file);
    let file = files::open(&path)?;
    let found = hash(&file, &path, part, progress)?;
    if found == part.digest {
        return Ok(());
    }
    Err(Error::Digest {
        file: path,
        what: part.name.clone(),
        expected: part.digest.to_owned(),
        found,
    })
}

fn hash(
    file: &File,
    path: &Path,
    part: &Part<'_>,
    progress: &dyn ConvertProgress,
) -> Result<String> {
    let length = files::length(file, path)?;
    if part.offset.checked_add(part.bytes).is_none_or(|end| end > length) {
        return Err(Error::NoSuch {
            place: path.to_path_buf(),
            what: format!(
                "{} at {}, {} bytes long: the file has only {length} bytes",
                part.name, part.offset, part.bytes
            ),
        });
    }
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut done = 0;
    while done < part.bytes && !progress.stop() {
        let size = usize::try_from(part.bytes - done).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
        files::read_exact_at(file, &mut piece[..size], part.offset + done)
            .map_err(Error::io("reading", path))?;
        hasher.update(&piece[..size]);
        done += size as u64;
        progress.advance(size as u64);
    }
    Ok(hasher.finalize().to_hex().to_string())
}
