//! Reading with io_uring: one thread submits the slabs of all rounds and takes what comes back, in any order.
//!
//! A slab that is read for the first time is compared with its digest on threads beside it: a drive brings several times
//! what one core can hash.

#[expect(unsafe_code, reason = "the kernel writes to memory that no type can lend it")]
mod ring;

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crossbeam_channel::{Receiver, SendError, Sender};

use super::{
    ReadDone, ReadError, ReadJob, ReadSink, SlabReader, join_others,
    slabs::{Next, Slabs, Work},
};
use crate::{Counters, tier_options::IoBackend};
use ring::{Flight, Ring};

/// How often in a row a submission may be put off while nothing is under way; between two of them lies [`PAUSE`].
const AGAIN_MAX: u32 = 200;

/// What the kernel gets to find memory again.
const PAUSE: Duration = Duration::from_millis(1);

/// Opens a ring as a reader would, and closes it.
pub(super) fn probe() -> io::Result<()> {
    Ring::open(1, ring::eventfd()?).map(drop)
}

/// The thread with the ring, and those that compare.
#[derive(Debug)]
pub(super) struct Uring {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    slabs: Slabs,
    incoming: Mutex<VecDeque<(ReadJob, Arc<dyn ReadSink>)>>,
    /// An eventfd: what wakes the thread from waiting for completions.
    wake: OwnedFd,
    /// What is not begun yet ends without being read.
    closed: AtomicBool,
}

/// A job that is not with the kernel.
#[derive(Debug)]
struct Pending {
    work: Work,
    sink: Arc<dyn ReadSink>,
}

impl Uring {
    /// Starts the threads, `checkers` of which compare, with at most `depth` reads under way. Gives the slabs back if the
    /// system has no io_uring for us.
    pub(super) fn start(
        slabs: Slabs,
        depth: u32,
        checkers: usize,
    ) -> Result<Self, (Slabs, io::Error)> {
        let opened = slabs.edge().open_ring().map_err(io::Error::from_raw_os_error);
        let opened = opened.and_then(|()| ring::eventfd()).and_then(|wake| {
            let ring = Ring::open(depth, wake.try_clone()?)?;
            Ok((ring, wake))
        });
        let (ring, wake) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err((slabs, error)),
        };
        let (incoming, closed) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { slabs, incoming, wake, closed });
        // No longer than there is memory for slabs: a job brings its own.
        let (checks, due) = crossbeam_channel::unbounded();
        let spawn = |name: String, run: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name).spawn(run)
        };
        let own = Arc::clone(&shared);
        let run = Box::new(move || own.run(ring, &checks));
        let mut threads = match spawn("shimmer-uring".to_owned(), run) {
            Ok(thread) => vec![thread],
            Err(error) => {
                let shared = Arc::into_inner(shared).expect("the thread that shared it never ran");
                return Err((shared.slabs, error));
            }
        };
        for number in 0..checkers {
            let (own, due) = (Arc::clone(&shared), due.clone());
            match spawn(format!("shimmer-check-{number}"), Box::new(move || own.check(&due))) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    tracing::warn!(%error, number, "slabs are compared by fewer threads");
                    break;
                }
            }
        }
        Ok(Self { shared, threads })
    }
}

impl SlabReader for Uring {
    fn submit(&self, jobs: Vec<ReadJob>, sink: &Arc<dyn ReadSink>) {
        self.shared.incoming().extend(jobs.into_iter().map(|job| (job, Arc::clone(sink))));
        ring::wake(&self.shared.wake);
    }

    fn read_here(&self, job: ReadJob) -> ReadDone {
        self.shared.slabs.read(job)
    }

    fn backend(&self) -> IoBackend {
        IoBackend::Uring
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.closed.store(true, Relaxed);
        ring::wake(&self.shared.wake);
        join_others(&mut self.threads);
    }
}

