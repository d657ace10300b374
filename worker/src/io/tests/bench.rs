//! A container with mirrors, a reader over it whose answers a test may change, and a sink that waits.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use shimmer_kernels::WeightFormat;
use shimmer_model::{Container, tiny::Preset};
use tempfile::TempDir;

use crate::{
    TierCounters, TierOptions,
    io::{
        ReadDone, ReadJob, ReadSink, SlabReader, edge::Edge, progress::Piece, slabs::Slabs, start,
    },
    memory::map_slots,
    testing,
    tier_options::{IoBackend, Mirror},
};

pub(crate) const BACKENDS: [IoBackend; 3] =
    [IoBackend::Pread, IoBackend::Uring, IoBackend::Buffered];

pub(crate) type Answer = Result<usize, i32>;

/// What a test puts at the edge.
pub(super) trait Faults:
    Fn((u32, u32), &Piece, Answer, &mut [u8]) -> Answer + Send + Sync
{
}
impl<F: Fn((u32, u32), &Piece, Answer, &mut [u8]) -> Answer + Send + Sync> Faults for F {}

struct Script<F>(F);

impl<F> fmt::Debug for Script<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Script")
    }
}

impl<F: Faults> Edge for Script<F> {
    fn answer(&self, slab: (u32, u32), piece: &Piece, answer: Answer, bytes: &mut [u8]) -> Answer {
        self.0(slab, piece, answer, bytes)
    }
}

/// A reader as a worker opens it, whose answers go through `faults`.
pub(crate) fn faulty_reader(
    container: &Arc<Container>,
    options: &TierOptions,
    counters: &Arc<TierCounters>,
    faults: impl Fn(Answer, &mut [u8]) -> Answer + Send + Sync + 'static,
) -> Arc<dyn SlabReader> {
    let script =
        move |_: (u32, u32), _: &Piece, answer: Answer, bytes: &mut [u8]| faults(answer, bytes);
    open(container, options, counters, Script(script))
}

fn open(
    container: &Arc<Container>,
    options: &TierOptions,
    counters: &Arc<TierCounters>,
    edge: impl Edge + 'static,
) -> Arc<dyn SlabReader> {
    let direct = options.io != IoBackend::Buffered;
    let mut slabs = Slabs::open(container, &options.mirrors, direct, counters).unwrap();
    slabs.set_edge(Box::new(edge));
    start(slabs, options).unwrap()
}

/// A container in a directory of its own, and as many mirrors.
pub(super) struct Files {
    dir: TempDir,
    pub(super) container: Arc<Container>,
    pub(super) mirrors: Vec<Mirror>,
}

impl Files {
    pub(super) fn new(mirrors: usize) -> Self {
        let (dir, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q8G64);
        let mirrors = (1..=mirrors)
            .map(|number| {
                let mirror = dir.path().join(format!("mirror{number}"));
                copy(container.dir(), &mirror);
                Mirror { dir: mirror, weight: 1 }
            })
            .collect();
        Self { dir, container, mirrors }
    }

    /// Where a layer lies in a copy: 0 is the container, mirrors follow.
    pub(super) fn layer(&self, copy: usize, layer: u32) -> PathBuf {
        let name = format!("experts/layer-{layer:03}.safetensors");
        match copy {
            0 => self.container.dir().join(name),
            _ => self.dir.path().join(format!("mirror{copy}")).join(name),
        }
    }

    /// A reader of all copies.
    pub(super) fn reader(&self, io: IoBackend, faults: impl Faults + 'static) -> Reader {
        self.reader_of(io, self.mirrors.len() + 1, faults)
    }

    /// A reader of the first copies.
    pub(super) fn reader_of(
        &self,
        io: IoBackend,
        copies: usize,
        faults: impl Faults + 'static,
    ) -> Reader {
        self.reader_at(io, copies, Script(faults))
    }

    pub(super) fn reader_at(
        &self,
        io: IoBackend,
        copies: usize,
        edge: impl Edge + 'static,
    ) -> Reader {
        let counters = Arc::new(TierCounters::default());
        let mirrors = self.mirrors[..copies - 1].to_vec();
        let options = TierOptions { io, mirrors, ..TierOptions::default() };
        let reader = open(&self.container, &options, &counters, edge);
        Reader { container: Arc::clone(&self.container), counters, reader }
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

pub(super) struct Reader {
    pub(super) container: Arc<Container>,
    pub(super) counters: Arc<TierCounters>,
    pub(super) reader: Arc<dyn SlabReader>,
}

impl Reader {
    /// A job for each expert of some layers, `rounds` times over, with memory full of rubbish.
    pub(super) fn jobs(&self, layers: &[u32], rounds: u32) -> Vec<ReadJob> {
        let mut jobs = Vec::new();
        for _ in 0..rounds {
            for &layer in layers {
                let stride = self.container.expert_layout(layer).unwrap().slab_bytes();
                let count = self.container.config().experts(layer);
                let slots = map_slots(stride, count as usize).unwrap();
                for (expert, mut memory) in (0..count).zip(slots) {
                    memory.fill(0xA5);
                    jobs.push(ReadJob { layer, expert, memory, token: jobs.len() as u64 });
                }
            }
        }
        jobs
    }

    /// Submits jobs and waits for all of them; each has ended once, with its memory.
    pub(super) fn read(&self, jobs: Vec<ReadJob>) -> Vec<ReadDone> {
        let (count, sink) = (jobs.len(), Arc::new(Sink::default()));
        let waiting: Arc<dyn ReadSink> = Arc::<Sink>::clone(&sink);
        self.reader.submit(jobs, &waiting);
        sink.wait(count)
    }

    /// The bytes are the expert's.
    pub(super) fn check_bytes(&self, done: &ReadDone) {
        let ReadJob { layer, expert, memory, .. } = &done.job;
        let report = done.outcome.as_ref().unwrap_or_else(|error| panic!("{error}"));
        assert!(report.bytes >= memory.len() as u64);
        let mut expected = vec![0; memory.len()];
        self.container.read_expert(*layer, *expert, &mut expected).unwrap();
        assert!(expected == memory[..], "the bytes of expert {expert} of layer {layer}");
    }
}

#[derive(Default)]
pub(super) struct Sink {
    done: Mutex<Vec<ReadDone>>,
    changed: Condvar,
}

impl ReadSink for Sink {
    fn done(&self, done: ReadDone) {
        self.done.lock().unwrap().push(done);
        self.changed.notify_all();
    }
}

impl Sink {
    /// All jobs, in order of their tokens, once that many have ended.
    pub(super) fn wait(&self, count: usize) -> Vec<ReadDone> {
        let done = self.done.lock().unwrap();
        let less = |done: &mut Vec<ReadDone>| done.len() < count;
        let (mut done, time) =
            self.changed.wait_timeout_while(done, Duration::from_secs(60), less).unwrap();
        assert!(!time.timed_out(), "{} of {count} jobs have ended", done.len());
        let mut done = std::mem::take(&mut *done);
        done.sort_by_key(|done| done.job.token);
        let tokens = done.iter().map(|done| done.job.token);
        assert!(tokens.eq(0..count as u64), "each job ends once");
        done
    }
}
