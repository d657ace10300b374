//! What this kernel and a drive allow, tried: for whoever wants to know before a worker is started.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use super::{
    files::{DirectFile, network_file_system},
    uring,
};

/// Bytes of one read of a speed test: about a slab of a large model.
const BLOCK_BYTES: usize = 1 << 20;
/// Every alignment that a file system may ask for that slabs keep.
const ALIGNMENT: usize = 4096;

/// Opens a ring as the reader would, and closes it.
///
/// # Errors
/// The kernel, its settings or a filter of system calls refuses it.
pub fn uring() -> io::Result<()> {
    uring::probe()
}

/// Whether a file can be read past the page cache: the alignment that reads must keep, or why not.
///
/// # Errors
/// It cannot be opened for another reason.
pub fn direct(path: &Path) -> io::Result<Result<usize, String>> {
    Ok(match DirectFile::open(path)? {
        Ok(file) => Ok(file.alignment().unwrap_or(ALIGNMENT)),
        Err(reason) => Err(reason.to_string()),
    })
}

/// The network file system that a file lies on, if it does.
///
/// # Errors
/// It cannot be opened.
pub fn network(path: &Path) -> io::Result<Option<&'static str>> {
    File::open(path).map(|file| network_file_system(&file))
}

/// What a speed test read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Bytes read.
    pub bytes: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Whether the page cache was passed by; else it may be what was measured.
    pub direct: bool,
}

/// Reads a file in blocks of 1 MiB by several threads, until it ends, `most_bytes` are read or `limit` is over.
///
/// # Errors
/// It cannot be opened or read.
pub fn read_speed(
    path: &Path,
    threads: usize,
    most_bytes: u64,
    limit: Duration,
) -> io::Result<Speed> {
    let opened = DirectFile::open(path)?;
    let buffered = File::open(path)?;
    let direct = opened.is_ok();
    let file = opened.as_ref().map_or(&buffered, DirectFile::file);
    let block_bytes = BLOCK_BYTES as u64;
    let blocks = buffered.metadata()?.len().min(most_bytes) / block_bytes;
    if blocks == 0 {
        return small(&buffered);
    }
    let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let began = Instant::now();
    let read = |()| -> io::Result<u64> {
        let mut memory = vec![0; BLOCK_BYTES + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let block = &mut memory[start..start + BLOCK_BYTES];
        let mut bytes = 0;
        while began.elapsed() < limit && !failed.load(Relaxed) {
            let index = next.fetch_add(1, Relaxed);
            if index >= blocks {
                break;
            }
            let outcome = file.read_exact_at(block, index * block_bytes);
            outcome.inspect_err(|_| failed.store(true, Relaxed))?;
            bytes += block_bytes;
        }
        Ok(bytes)
    };
    let bytes = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(|| read(()))).collect();
        let joined =
            handles.into_iter().map(|handle| handle.join().expect("a read does not panic"));
        joined.sum::<io::Result<u64>>()
    })?;
    Ok(Speed { bytes, seconds: began.elapsed().as_secs_f64(), direct })
}

/// A file of less than a block, through the page cache.
fn small(mut file: &File) -> io::Result<Speed> {
    let began = Instant::now();
    file.seek(SeekFrom::Start(0))?;
    let bytes = file.read_to_end(&mut Vec::new())? as u64;
    Ok(Speed { bytes, seconds: began.elapsed().as_secs_f64(), direct: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_test_reads_no_more_than_it_may() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 5 << 20]).unwrap();
        let limit = Duration::from_secs(60);
        let speed = read_speed(&path, 3, 3 << 20, limit).unwrap();
        assert_eq!((speed.bytes, speed.seconds > 0.0), (3 << 20, true));
        assert_eq!(read_speed(&path, 2, u64::MAX, limit).unwrap().bytes, 5 << 20);
        assert_eq!(read_speed(&path, 2, u64::MAX, Duration::ZERO).unwrap().bytes, 0);
        std::fs::write(&path, b"small").unwrap();
        let speed = read_speed(&path, 2, u64::MAX, limit).unwrap();
        assert_eq!((speed.bytes, speed.direct), (5, false));
        assert!(read_speed(&directory.path().join("none"), 1, 1, limit).is_err());
    }

    #[test]
    fn a_file_is_direct_or_says_why_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![0; ALIGNMENT]).unwrap();
        match direct(&path).unwrap() {
            Ok(alignment) => assert!(alignment.is_power_of_two() && alignment <= ALIGNMENT),
            Err(reason) => assert!(reason.contains("file system"), "{reason}"),
        }
        assert_eq!(network(&path).unwrap(), None);
        assert!(direct(&directory.path().join("none")).is_err());
    }
}
