//! Reading with threads: each takes the next slab of the oldest batch that has one left, and waits while there is none.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use super::{
    ReadDone, ReadError, ReadJob, ReadSink, SlabReader,
    cursor::{Cursor, Generation, JOBS_MAX},
    join_others,
    slabs::Slabs,
};
use crate::tier_options::IoBackend;

/// Threads that read slabs.
#[derive(Debug)]
pub(super) struct Pool {
    backend: IoBackend,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    slabs: Slabs,
    cursor: Cursor,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// What is not read yet ends without being read.
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Vec<ReadJob>, Arc<dyn ReadSink>)>,
    /// The batch whose jobs are being claimed. Gone when all are: a batch holds its sink, which may hold this reader.
    current: Option<Arc<Batch>>,
}

#[derive(Debug)]
struct Batch {
    generation: Generation,
    /// Each is taken once, by who claimed its index.
    jobs: Box<[Mutex<Option<ReadJob>>]>,
    sink: Arc<dyn ReadSink>,
}

impl Pool {
    /// Starts threads.
    pub(super) fn start(slabs: Slabs, threads: usize, backend: IoBackend) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            slabs,
            cursor: Cursor::new(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
        });
        let mut pool = Self { backend, shared, threads: Vec::with_capacity(threads) };
        for number in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = thread::Builder::new().name(format!("shimmer-io-{number}"));
            pool.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(pool)
    }
}

impl SlabReader for Pool {
    fn submit(&self, mut jobs: Vec<ReadJob>, sink: &Arc<dyn ReadSink>) {
        let mut queue = self.shared.queue();
        while !jobs.is_empty() {
            let rest = jobs.split_off(jobs.len().min(JOBS_MAX));
            queue.waiting.push_back((std::mem::replace(&mut jobs, rest), Arc::clone(sink)));
        }
        drop(queue);
        self.shared.changed.notify_all();
    }

    fn read_here(&self, job: ReadJob) -> ReadDone {
        self.shared.slabs.read(job)
    }

    fn backend(&self) -> IoBackend {
        self.backend
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let _queue = self.shared.queue();
            self.shared.closed.store(true, Relaxed);
        }
        self.shared.changed.notify_all();
        join_others(&mut self.threads);
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(batch) = self.next_batch() {
            while let Some(index) = self.cursor.claim(batch.generation, batch.jobs.len()) {
                let job = batch.jobs[index].lock().unwrap_or_else(PoisonError::into_inner).take();
                batch.sink.done(self.run(job.expect("a job is claimed once")));
            }
            // Not under the lock: the last reference to a sink may be the last one to this pool.
            let ended = self.queue().current.take_if(|current| Arc::ptr_eq(current, &batch));
            drop(ended);
        }
    }

    fn run(&self, job: ReadJob) -> ReadDone {
        if self.closed.load(Relaxed) {
            let (layer, expert) = (job.layer, job.expert);
            return ReadDone { job, outcome: Err(ReadError::Closed { layer, expert }) };
        }
        self.slabs.read(job)
    }

    /// The batch to claim from. None when the pool is closed and empty.
    fn next_batch(&self) -> Option<Arc<Batch>> {
        let mut queue = self.queue();
        loop {
            if let Some(current) = &queue.current {
                return Some(Arc::clone(current));
            }
            if let Some((jobs, sink)) = queue.waiting.pop_front() {
                // Only here, under the lock, and with no current batch: the one before is claimed to its end.
                let generation = self.cursor.publish(jobs.len());
                let jobs = jobs.into_iter().map(|job| Mutex::new(Some(job))).collect();
                let batch = Arc::new(Batch { generation, jobs, sink });
                queue.current = Some(Arc::clone(&batch));
                return Some(batch);
            }
            if self.closed.load(Relaxed) {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
