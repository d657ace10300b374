//! What placing memory asks of the kernel, behind a trait so that tests can refuse any of it.

#![expect(unsafe_code, reason = "advice and locks on mappings of this process")]

use std::{fmt, io, ptr::NonNull};

use shimmer_kernels::Arena;

/// Flag of mlock2, as in linux/mman.h: pages are locked when they come, not fetched because of the lock.
const MLOCK_ONFAULT: libc::c_uint = 1;

/// The calls. Addresses are those of arenas that the caller keeps.
pub(super) trait System: Send + Sync + fmt::Debug {
    /// New address space.
    fn map(&self, bytes: usize) -> io::Result<Arena> {
        Arena::new(bytes)
    }

    /// Lets the pages of an arena that nobody has touched come from these nodes in turn.
    fn interleave(&self, arena: &Arena, nodes: &[u32]) -> io::Result<()>;

    /// The node of the page at each address, or a negative error number: there is none before the first touch.
    fn locate(&self, addresses: &[usize]) -> io::Result<Vec<libc::c_int>>;

    /// Keeps the pages of a range in memory from the moment when they are first touched.
    fn lock(&self, start: NonNull<u8>, bytes: usize) -> io::Result<()>;

    /// Bytes that this process may lock.
    fn lock_limit(&self) -> u64 {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the structure is this function's own.
        let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
        if result == 0 { limit.rlim_cur } else { 0 }
    }
}

/// The kernel of this machine.
#[derive(Debug)]
pub(super) struct Kernel;

impl System for Kernel {
    fn interleave(&self, arena: &Arena, nodes: &[u32]) -> io::Result<()> {
        let bits = libc::c_ulong::BITS;
        let words = nodes.iter().max().map_or(1, |last| last / bits + 1);
        let mut mask: Vec<libc::c_ulong> = vec![0; words as usize];
        for node in nodes {
            mask[(node / bits) as usize] |= 1 << (node % bits);
        }
        // SAFETY: the mask has as many bits as the call says (the kernel reads one less). Without MPOL_MF_MOVE a policy
        // changes where pages will come from, and no contents.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                arena.start().as_ptr(),
                arena.mapped_bytes(),
                libc::MPOL_INTERLEAVE,
                mask.as_ptr(),
                words * bits + 1,
                0,
            )
        };
        check(result)
    }

    fn locate(&self, addresses: &[usize]) -> io::Result<Vec<libc::c_int>> {
        let mut nodes = vec![0; addresses.len()];
        let none = std::ptr::null::<libc::c_int>();
        // SAFETY: without target nodes the call only asks; both arrays have an entry for each address.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                addresses.len(),
                addresses.as_ptr(),
                none,
                nodes.as_mut_ptr(),
                0,
            )
        };
        check(result).map(|()| nodes)
    }

    fn lock(&self, start: NonNull<u8>, bytes: usize) -> io::Result<()> {
        // SAFETY: a lock changes no contents, whatever the range.
        check(unsafe { libc::mlock2(start.as_ptr().cast(), bytes, MLOCK_ONFAULT) })
    }
}

/// The unit in which the system gives memory and takes it back.
pub(super) fn page_bytes() -> usize {
    // SAFETY: reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("every system has pages")
}

/// Gives the pages of a range back to the system; they read as zeros afterwards.
///
/// # Safety
/// The range is made of whole pages of a private anonymous mapping, and nobody else uses them.
pub(super) unsafe fn discard(start: NonNull<u8>, bytes: usize) {
    let start = start.as_ptr().cast();
    // SAFETY: the caller owns the contents.
    if check(unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) }).is_ok() {
        return;
    }
    // Locked pages. Kernels from 5.18 discard them in place; before that the lock goes first, and `attach` renews it.
    // SAFETY: the caller owns the contents.
    if check(unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED_LOCKED) }).is_ok() {
        return;
    }
    // SAFETY: the end of a lock changes no contents.
    let unlocked = check(unsafe { libc::munlock(start, bytes) });
    // SAFETY: the caller owns the contents.
    let discarded = check(unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) });
    assert!(discarded.is_ok(), "own pages can be discarded: {unlocked:?}, {discarded:?}");
}

fn check(result: impl Into<i64>) -> io::Result<()> {
    if result.into() == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
