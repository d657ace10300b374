//! One file that comes in pieces.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use crate::convert::ConvertProgress;
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{FileEntry, Manifest};
use crate::parts::{Part, parts};
use crate::safetensors::TensorFile;
use crate::schema::TEXT_FILES;

/// Bytes that are read and hashed at once.
const HASH_BYTES: usize = 4 << 20;
/// Length of the mark at the beginning of a record.
const MARK_BYTES: usize = 32;

/// A file on its way. Pieces may be written at the same time from several threads.
#[derive(Debug)]
pub struct IncomingFile {
    manifest: Manifest,
    entry: FileEntry,
    piece_bytes: u64,
    target: PathBuf,
    path: PathBuf,
    data: File,
    record_path: PathBuf,
    record: Mutex<Record>,
}

/// Which version of the file comes, and how many bytes of each piece have. On disk: 32 bytes, then 8 for each piece.
#[derive(Debug)]
struct Record {
    file: File,
    mark: [u8; MARK_BYTES],
    received: Vec<u64>,
}

/// A stretch of a file whose bytes are not those of the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The tensor or expert, or "the header", or "the file".
    pub what: String,
    /// Digest by the manifest.
    pub expected: String,
    /// Digest of what came, or what is wrong with it.
    pub found: String,
    range: (u64, u64),
}

/// What became of a file whose pieces are all there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settled {
    /// It has its name.
    Named,
    /// These stretches are wrong; the pieces that they touch are missing again.
    Damaged(Vec<Fault>),
}

impl IncomingFile {
    pub(super) fn open(
        directory: &Path,
        state: &Path,
        manifest: &Manifest,
        entry: &FileEntry,
        piece_bytes: u64,
    ) -> Result<Self> {
        assert!(piece_bytes > 0, "a piece has bytes");
        let (target, path) = (directory.join(&entry.file), state.join(&entry.file));
        let mut record_path = path.clone().into_os_string();
        record_path.push(".received");
        let record_path = PathBuf::from(record_path);
        let open = |path: &Path| {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)
                .map_err(Error::io("creating", path))
        };
        let (data, file) = (open(&path)?, open(&record_path)?);
        let pieces = usize::try_from(entry.bytes.div_ceil(piece_bytes))
            .expect("a file that fits a disk has a countable number of pieces");
        let kept = (files::length(&data, &path)? == entry.bytes)
            .then(|| Record::read(&file, pieces))
            .flatten();
        let (mark, received) = kept.unwrap_or_else(|| ([0; MARK_BYTES], vec![0; pieces]));
        let record = Mutex::new(Record { file, mark, received });
        let (manifest, entry) = (manifest.clone(), entry.clone());
        let this = Self { manifest, entry, piece_bytes, target, path, data, record_path, record };
        if !this.is_sound() {
            this.reset([0; MARK_BYTES])?;
        }
        Ok(this)
    }

    /// Its path below the container.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.entry.file
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.entry.bytes
    }

    /// What is missing of each piece that is not whole, in order.
    #[must_use]
    pub fn missing(&self) -> Vec<Range<u64>> {
        let record = self.record();
        let pieces = (0..).zip(&record.received);
        let missing = pieces.map(|(piece, received)| {
            let whole = self.piece(piece);
            whole.start + received..whole.end
        });
        missing.filter(|range| !range.is_empty()).collect()
    }

    /// Bytes that are missing.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.missing().iter().map(|range| range.end - range.start).sum()
    }

    /// Whether what has come so far is of the version with this mark. A file of which nothing has come takes any.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn is_of(&self, mark: &str) -> Result<bool> {
        let mark = self.digest_of(mark);
        {
            let record = self.record();
            if record.mark == mark {
                return Ok(true);
            }
            if record.received.iter().any(|&received| received > 0) {
                return Ok(false);
            }
        }
        self.reset(mark)?;
        Ok(true)
    }

    /// Forgets what has come, and begins with the version of this mark.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn restart(&self, mark: &str) -> Result<()> {
        self.reset(self.digest_of(mark))
    }

    /// Writes bytes from `offset` on. They count as received where they continue their piece.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset + bytes.len() as u64;
        assert!(end <= self.entry.bytes, "a write stays inside its file");
        self.data.write_all_at(bytes, offset).map_err(Error::io("writing", &self.path))?;
        let mut record = self.record();
        let mut at = offset;
        while at < end {
            let piece = usize::try_from(at / self.piece_bytes).expect("it was counted");
            let whole = self.piece(piece as u64);
            let next = whole.end.min(end);
            // The data is written before its record, so that a process that is killed leaves no record without data.
            if whole.start + record.received[piece] == at {
                record.received[piece] = next - whole.start;
                record.write(piece).map_err(Error::io("writing", &self.record_path))?;
            }
            at = next;
        }
        Ok(())
    }

    /// Reads back and compares every byte, and gives the file its name if all are right.
    ///
    /// # Errors
    /// The file cannot be read, flushed or renamed, or `progress` said stop.
    ///
    /// # Panics
    /// A piece is missing.
    pub fn settle(&self, progress: &dyn ConvertProgress) -> Result<Settled> {
        assert_eq!(self.missing_bytes(), 0, "every piece is there");
        let faults = faults(&self.manifest, &self.entry, &self.path, progress)?;
        if faults.is_empty() {
            files::publish(&self.data, &self.path, &self.target)?;
            return Ok(Settled::Named);
        }
        let mut record = self.record();
        for piece in 0..record.received.len() {
            let whole = self.piece(piece as u64);
            let touches = |fault: &Fault| fault.range.0 < whole.end && whole.start < fault.range.1;
            if faults.iter().any(touches) {
                record.received[piece] = 0;
                record.write(piece).map_err(Error::io("writing", &self.record_path))?;
            }
        }
        Ok(Settled::Damaged(faults))
    }

    fn piece(&self, piece: u64) -> Range<u64> {
        let start = piece * self.piece_bytes;
        start..(start + self.piece_bytes).min(self.entry.bytes)
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A record of other pieces than these would be taken for one of them.
    fn digest_of(&self, mark: &str) -> [u8; MARK_BYTES] {
        let text = format!("{} {} {mark}", self.piece_bytes, self.entry.bytes);
        *blake3::hash(text.as_bytes()).as_bytes()
    }

    /// No piece has more than all of its bytes, and the data has its length.
    fn is_sound(&self) -> bool {
        let record = self.record();
        let fits = (0..).zip(&record.received).all(|(piece, &received)| {
            let whole = self.piece(piece);
            received <= whole.end - whole.start
        });
        let length = self.data.metadata().map(|meta| meta.len());
        fits && record.mark != [0; MARK_BYTES] && length.is_ok_and(|len| len == self.entry.bytes)
    }

    fn reset(&self, mark: [u8; MARK_BYTES]) -> Result<()> {
        let mut record = self.record();
        record.mark = mark;
        record.received.fill(0);
        record.write_all().map_err(Error::io("writing", &self.record_path))?;
        self.data.set_len(self.entry.bytes).map_err(Error::io("writing", &self.path))
    }
}

