//! The safetensors format: headers that are checked completely before a byte of data is used, and a writer whose data
//! begins on a page boundary.
//!
//! The reader is our own because a refusal must name the file, the tensor and the byte, and because it is stricter than
//! the format's reference in one way: a name that occurs twice is refused. Files that it accepts or that we write open
//! with the reference reader, which a test checks.

mod header;
mod write;

use std::fs::File;
use std::path::{Path, PathBuf};

pub(crate) use header::{DType, Header, TensorInfo};
pub(crate) use write::{HeaderEntry, TensorWriter, Written};

use crate::error::{Error, Result};
use crate::files;

/// An open file with a checked header.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    header: Header,
}

impl TensorFile {
    /// Opens and checks: the file has exactly the bytes that its header describes.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = files::open(path)?;
        let length = files::length(&file, path)?;
        let header = header::read(&file, path, length)?;
        Ok(Self { path: path.to_path_buf(), file, header })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Reads `out.len()` bytes of a tensor's data from byte `offset` of it.
    pub(crate) fn read(&self, info: &TensorInfo, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64);
        assert!(end.is_some_and(|end| end <= info.bytes()), "a read stays inside its tensor");
        let at = self.header.data_start() + info.start() + offset;
        files::read_exact_at(&self.file, out, at).map_err(Error::io("reading", &self.path))
    }
}

/// Checks a file that is in memory; returns its header and its data. `path` is for messages.
pub(crate) fn parse_bytes<'a>(path: &Path, bytes: &'a [u8]) -> Result<(Header, &'a [u8])> {
    header::parse_file(path, bytes)
}

#[cfg(test)]
mod tests;
