//! Prints how fast the experts of a container are read, as one line of JSON: first every slab once, compared with its
//! digest, then slabs at random for a while. `tests/perf/slab_reads.py` runs it in turn with fio.
//!
//! `cargo run --release -p shimmer-worker --example slab_bandwidth CONTAINER pread|uring|buffered PARALLEL SECONDS`

#![expect(clippy::print_stdout, reason = "a command-line tool")]
#![expect(clippy::cast_precision_loss, reason = "sizes as numbers to print")]

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use shimmer_model::Container;
use shimmer_worker::{
    TierCounters, TierOptions,
    io::{ReadDone, ReadJob, ReadSink, SlabReader, open_reader},
    memory::{SlotMemory, map_slots},
    tier_options::IoBackend,
};

/// Hands ended jobs to the main thread.
struct Returned(mpsc::Sender<ReadDone>);

impl ReadSink for Returned {
    fn done(&self, done: ReadDone) {
        self.0.send(done).expect("the main thread waits for every job");
    }
}

/// What one pass read.
#[derive(Default)]
struct Tally {
    bytes: u64,
    reads: u64,
    direct: u64,
}

/// Reads slabs, as many at a time as there are slots, until there are none left or time is up.
fn pass(
    reader: &dyn SlabReader,
    slots: Vec<SlotMemory>,
    mut slabs: impl Iterator<Item = (u32, u32)>,
    limit: Duration,
) -> anyhow::Result<(Tally, f64, Vec<SlotMemory>)> {
    let (sender, ended) = mpsc::channel();
    let sink: Arc<dyn ReadSink> = Arc::new(Returned(sender));
    let started = Instant::now();
    let (mut idle, mut under_way, mut tally) = (slots, 0u32, Tally::default());
    loop {
        while started.elapsed() < limit
            && let Some(memory) = idle.pop()
        {
            let Some((layer, expert)) = slabs.next() else {
                idle.push(memory);
                break;
            };
            reader.submit(vec![ReadJob { layer, expert, memory, token: 0 }], &sink);
            under_way += 1;
        }
        if under_way == 0 {
            return Ok((tally, started.elapsed().as_secs_f64(), idle));
        }
        let ReadDone { job, outcome } = ended.recv().context("a job is lost")?;
        let report = outcome?;
        under_way -= 1;
        tally.bytes += report.bytes;
        tally.reads += 1;
        tally.direct += u64::from(report.direct);
        idle.push(job.memory);
    }
}

/// splitmix64: the same slabs in every run.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut x = *state;
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [container, backend, parallel, seconds] = &arguments[..] else {
        bail!("slab_bandwidth CONTAINER pread|uring|buffered PARALLEL SECONDS");
    };
    let container = Arc::new(Container::open(&PathBuf::from(container))?);
    let io: IoBackend = backend.parse()?;
    let parallel: u32 = parallel.parse()?;
    let limit = Duration::from_secs(seconds.parse()?);
    let (io_threads, io_depth) = (usize::try_from(parallel)?, parallel);
    let options = TierOptions { io, io_threads, io_depth, ..TierOptions::default() };
    let counters = Arc::new(TierCounters::default());
    let reader = open_reader(&container, &options, &counters)?;

    let slabs: Vec<(u32, u32)> = container
        .config()
        .moe_layers()
        .flat_map(|(layer, experts)| (0..experts).map(move |expert| (layer, expert)))
        .collect();
    let &(layer, _) = slabs.first().context("a container with experts")?;
    let stride = container.expert_layout(layer)?.slab_bytes();
    // Twice as many as are read at a time, so that a reader never waits for this thread.
    let slots = map_slots(stride, io_threads * 2)?;
    let (first, first_s, slots) = pass(&*reader, slots, slabs.iter().copied(), Duration::MAX)?;
    let mut state = 1;
    let count = slabs.len() as u64;
    let draw = || slabs[usize::try_from(random(&mut state) % count).expect("below the count")];
    let (again, again_s, _) = pass(&*reader, slots, std::iter::repeat_with(draw), limit)?;
    let rate = |tally: &Tally, seconds: f64| tally.bytes as f64 / 1e9 / seconds;
    println!(
        r#"{{"asked":"{io}","used":"{}","parallel":{parallel},"slab_bytes":{stride},"direct":{:.3},"first_gb_s":{:.3},"again_gb_s":{:.3}}}"#,
        reader.backend(),
        again.direct as f64 / again.reads as f64,
        rate(&first, first_s),
        rate(&again, again_s),
    );
    Ok(())
}
