//! The ring, and the one promise that it needs: memory that the kernel may write to is nobody else's until the kernel says
//! that it is done.
//!
//! A read takes the job that owns the memory into a private table and gives it back with the completion. A ring that is
//! dropped waits for the reads that are with the kernel.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
    thread,
    time::Instant,
};

use io_uring::{EnterFlags, IoUring, Probe, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use super::{PAUSE, ReadSink, Work};
use crate::{io::progress::Piece, tier_options::IO_DEPTH_MAX};

/// Marks the completion of the wake-up; reads have their place in the table.
const WAKE: u64 = u64::MAX;

/// A read that is under way.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) work: Work,
    pub(super) sink: Arc<dyn ReadSink>,
    pub(super) piece: Piece,
    pub(super) started: Instant,
}

/// The ring and the reads in it.
pub(super) struct Ring {
    ring: IoUring,
    wake: OwnedFd,
    /// Reads that were pushed and have not come back, by their number.
    flights: Box<[Option<Flight>]>,
    free: Vec<usize>,
    /// Marks of the entries that were pushed and that the kernel has not taken yet, in the order in which it will.
    unsubmitted: VecDeque<u64>,
    /// Reads that the kernel has taken and not completed: it may write to their memory.
    with_kernel: usize,
    /// Whether the wake-up is pushed.
    listens: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("depth", &self.flights.len()).finish_non_exhaustive()
    }
}

impl Ring {
    /// Opens a ring for `depth` reads at a time and tries it. `wake` ends a wait when it is written to.
    pub(super) fn open(depth: u32, wake: OwnedFd) -> io::Result<Self> {
        let depth = depth.clamp(1, IO_DEPTH_MAX);
        // One more for the wake-up. The completion queue has twice as many entries, so it never overflows.
        let ring = IoUring::new((depth + 1).next_power_of_two())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Nop::CODE, opcode::PollAdd::CODE, opcode::Read::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let depth = usize::try_from(depth).expect("a small number");
        let flights = (0..depth).map(|_| None).collect();
        let free = (0..depth).rev().collect();
        let unsubmitted = VecDeque::new();
        let mut ring =
            Self { ring, wake, flights, free, unsubmitted, with_kernel: 0, listens: false };
        // A sandbox may allow the set-up and refuse what follows.
        ring.push_entry(&opcode::Nop::new().build(), WAKE);
        ring.enter()?;
        assert!(ring.reap().is_none(), "nothing but the trial was under way");
        Ok(ring)
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// No read is pushed or under way.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.flights.len()
    }

    /// Whether something will complete without anybody's doing: a read that the kernel has taken.
    pub(super) fn has_submitted(&self) -> bool {
        self.with_kernel > 0
    }

    /// Adds a read of a piece of `work`'s memory.
    pub(super) fn push(
        &mut self,
        file: &File,
        offset: u64,
        mut work: Work,
        sink: Arc<dyn ReadSink>,
        piece: Piece,
    ) {
        let place = self.free.pop().expect("the caller has asked for room");
        let bytes = &mut work.job.memory[piece.range.clone()];
        let length = u32::try_from(bytes.len()).expect("pieces are at most 1 GiB");
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), bytes.as_mut_ptr(), length)
            .offset(offset)
            .build();
        // The table owns the memory from here on. It lies in a mapping: moving its owner does not move it.
        self.flights[place] = Some(Flight { work, sink, piece, started: Instant::now() });
        self.push_entry(&entry, place as u64);
    }

    /// Adds an entry; one that points to memory points to that of a job in the table.
    fn push_entry(&mut self, entry: &squeue::Entry, mark: u64) {
        let entry = entry.clone().user_data(mark);
        // SAFETY: the entry is a read whose memory belongs to a job in `flights`, which gives it up only when the kernel has
        // completed the read (`reap`) or will never see it (`dismantle`), or an operation without memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the queue has an entry for each read and one for the wake-up");
        self.unsubmitted.push_back(mark);
    }

    /// Gives the kernel what was pushed and waits until something is complete. On an error nothing was waited for.
    fn enter(&mut self) -> io::Result<()> {
        let entered = self.ring.submit_and_wait(1);
        // Whatever was answered: what has left the queue is with the kernel.
        let left = self.ring.submission().len();
        let taken = self.unsubmitted.drain(..self.unsubmitted.len() - left);
        self.with_kernel += taken.filter(|mark| *mark != WAKE).count();
        entered.map(drop)
    }

    /// Gives the kernel what was pushed and waits until something is complete, be it a wake-up. Returns the number of the
    /// system's error; then nothing was waited for.
    pub(super) fn submit_and_wait(&mut self) -> Result<(), i32> {
        if !self.listens {
            self.listens = true;
            let events = u32::from(PollFlags::IN.bits());
            let poll = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), events).build();
            self.push_entry(&poll, WAKE);
        }
        self.enter().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// Waits until something is complete without giving the kernel anything. Only while something is with the kernel.
    pub(super) fn wait(&self) {
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no entries are taken and no argument is passed.
        let waited = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, flags, None) };
        if waited.is_err() {
            // Completions come without asking, too; a system that refuses to wait must not make this a busy loop.
            thread::sleep(PAUSE);
        }
    }

    /// The next read that is complete: bytes, or the number of the error.
    pub(super) fn reap(&mut self) -> Option<(Flight, Result<usize, i32>)> {
        loop {
            let completion = self.ring.completion().next()?;
            if completion.user_data() == WAKE {
                self.listens = false;
                drain(&self.wake);
                continue;
            }
            let place = usize::try_from(completion.user_data()).expect("our own number");
            let flight = self.flights[place].take().expect("a read completes once");
            self.free.push(place);
            self.with_kernel -= 1;
            let result = completion.result();
            return Some((flight, usize::try_from(result).map_err(|_| -result)));
        }
    }

    /// Takes back what the kernel has not taken, for good: the ring goes with it. Only while no read is with the kernel.
    pub(super) fn dismantle(mut self) -> impl Iterator<Item = Flight> {
        assert!(!self.has_submitted(), "reads are with the kernel");
        std::mem::take(&mut self.flights).into_iter().flatten()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.with_kernel > 0 {
            if self.reap().is_none() {
                self.wait();
            }
        }
    }
}

/// A descriptor to wake a ring with.
pub(super) fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes who waits on it, now or next.
pub(super) fn wake(eventfd: &OwnedFd) {
    // It fails only when 2^64 - 2 wake-ups were not heard, and then one more would not be either.
    let _unheard = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// Waits for a wake-up without a ring.
pub(super) fn sleep(eventfd: &OwnedFd) {
    let _interrupted = rustix::event::poll(&mut [PollFd::new(eventfd, PollFlags::IN)], None);
    drain(eventfd);
}

fn drain(eventfd: &OwnedFd) {
    let _nothing_there = rustix::io::read(eventfd, &mut [0u8; 8]);
}
