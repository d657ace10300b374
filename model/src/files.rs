//! File access: positional reads that never stop half way, small files with a limit, and writes that are all or nothing.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The largest piece that one read call is asked for. Linux returns at most 2^31 - 4096 bytes from a read however much
/// is asked, so a reader that trusts one call cuts large tensors in silence; every read here is a loop.
const READ_PIECE: usize = 1 << 30;

/// Configuration, tokenizer and index files above this are refused: the largest published ones have tens of megabytes.
const SMALL_FILE_LIMIT: u64 = 512 << 20;

/// Fills `out` from `offset`, piece by piece.
pub(crate) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    read_exact_in_pieces(file, out, offset, READ_PIECE)
}

fn read_exact_in_pieces(
    file: &impl ReadAt,
    out: &mut [u8],
    offset: u64,
    piece: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        let end = out.len().min(done.saturating_add(piece));
        let at = offset.checked_add(done as u64).ok_or(io::ErrorKind::InvalidInput)?;
        match file.read_at(&mut out[done..end], at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// One positional read call.
trait ReadAt {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, out, offset)
    }
}

pub(crate) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(Error::io("opening", path))
}

pub(crate) fn length(file: &File, path: &Path) -> Result<u64> {
    Ok(file.metadata().map_err(Error::io("reading the size of", path))?.len())
}

/// Reads a whole file that is small by nature.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>> {
    let found = fs::metadata(path).map_err(Error::io("opening", path))?.len();
    if found > SMALL_FILE_LIMIT {
        let hint = "this is not the file that its name promises";
        return Err(Error::FileLength {
            file: path.to_path_buf(),
            expected: SMALL_FILE_LIMIT,
            found,
            hint,
        });
    }
    fs::read(path).map_err(Error::io("reading", path))
}

/// Where a file is written before it is complete.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    path.with_file_name(name)
}

/// Writes a file so that it is there completely or not at all, also after a power failure.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = temporary(path);
    let mut file = File::create(&temporary).map_err(Error::io("creating", &temporary))?;
    file.write_all(bytes).map_err(Error::io("writing", &temporary))?;
    publish(&file, &temporary, path)
}

/// Makes a completely written temporary file the real one.
pub(crate) fn publish(file: &File, temporary: &Path, path: &Path) -> Result<()> {
    file.sync_all().map_err(Error::io("flushing", temporary))?;
    fs::rename(temporary, path).map_err(Error::io("renaming to", path))?;
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let directory = File::open(parent).map_err(Error::io("opening", parent))?;
        directory.sync_all().map_err(Error::io("flushing", parent))?;
    }
    Ok(())
}

pub(crate) fn create_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(Error::io("creating", path))
}

/// Names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(Error::io("listing", directory))? {
        let entry = entry.map_err(Error::io("listing", directory))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Bytes that the file system of `directory` has free for this user.
pub(crate) fn free_space(directory: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(directory)
        .map_err(|error| Error::io("asking the free space of", directory)(error.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Refuses when the file system of `directory` has less than `needed` bytes free for this user.
pub(crate) fn require_space(directory: &Path, needed: u64) -> Result<()> {
    let free = free_space(directory)?;
    if needed > free {
        Err(Error::NoSpace { path: directory.to_path_buf(), needed, free })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives at most `most` bytes per call, and is interrupted before each of them.
    struct Stingy<'a> {
        bytes: &'a [u8],
        most: usize,
        interrupt: std::cell::Cell<bool>,
    }

    impl ReadAt for Stingy<'_> {
        fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
            if self.interrupt.replace(!self.interrupt.get()) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let from = usize::try_from(offset).unwrap().min(self.bytes.len());
            let count = out.len().min(self.most).min(self.bytes.len() - from);
            out[..count].copy_from_slice(&self.bytes[from..from + count]);
            Ok(count)
        }
    }

    fn check(
        most: usize,
        piece: usize,
        offset: u64,
        length: usize,
        expected: Result<(), io::ErrorKind>,
    ) {
        let bytes: Vec<u8> = (0..=255).collect();
        let mut out = vec![0; length];
        let source = Stingy { bytes: &bytes, most, interrupt: true.into() };
        let result =
            read_exact_in_pieces(&source, &mut out, offset, piece).map_err(|error| error.kind());
        assert_eq!(result, expected);
        if result.is_ok() {
            let from = usize::try_from(offset).unwrap();
            assert_eq!(out, bytes[from..from + length]);
        }
    }

    #[test]
    fn short_reads_are_continued_whatever_the_piece() {
        for piece in [1, 3, 64, 1 << 20] {
            check(1, piece, 0, 256, Ok(()));
            check(7, piece, 5, 200, Ok(()));
            check(usize::MAX, piece, 255, 1, Ok(()));
        }
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        check(7, 3, 250, 7, Err(io::ErrorKind::UnexpectedEof));
        check(7, 3, u64::MAX, 2, Err(io::ErrorKind::UnexpectedEof));
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused_with_both_numbers() {
        let directory = tempfile::tempdir().unwrap();
        require_space(directory.path(), 1).unwrap();
        let text = require_space(directory.path(), u64::MAX).unwrap_err().to_string();
        assert!(text.contains("18446744073709551615 more bytes are needed"), "{text}");
    }
}
