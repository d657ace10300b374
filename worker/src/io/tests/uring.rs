//! What only io_uring can meet: a system that refuses it, and submissions that are put off.

use std::{
    ops::Range,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use super::{bench::Files, *};
use crate::io::edge::Edge;

/// The ring is refused.
#[derive(Debug)]
struct Forbidden(i32);

impl Edge for Forbidden {
    fn open_ring(&self) -> Result<(), i32> {
        Err(self.0)
    }
}

#[test]
fn a_system_without_io_uring_gets_threads() {
    let files = Files::new(0);
    // What seccomp profiles, the sysctl and old kernels say.
    for number in [libc::EPERM, libc::EACCES, libc::ENOSYS] {
        let reader = files.reader_at(IoBackend::Uring, 1, Forbidden(number));
        assert_eq!(reader.reader.backend(), IoBackend::Pread);
        reader.read(reader.jobs(&[0], 1)).iter().for_each(|done| reader.check_bytes(done));
        assert_eq!(reader.counters.snapshot().uring_fallbacks, 1);
    }
}

/// Of each ten submissions, those in a range are refused.
#[derive(Debug)]
struct Busy {
    number: i32,
    refused: Range<u32>,
    calls: AtomicU32,
}

impl Edge for Busy {
    fn submit(&self) -> Result<(), i32> {
        let call = self.calls.fetch_add(1, Relaxed) % 10;
        if self.refused.contains(&call) { Err(self.number) } else { Ok(()) }
    }
}

/// Reads with submissions refused; true if the ring was given up.
fn check_busy(files: &Files, number: i32, refused: Range<u32>) -> bool {
    let reader = files.reader_at(IoBackend::Uring, 1, Busy { number, refused, calls: 0.into() });
    for _ in 0..3 {
        reader.read(reader.jobs(&[0, 1], 4)).iter().for_each(|done| reader.check_bytes(done));
    }
    reader.counters.snapshot().uring_fallbacks > 0
}

#[test]
fn submissions_that_are_put_off_are_repeated() {
    // True where this system has no ring to put anything off.
    let files = Files::new(0);
    let without = check_busy(&files, 0, 0..0);
    for number in [libc::EAGAIN, libc::EBUSY, libc::EINTR] {
        for refused in [0..1, 0..5, 0..9, 1..10] {
            assert_eq!(check_busy(&files, number, refused), without);
        }
    }
}

#[test]
fn a_ring_that_takes_nothing_is_given_up_without_waiting_on_it() {
    let files = Files::new(0);
    for number in [libc::EAGAIN, libc::EBUSY, libc::ENXIO] {
        assert!(check_busy(&files, number, 0..10));
    }
}

#[test]
fn a_ring_that_breaks_gives_back_what_the_kernel_has_first() {
    assert!(check_busy(&Files::new(0), libc::ENXIO, 1..10));
}
