//! Writing of files. The header is padded with blanks so that the data begins on a page boundary: one aligned read then
//! fetches what begins on a page boundary of the data.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::DType;
use crate::error::{Error, Result};
use crate::files;

/// Boundary on which the data begins.
const PAGE: usize = 4096;

/// One tensor of a file that is going to be written; tensors follow one another in the order given.
#[derive(Debug, Clone)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
}

impl HeaderEntry {
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }
}

/// The length prefix and the header of a file with these tensors; its length is where the data begins.
fn encode_header(entries: &[HeaderEntry]) -> Vec<u8> {
    let mut object = Map::new();
    object.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut at = 0;
    for entry in entries {
        let end = at + entry.bytes();
        let value = json!({ "dtype": entry.dtype.to_string(), "shape": entry.shape, "data_offsets": [at, end] });
        object.insert(entry.name.clone(), value);
        at = end;
    }
    let text = Value::Object(object).to_string();
    let padded = (8 + text.len()).next_multiple_of(PAGE);
    let mut bytes = Vec::with_capacity(padded);
    bytes.extend_from_slice(&((padded - 8) as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(padded, b' ');
    bytes
}

/// A file under its temporary name: header first, data in order, published when it is complete.
#[derive(Debug)]
pub(crate) struct TensorWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    header_digest: blake3::Hash,
    /// Bytes written so far.
    at: u64,
    /// Bytes when complete.
    total: u64,
}

/// A file that was written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    /// As [`super::Header::digest`] of the file.
    pub(crate) header_digest: blake3::Hash,
}

impl TensorWriter {
    /// Begins a file; its data is what the entries say, in their order.
    pub(crate) fn create(path: &Path, entries: &[HeaderEntry]) -> Result<Self> {
        let temporary = files::temporary(path);
        let file = File::create(&temporary).map_err(Error::io("creating", &temporary))?;
        let header = encode_header(entries);
        let total = header.len() as u64 + entries.iter().map(HeaderEntry::bytes).sum::<u64>();
        let header_digest = blake3::hash(&header[8..]);
        let mut writer =
            Self { path: path.to_path_buf(), temporary, file, header_digest, at: 0, total };
        writer.write(&header)?;
        Ok(writer)
    }

    /// Place of the next byte in the file.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Appends data.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io("writing", &self.temporary))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Makes it the real file.
    pub(crate) fn finish(self) -> Result<Written> {
        assert_eq!(self.at, self.total, "everything that the header announces was written");
        files::publish(&self.file, &self.temporary, &self.path)?;
        Ok(Written { bytes: self.total, header_digest: self.header_digest })
    }
}