impl Shared {
    fn incoming(&self) -> MutexGuard<'_, VecDeque<(ReadJob, Arc<dyn ReadSink>)>> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread that compares: what is left of a job after that, too. Until the ring's thread has ended.
    fn check(&self, due: &Receiver<Pending>) {
        for Pending { work, sink } in due {
            sink.done(self.slabs.finish(work));
        }
    }

    /// The ring's thread: until the reader is closed and everything has ended.
    fn run(&self, mut ring: Ring, checks: &Sender<Pending>) {
        // Jobs that need another read: the rest after a short one, or another copy.
        let mut pending = VecDeque::new();
        let mut again = 0;
        loop {
            while ring.has_room()
                && let Some(job) = pending.pop_front().or_else(|| self.begin_next())
            {
                self.launch(&mut ring, job);
            }
            // Without a read under way the ring still has the wake-up under way: this never waits for nothing.
            if ring.is_idle() && self.closed.load(Relaxed) && self.incoming().is_empty() {
                return;
            }
            let submitted = self.slabs.edge().submit().and_then(|()| ring.submit_and_wait());
            while let Some((Flight { work, sink, piece, started }, answer)) = ring.reap() {
                let mut job = Pending { work, sink };
                self.slabs.answered(&mut job.work, &piece, answer, started.elapsed());
                let job =
                    if job.work.is_unchecked() { checks.send(job) } else { Err(SendError(job)) };
                // Here goes what needs no comparison, and everything if there is no thread for it.
                pending.extend(job.err().map(SendError::into_inner));
                again = 0;
            }
            match submitted {
                Ok(()) => again = 0,
                Err(libc::EINTR) => {}
                // Whatever it is: first what the kernel has. Completions also make the room that it lacks.
                Err(_) if ring.has_submitted() => ring.wait(),
                Err(libc::EAGAIN | libc::EBUSY) if again < AGAIN_MAX => {
                    again += 1;
                    thread::sleep(PAUSE);
                }
                Err(number) => {
                    self.report_broken(number);
                    pending.extend(
                        ring.dismantle().map(|Flight { work, sink, .. }| Pending { work, sink }),
                    );
                    return self.run_without_ring(pending);
                }
            }
        }
    }

    /// The next job that is to be read; those that cannot be have ended.
    fn begin_next(&self) -> Option<Pending> {
        loop {
            let (job, sink) = self.incoming().pop_front()?;
            if self.closed.load(Relaxed) {
                let (layer, expert) = (job.layer, job.expert);
                sink.done(ReadDone { job, outcome: Err(ReadError::Closed { layer, expert }) });
                continue;
            }
            match self.slabs.begin(job) {
                Ok(work) => return Some(Pending { work, sink }),
                Err(done) => sink.done(done),
            }
        }
    }

    /// Hands the next read of a job to the ring, or the job to its sink.
    fn launch(&self, ring: &mut Ring, mut job: Pending) {
        match self.slabs.next(&mut job.work) {
            Next::Ended(outcome) => job.sink.done(ReadDone { job: job.work.job, outcome }),
            Next::Read(piece) => {
                let (file, offset) = self.slabs.place(&job.work, &piece);
                ring.push(file, offset, job.work, job.sink, piece);
            }
        }
    }

    fn report_broken(&self, number: i32) {
        Counters::bump(&self.slabs.counters().uring_fallbacks);
        tracing::error!(
            error = %io::Error::from_raw_os_error(number),
            "io_uring takes no more reads; one thread reads slabs from now on, one after another. Start the worker again, or with --io pread"
        );
    }

    /// What is left of the thread when the ring fails while it runs: slow, but nothing is lost.
    fn run_without_ring(&self, mut pending: VecDeque<Pending>) {
        loop {
            while let Some(Pending { work, sink }) =
                pending.pop_front().or_else(|| self.begin_next())
            {
                sink.done(self.slabs.finish(work));
            }
            if self.closed.load(Relaxed) && self.incoming().is_empty() {
                return;
            }
            ring::sleep(&self.wake);
        }
    }
}
