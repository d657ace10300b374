//! Reading slabs: from which file, by which call, and what happens when a read falls short.
//!
//! A reader takes jobs, each with the memory that the slab goes to, and hands the memory back with the outcome. It knows
//! nothing of slots or layers' states; who asked decides what a failure means.

mod copies;
mod cursor;
mod edge;
mod error;
mod files;
mod mirrors;
mod pool;
pub mod probe;
mod progress;
mod slabs;
mod uring;

use std::{
    fmt,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use shimmer_model::Container;

pub use error::{Cause, CopyFailure, ReadError};
use pool::Pool;
use slabs::Slabs;
use uring::Uring;

use crate::{
    Counters, Error, TierCounters,
    memory::SlotMemory,
    tier_options::{IoBackend, Mirror, TierOptions},
};

/// One slab to read.
#[derive(Debug)]
pub struct ReadJob {
    /// Layer.
    pub layer: u32,
    /// Expert.
    pub expert: u32,
    /// Where the slab goes; its length is the slab's.
    pub memory: SlotMemory,
    /// The asker's mark, handed back unchanged.
    pub token: u64,
}

/// What a read cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadReport {
    /// Bytes that came from files, those of failed tries included.
    pub bytes: u64,
    /// Time inside read calls, or between submission and completion.
    pub service: Duration,
    /// Whether the page cache was passed by.
    pub direct: bool,
}

/// A job that has ended.
#[derive(Debug)]
pub struct ReadDone {
    /// The job, with its memory. After a failure the memory holds anything.
    pub job: ReadJob,
    /// What it cost, or why the slab is not there.
    pub outcome: Result<ReadReport, ReadError>,
}

/// Takes ended jobs, on any thread, in any order.
pub trait ReadSink: Send + Sync {
    /// A job has ended.
    fn done(&self, done: ReadDone);
}

/// Reads slabs and checks each against the container's digest when it is read for the first time.
pub trait SlabReader: Send + Sync + fmt::Debug {
    /// Starts reading; returns at once. Every job ends in exactly one call of `sink`, also while the reader is dropped.
    fn submit(&self, jobs: Vec<ReadJob>, sink: &Arc<dyn ReadSink>);

    /// Reads on the calling thread, beside whatever was submitted: what prefetchers do, so that they never stand in the
    /// queue of the demand path.
    fn read_here(&self, job: ReadJob) -> ReadDone;

    /// How it reads, which is not always what was asked for.
    fn backend(&self) -> IoBackend;
}

/// Opens a reader of a container and its mirrors. What cannot be had (reads past the page cache, io_uring) is replaced by
/// what can, with one line in the log and a count.
pub fn open_reader(
    container: &Arc<Container>,
    options: &TierOptions,
    counters: &Arc<TierCounters>,
) -> Result<Arc<dyn SlabReader>, Error> {
    let direct = options.io != IoBackend::Buffered;
    let slabs = Slabs::open(container, &options.mirrors, direct, counters)?;
    let reader = start(slabs, options)?;
    tracing::info!(
        way = %reader.backend(), asked = %options.io, copies = options.mirrors.len() + 1,
        "experts are read from the drive"
    );
    Ok(reader)
}

/// Refuses mirrors that are not to be had or not the same container. Asked when a worker starts; [`open_reader`] does without
/// those that have gone since.
pub fn check_mirrors(container: &Container, mirrors: &[Mirror]) -> Result<(), Error> {
    slabs::open_mirrors(container, mirrors).into_iter().try_for_each(|mirror| mirror.map(drop))
}

fn start(mut slabs: Slabs, options: &TierOptions) -> Result<Arc<dyn SlabReader>, Error> {
    let TierOptions { mut io, io_threads: threads, io_depth: depth, .. } = *options;
    if io == IoBackend::Uring {
        match Uring::start(slabs, depth, threads) {
            Ok(ring) => return Ok(Arc::new(ring)),
            Err((back, error)) => {
                Counters::bump(&back.counters().uring_fallbacks);
                tracing::warn!(
                    %error, threads,
                    "io_uring is not available: slabs are read by threads. Containers often forbid it (seccomp profile), \
                     hosts may too (sysctl kernel.io_uring_disabled); allow it, or set --io pread and this line goes"
                );
                (slabs, io) = (back, IoBackend::Pread);
            }
        }
    }
    let pool =
        Pool::start(slabs, threads, io).map_err(|source| Error::IoThreads { threads, source })?;
    Ok(Arc::new(pool))
}

/// Waits for threads of a reader. A sink that held the last reference drops the reader on one of them, which cannot wait
/// for itself.
fn join_others(threads: &mut Vec<JoinHandle<()>>) {
    for thread in threads.drain(..) {
        if thread.thread().id() != thread::current().id() {
            thread.join().expect("a sink does not panic");
        }
    }
}

impl fmt::Debug for dyn ReadSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadSink")
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::{Answer, BACKENDS, faulty_reader};
