//! Page-aligned byte arenas, advised to use huge pages.
//!
//! A decode step reads every weight once; with 4 KiB pages the translation of addresses then costs as much as the reads
//! (huge pages gave about twice the bandwidth on a virtual machine).

#![expect(
    unsafe_code,
    reason = "anonymous mappings: the allocator gives neither the alignment nor the advice"
)]

use std::io;
use std::ptr::NonNull;

/// Alignment of every arena and the granule of its advice: one huge page.
pub const PAGE_BYTES: usize = 2 << 20;

/// Zeroed, 2 MiB-aligned bytes that are returned to the system when dropped.
///
/// One mapping each, a whole number of huge pages long: the kernel counts mappings and allows a process about 65,000.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the arena owns its mapping alone; it is plain memory.
unsafe impl Send for Arena {}
// SAFETY: shared access only reads.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps at least `bytes` zeroed bytes. Memory is taken when it is first touched.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let too_large =
            || io::Error::new(io::ErrorKind::OutOfMemory, format!("an arena of {bytes} bytes"));
        // One huge page more than needed, so that an aligned start exists.
        let mapped = bytes
            .max(1)
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|b| b.checked_add(PAGE_BYTES))
            .filter(|b| isize::try_from(*b).is_ok())
            .ok_or_else(too_large)?;
        // SAFETY: a new private anonymous mapping, chosen by the kernel, touches no memory of this process.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping =
            NonNull::new(mapping.cast()).expect("a mapping without a fixed address is not at 0");
        let before = mapping.align_offset(PAGE_BYTES);
        // SAFETY: the offset is below PAGE_BYTES, by which the mapping is longer than what is kept.
        let start = unsafe { mapping.add(before) };
        let arena = Self { start, len: bytes };
        let kept = arena.mapped_bytes();
        // SAFETY: the kept part ends within the mapping, whose last `after` bytes begin there.
        let end = unsafe { start.add(kept) };
        for (unused, bytes) in [(mapping, before), (end, mapped - before - kept)] {
            unmap(unused, bytes)?;
        }
        arena.advise_huge_pages();
        Ok(arena)
    }

    /// Asks for huge pages where the arena fills them: the touch of a part of one would take more memory than was asked for.
    /// Advice only: a system without them is slower, not wrong.
    fn advise_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        {
            let len = self.len / PAGE_BYTES * PAGE_BYTES;
            // SAFETY: the range lies in this arena's mapping, and the advice changes no contents.
            let _refused =
                unsafe { libc::madvise(self.start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        }
    }

    /// Where the bytes begin. Who writes through it must know that nobody else uses those bytes.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes of address space taken, whole huge pages.
    pub fn mapped_bytes(&self) -> usize {
        self.len.max(1).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` are mapped, initialised (zeroed by the kernel) and owned by the arena.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// All bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let result = unmap(self.start, self.mapped_bytes());
        debug_assert!(result.is_ok(), "an own mapping can be unmapped: {result:?}");
    }
}

/// Gives back a part of a mapping that nobody uses.
fn unmap(start: NonNull<u8>, bytes: usize) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the callers own the range, and nothing borrows it any more.
    match unsafe { libc::munmap(start.as_ptr().cast(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zeroed_aligned_and_writable() {
        for bytes in [0, 1, 4096, PAGE_BYTES, PAGE_BYTES + 1] {
            let mut arena = Arena::new(bytes).unwrap();
            assert_eq!(arena.len(), bytes);
            assert!(arena.as_slice().as_ptr().addr().is_multiple_of(PAGE_BYTES));
            assert!(arena.as_slice().iter().all(|b| *b == 0));
            arena.as_mut_slice().fill(7);
            assert!(arena.as_slice().iter().all(|b| *b == 7));
        }
    }

    #[test]
    fn impossible_size_is_an_error() {
        assert!(Arena::new(usize::MAX).is_err());
        assert!(Arena::new(isize::MAX.cast_unsigned()).is_err());
    }
}
