//! Files that are read past the page cache, and file systems for which reading has to be done with more thought.
//!
//! A container has its layer files open for reads through the page cache, each copy of it of its own. Reading past the
//! cache takes a second handle for each, so a worker has at most layers x copies x 2 of them open. Headers and manifests
//! are never read through the second handle, which refuses small and odd requests.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use rustix::fs::{AtFlags, StatxFlags};

/// What slabs are aligned to in their files, and what is asked of memory and offsets when the system says nothing.
const ALIGNMENT: usize = 4096;

/// A file opened past the page cache.
#[derive(Debug)]
pub(super) struct DirectFile {
    file: File,
    alignment: usize,
    refused: AtomicBool,
}

/// Why a file cannot be read past the page cache.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotDirect {
    #[error("its file system refuses it ({0})")]
    Refused(io::Error),
    #[error("its file system has no such reads")]
    Unsupported,
    #[error(
        "its file system wants offsets in steps of {0} bytes, slabs lie in steps of {ALIGNMENT}"
    )]
    Alignment(usize),
}

impl DirectFile {
    /// Opens a file, if its file system allows it. The outer error is one that has nothing to do with direct reads.
    pub(super) fn open(path: &Path) -> io::Result<Result<Self, NotDirect>> {
        let file = match OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => file,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                return Ok(Err(NotDirect::Refused(error)));
            }
            Err(error) => return Err(error),
        };
        let alignment = match alignment(&file) {
            Some(0) => return Ok(Err(NotDirect::Unsupported)),
            Some(alignment) => alignment.max(1),
            None => ALIGNMENT,
        };
        if alignment > ALIGNMENT {
            return Ok(Err(NotDirect::Alignment(alignment)));
        }
        Ok(Ok(Self { file, alignment, refused: AtomicBool::new(false) }))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// What offset and length of a read, and the memory's address, must be multiples of; none once a read was refused.
    pub(super) fn alignment(&self) -> Option<usize> {
        (!self.refused.load(Relaxed)).then_some(self.alignment)
    }

    /// A read was refused: the others need not try. True for the first one.
    pub(super) fn refuse(&self) -> bool {
        !self.refused.swap(true, Relaxed)
    }
}

/// What the kernel says about direct reads: 0 for none, the larger of the alignments of memory and offset, or nothing on
/// kernels before 6.1 and on file systems that do not say.
fn alignment(file: &File) -> Option<usize> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    if memory == 0 || offset == 0 {
        return Some(0);
    }
    usize::try_from(memory.max(offset)).ok()
}

/// The name of the network file system that a file lies on, if it does.
pub(super) fn network_file_system(file: &File) -> Option<&'static str> {
    network_name(i128::from(rustix::fs::fstatfs(file).ok()?.f_type))
}

fn network_name(magic: i128) -> Option<&'static str> {
    // From linux/magic.h and the file systems' own sources.
    const NETWORK: [(u32, &str); 10] = [
        (0x0000_6969, "NFS"),
        (0xFF53_4D42, "CIFS"),
        (0xFE53_4D42, "SMB"),
        (0x0BD0_0BD0, "Lustre"),
        (0x00C3_6400, "Ceph"),
        (0x4750_4653, "GPFS"),
        (0x0102_1997, "9P"),
        (0x5346_414F, "AFS"),
        (0x1980_0202, "BeeGFS"),
        (0x6573_5546, "FUSE"),
    ];
    NETWORK.iter().find(|(known, _)| i128::from(*known) == magic).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alignment_is_a_power_of_two_that_slabs_keep() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![0; ALIGNMENT]).unwrap();
        assert_eq!(network_file_system(&File::open(&path).unwrap()), None);
        // Whether this directory's file system has direct reads is not ours to say.
        let Ok(direct) = DirectFile::open(&path).unwrap() else { return };
        let alignment = direct.alignment().unwrap();
        assert!(alignment.is_power_of_two() && alignment <= ALIGNMENT);
        assert!(direct.refuse() && !direct.refuse());
        assert_eq!(direct.alignment(), None);
    }

    #[test]
    fn network_file_systems_are_named() {
        assert_eq!(network_name(0x6969), Some("NFS"));
        assert_eq!(network_name(0x0BD0_0BD0), Some("Lustre"));
        // ext4, XFS, tmpfs, overlay.
        for local in [0xEF53, 0x5846_5342, 0x0102_1994, 0x794C_7630] {
            assert_eq!(network_name(local), None);
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_an_error_of_its_own() {
        let error = DirectFile::open(Path::new("no such file")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