impl Record {
    fn read(file: &File, pieces: usize) -> Option<([u8; MARK_BYTES], Vec<u64>)> {
        let length = MARK_BYTES + 8 * pieces;
        if file.metadata().ok()?.len() != length as u64 {
            return None;
        }
        let mut bytes = vec![0; length];
        files::read_exact_at(file, &mut bytes, 0).ok()?;
        let (mark, counts) = bytes.split_first_chunk::<MARK_BYTES>()?;
        let (counts, _) = counts.as_chunks::<8>();
        Some((*mark, counts.iter().map(|count| u64::from_le_bytes(*count)).collect()))
    }

    fn write(&self, piece: usize) -> io::Result<()> {
        let at = (MARK_BYTES + 8 * piece) as u64;
        self.file.write_all_at(&self.received[piece].to_le_bytes(), at)
    }

    /// Counts first: a record that is cut between the two has a mark of old and counts of nothing.
    fn write_all(&self) -> io::Result<()> {
        let counts: Vec<u8> = self.received.iter().flat_map(|count| count.to_le_bytes()).collect();
        self.file.set_len((MARK_BYTES + counts.len()) as u64)?;
        self.file.write_all_at(&counts, MARK_BYTES as u64)?;
        self.file.write_all_at(&self.mark, 0)
    }
}

/// Reads a file and names every stretch that is not as the manifest says: parts with a digest, and the header before them.
pub(super) fn faults(
    manifest: &Manifest,
    entry: &FileEntry,
    path: &Path,
    progress: &dyn ConvertProgress,
) -> Result<Vec<Fault>> {
    let file = files::open(path)?;
    let parts = parts(manifest, entry);
    let check = |part: &Part<'_>| -> Result<Option<Fault>> {
        let found = hash(&file, path, part, progress)?;
        let range = (part.offset, part.offset + part.bytes);
        let (what, expected) = (part.name.clone(), part.digest.to_owned());
        Ok((found != expected).then_some(Fault { what, expected, found, range }))
    };
    let found: Vec<Option<Fault>> = parts.par_iter().map(check).collect::<Result<_>>()?;
    let mut faults: Vec<Fault> = found.into_iter().flatten().collect();
    let text = TEXT_FILES.contains(&entry.file.as_str());
    let start = parts.first().map_or(0, |part| part.offset);
    if !text && let Some(found) = header_fault(path, entry, start) {
        let (what, expected) = ("the header".to_owned(), entry.blake3.clone());
        faults.insert(0, Fault { what, expected, found, range: (0, start) });
    }
    Ok(faults)
}

/// The header's digest, or what is wrong with it, unless it is the one that the manifest says and ends at `start`.
fn header_fault(path: &Path, entry: &FileEntry, start: u64) -> Option<String> {
    let file = match TensorFile::open(path) {
        Ok(file) => file,
        Err(error) => return Some(error.to_string()),
    };
    let found = file.header().digest().to_hex().to_string();
    (found != entry.blake3 || file.header().data_start() != start).then_some(found)
}

fn hash(
    file: &File,
    path: &Path,
    part: &Part<'_>,
    progress: &dyn ConvertProgress,
) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; HASH_BYTES];
    let mut done = 0;
    while done < part.bytes {
        if progress.stop() {
            return Err(Error::Stopped { path: path.to_path_buf() });
        }
        let size = usize::try_from(part.bytes - done).unwrap_or(HASH_BYTES).min(HASH_BYTES);
        files::read_exact_at(file, &mut piece[..size], part.offset + done)
            .map_err(Error::io("reading", path))?;
        hasher.update(&piece[..size]);
        done += size as u64;
        progress.advance(size as u64);
    }
    Ok(hasher.finalize().to_hex().to_string())
}
