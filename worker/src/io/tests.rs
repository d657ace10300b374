//! One suite for all backends: whatever a read meets, the right bytes or a named error, and the memory back.

mod bench;
mod uring;

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

use super::*;
use crate::TierSnapshot;
pub(crate) use bench::{Answer, BACKENDS, faulty_reader};
use bench::{Files, Reader, Sink};
use progress::Piece;

type Slab = (u32, u32);

/// What a fault ends in.
#[derive(Debug)]
enum Outcome<'a> {
    /// The right bytes.
    Bytes,
    /// An error that says all this.
    Error(&'a [&'a str]),
}

/// Reads all experts of two layers twice, with faults at the edge, from as many copies, over all backends. `faults` is made
/// anew for each of them, because it may count.
fn check<F: bench::Faults + 'static>(
    files: &Files,
    copies: usize,
    faults: impl Fn() -> F,
    expected: &Outcome<'_>,
    counted: impl Fn(&TierSnapshot),
) {
    for backend in BACKENDS {
        let reader = files.reader_of(backend, copies, faults());
        for _ in 0..2 {
            check_round(&reader, expected);
        }
        counted(&reader.counters.snapshot());
    }
}

fn check_round(reader: &Reader, expected: &Outcome<'_>) {
    let jobs = reader.jobs(&[0, 1], 1);
    let length = jobs[0].memory.len();
    let here = reader.reader.read_here(reader.jobs(&[0], 1).remove(0));
    for done in reader.read(jobs).iter().chain([&here]) {
        assert_eq!(done.job.memory.len(), length, "the memory comes back");
        match expected {
            Outcome::Bytes => reader.check_bytes(done),
            Outcome::Error(parts) => {
                let text =
                    done.outcome.as_ref().expect_err("a fault without a way round").to_string();
                for part in *parts {
                    assert!(text.contains(part), "{part:?} is not in: {text}");
                }
            }
        }
    }
}

fn honest(_: Slab, _: &Piece, answer: Answer, _: &mut [u8]) -> Answer {
    answer
}

#[test]
fn every_backend_reads_every_expert() {
    let files = Files::new(2);
    check(
        &files,
        1,
        || honest,
        &Outcome::Bytes,
        |counted| {
            assert_eq!(
                counted.slabs_checked, 26,
                "each slab is compared once, whatever the number of reads"
            );
            assert_eq!((counted.mirror_fallbacks, counted.slabs_damaged), (0, 0));
        },
    );
    check(&files, 3, || honest, &Outcome::Bytes, |counted| assert_eq!(counted.slabs_checked, 26));
}

#[test]
fn backends_say_what_they_do() {
    let files = Files::new(0);
    for backend in BACKENDS {
        let reader = files.reader(backend, honest);
        let done = reader.read(reader.jobs(&[0], 1));
        let direct = done.iter().all(|done| done.outcome.as_ref().unwrap().direct);
        if reader.counters.snapshot().direct_fallbacks == 0 {
            assert_eq!(direct, backend != IoBackend::Buffered);
        }
        if reader.counters.snapshot().uring_fallbacks == 0 {
            assert_eq!(reader.reader.backend(), backend);
        }
    }
}

#[test]
fn short_reads_of_every_size_are_continued() {
    let files = Files::new(0);
    for most in [1, 511, 512, 513, 4095, 4096, 4097, 20_000] {
        // What lies behind a short read is not to be relied on.
        let short = move |_: Slab, piece: &Piece, answer: Answer, bytes: &mut [u8]| {
            // One byte at a time would take a minute; the first thousand are enough.
            let most = if most == 1 && piece.range.start > 1000 { usize::MAX } else { most };
            let count = answer?.min(most);
            bytes[count..].fill(0xEE);
            Ok(count)
        };
        check(&files, 1, || short, &Outcome::Bytes, |counted| assert_eq!(counted.slabs_damaged, 0));
    }
}

#[test]
fn interrupted_reads_are_repeated() {
    let files = Files::new(0);
    let faults = || {
        let calls = AtomicU64::new(0);
        move |_: Slab, _: &Piece, answer: Answer, bytes: &mut [u8]| match calls
            .fetch_add(1, Relaxed)
            % 4
        {
            0 => Err(libc::EINTR),
            1 => Err(libc::EAGAIN),
            _ => {
                let count = answer?.min(8192);
                bytes[count..].fill(0);
                Ok(count)
            }
        }
    };
    check(&files, 1, faults, &Outcome::Bytes, |_| {});
    let parts = ["layer-00", "put off again and again", "Resource temporarily unavailable"];
    check(
        &files,
        1,
        || |_: Slab, _: &Piece, _: Answer, _: &mut [u8]| Err(libc::EAGAIN),
        &Outcome::Error(&parts),
        |_| {},
    );
}

#[test]
fn an_io_error_on_one_copy_is_answered_by_another() {
    let files = Files::new(1);
    let broken = |copy| {
        move |_: Slab, piece: &Piece, answer: Answer, bytes: &mut [u8]| {
            if piece.copy != copy {
                return answer;
            }
            bytes.fill(0xBD);
            Err(libc::EIO)
        }
    };
    for copy in [0, 1] {
        check(
            &files,
            2,
            || broken(copy),
            &Outcome::Bytes,
            |counted| {
                assert!(counted.mirror_fallbacks > 0);
                assert_eq!((counted.copies_set_aside, counted.slabs_damaged), (1, 0));
            },
        );
    }
    let parts = ["reading expert ", "layer-00", " bytes at ", " wanted, 0 read: ", "(os error 5)"];
    check(
        &files,
        1,
        || broken(0),
        &Outcome::Error(&parts),
        |counted| {
            assert_eq!((counted.mirror_fallbacks, counted.copies_set_aside), (0, 0));
        },
    );
}

#[test]
fn an_io_error_on_every_copy_names_each() {
    let files = Files::new(1);
    let broken = |_: Slab, piece: &Piece, _: Answer, _: &mut [u8]| -> Answer {
        Err(if piece.copy == 0 { libc::EIO } else { libc::ENODEV })
    };
    let parts = ["container/experts/", "(os error 5)", "mirror1/experts/", "(os error 19)"];
    check(&files, 2, || broken, &Outcome::Error(&parts), |_| {});
}

#[test]
fn a_copy_that_recovers_is_used_again() {
    let files = Files::new(1);
    for backend in BACKENDS {
        let (asked, down) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(1)));
        let (seen, state) = (Arc::clone(&asked), Arc::clone(&down));
        let reader = files.reader(backend, move |_, piece, answer, _| {
            if piece.copy == 1 {
                seen.fetch_add(1, Relaxed);
                return if state.load(Relaxed) == 1 { Err(libc::EIO) } else { answer };
            }
            answer
        });
        let read = |rounds| {
            asked.store(0, Relaxed);
            let done = reader.read(reader.jobs(&[0, 1], rounds));
            done.iter().for_each(|done| reader.check_bytes(done));
            asked.load(Relaxed)
        };
        let share = read(1);
        let aside = read(1);
        assert!(aside <= 1, "{aside} reads of a copy that was set aside");
        down.store(0, Relaxed);
        // Of 26 slabs about half belong to the copy; one in 64 of those is a trial.
        read(12);
        assert!(read(1) >= share.min(8), "the copy is back");
        assert_eq!(reader.counters.snapshot().copies_set_aside, 1);
    }
}

#[test]
fn a_refused_direct_read_falls_back_once_for_each_file() {
    let files = Files::new(1);
    let refuse = |_: Slab, piece: &Piece, answer: Answer, bytes: &mut [u8]| {
        if piece.direct {
            bytes.fill(0);
            return Err(libc::EINVAL);
        }
        answer
    };
    check(
        &files,
        2,
        || refuse,
        &Outcome::Bytes,
        |counted| {
            assert!(counted.direct_fallbacks <= 4, "two layers in two copies");
            assert_eq!((counted.mirror_fallbacks, counted.read_errors), (0, 0));
        },
    );
}

#[test]
fn a_flipped_byte_comes_from_another_copy_or_is_named() {
    let files = Files::new(1);
    let flip = |_: Slab, piece: &Piece, answer: Answer, bytes: &mut [u8]| {
        if piece.copy == 0 && piece.range.start == 0 {
            bytes[100] ^= 1;
        }
        answer
    };
    check(
        &files,
        2,
        || flip,
        &Outcome::Bytes,
        |counted| {
            assert!(counted.slabs_damaged > 0);
            assert_eq!(counted.copies_set_aside, 1);
        },
    );
    let parts = ["reading expert ", " of layer ", "container/experts/layer-00", "they are damaged"];
    check(
        &files,
        1,
        || flip,
        &Outcome::Error(&parts),
        |counted| assert!(counted.slabs_damaged > 0),
    );
}

#[test]
fn a_flipped_byte_on_the_drive_is_found_on_the_first_read() {
    use std::os::unix::fs::FileExt as _;
    let files = Files::new(1);
    let entry = files.container.expert_entry(0, 3).unwrap();
    for backend in BACKENDS {
        let reader = files.reader(backend, honest);
        let owner = mirrors::order(vec![(0, 1), (1, 1)], 0, 3)[0];
        let file =
            std::fs::OpenOptions::new().read(true).write(true).open(files.layer(owner, 0)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, entry.offset + 77).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], entry.offset + 77).unwrap();
        let done = [reader.read(reader.jobs(&[0], 1)), reader.read(reader.jobs(&[0], 1))];
        file.write_all_at(&byte, entry.offset + 77).unwrap();
        done.iter().flatten().for_each(|done| reader.check_bytes(done));
        let counted = reader.counters.snapshot();
        // The second time nobody asks for the damaged bytes.
        assert_eq!((counted.slabs_damaged, counted.mirror_fallbacks), (1, 1));
    }
}

#[test]
fn a_file_that_is_cut_while_open_is_named() {
    for backend in BACKENDS {
        let files = Files::new(0);
        let reader = files.reader(backend, honest);
        reader.read(reader.jobs(&[0], 1)).iter().for_each(|done| reader.check_bytes(done));
        let cut = files.container.expert_entry(0, 5).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(files.layer(0, 0)).unwrap();
        file.set_len(cut.offset + 1000).unwrap();
        let done = reader.read(reader.jobs(&[0], 1));
        for done in &done {
            match done.job.expert {
                0..5 => assert!(done.outcome.is_ok()),
                expert => {
                    let text = done.outcome.as_ref().unwrap_err().to_string();
                    let got = if expert == 5 { 1000 } else { 0 };
                    let wanted = format!(
                        "{} bytes at {} wanted, {got} read: the file ends inside the slab",
                        cut.bytes,
                        cut.offset + u64::from(expert - 5) * cut.bytes
                    );
                    assert!(
                        text.contains(&wanted) && text.contains("layer-000"),
                        "{wanted:?} is not in: {text}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_mirror_without_a_layer_gives_the_others() {
    let files = Files::new(2);
    std::fs::remove_file(files.layer(1, 0)).unwrap();
    for backend in BACKENDS {
        let asked = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
        let seen = Arc::clone(&asked);
        let reader = files.reader(backend, move |(layer, _), piece, answer, _| {
            seen.lock().unwrap().insert((layer, piece.copy));
            answer
        });
        reader.read(reader.jobs(&[0, 1], 1)).iter().for_each(|done| reader.check_bytes(done));
        let asked: Vec<_> = asked.lock().unwrap().iter().copied().collect();
        assert_eq!(asked, [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]);
    }
}

#[test]
fn a_mirror_that_is_another_container_is_refused() {
    let (files, other) = (Files::new(0), Files::new(1));
    let (dir, container) = crate::testing::container(
        shimmer_model::tiny::Preset::Olmoe,
        shimmer_kernels::WeightFormat::Q8G64,
    );
    let open = |dir: &std::path::Path| {
        let mirrors = vec![Mirror { dir: dir.to_path_buf(), weight: 1 }];
        let options = TierOptions { mirrors, ..TierOptions::default() };
        let text = check_mirrors(&files.container, &options.mirrors).unwrap_err().to_string();
        // One that goes later is done without.
        let counters = Arc::<TierCounters>::default();
        open_reader(&files.container, &options, &counters).unwrap();
        assert_eq!(counters.snapshot().copies_set_aside, 1);
        text
    };
    let text = open(container.dir());
    assert!(text.contains("its digest is") && text.contains(files.container.digest()), "{text}");
    let text = open(files.container.dir());
    assert!(text.contains("the container itself"), "{text}");
    let text = open(&dir.path().join("nowhere"));
    assert!(text.contains("nowhere") && text.contains("shimmer mirror stage"), "{text}");
    let file = std::fs::OpenOptions::new().write(true).open(other.layer(1, 1)).unwrap();
    file.set_len(4096).unwrap();
    let text = open(&other.mirrors[0].dir);
    assert!(text.contains("layer-001") && text.contains("4096"), "{text}");
}

#[test]
fn jobs_that_make_no_sense_come_back_with_their_memory() {
    let files = Files::new(0);
    for backend in BACKENDS {
        let reader = files.reader(backend, honest);
        let mut jobs = reader.jobs(&[0], 1);
        jobs.truncate(3);
        (jobs[0].layer, jobs[1].expert) = (99, 13);
        jobs[2].memory = crate::memory::map_slots(512, 1).unwrap().remove(0);
        let texts = [
            "expert 0 of layer 99 is in no",
            "expert 13 of layer 0 is in no",
            "its memory has 512",
        ];
        for (done, text) in reader.read(jobs).iter().zip(texts) {
            let found = done.outcome.as_ref().unwrap_err().to_string();
            assert!(found.contains(text), "{text:?} is not in: {found}");
        }
    }
}

#[test]
fn a_thousand_jobs_of_many_batches_end_once_each() {
    let files = Files::new(1);
    for backend in BACKENDS {
        let reader = files.reader(backend, honest);
        let mut jobs = reader.jobs(&[0, 1], 40);
        let (count, sink) = (jobs.len(), Arc::new(Sink::default()));
        assert!(count > 1000);
        let waiting: Arc<dyn ReadSink> = Arc::<Sink>::clone(&sink);
        // Batches of all sizes, from several threads.
        let mut batches = Vec::new();
        while !jobs.is_empty() {
            let size = (batches.len() % 17 + 1).min(jobs.len());
            batches.push(jobs.drain(..size).collect::<Vec<_>>());
        }
        let batches = Mutex::new(batches);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        let Some(batch) = batches.lock().unwrap().pop() else { break };
                        reader.reader.submit(batch, &waiting);
                    }
                });
            }
        });
        sink.wait(count).iter().for_each(|done| reader.check_bytes(done));
        reader.reader.submit(Vec::new(), &waiting);
    }
}

#[test]
fn every_job_ends_when_the_reader_is_dropped() {
    let files = Files::new(0);
    for backend in BACKENDS {
        let reader = files.reader(backend, honest);
        let jobs = reader.jobs(&[0, 1], 40);
        let (count, sink) = (jobs.len(), Arc::new(Sink::default()));
        let waiting: Arc<dyn ReadSink> = Arc::<Sink>::clone(&sink);
        reader.reader.submit(jobs, &waiting);
        let Reader { reader, .. } = reader;
        drop(reader);
        // The drop waits for all of them.
        for done in sink.wait(count) {
            if let Err(error) = done.outcome {
                assert!(matches!(error, ReadError::Closed { .. }), "{error}");
            }
        }
    }
}

/// A sink that owns the reader, as a store does.
struct Owner {
    reader: Mutex<Option<Arc<dyn SlabReader>>>,
    left: AtomicUsize,
    ended: std::sync::mpsc::Sender<()>,
}

impl ReadSink for Owner {
    fn done(&self, done: ReadDone) {
        assert!(done.outcome.is_ok());
        if self.left.fetch_sub(1, Relaxed) == 1 {
            self.ended.send(()).unwrap();
        }
    }
}

#[test]
fn a_sink_may_hold_the_reader_that_calls_it() {
    let files = Files::new(0);
    for backend in BACKENDS {
        let reader = files.reader(backend, honest);
        let jobs = reader.jobs(&[0], 1);
        let (ended, wait) = std::sync::mpsc::channel();
        let owner = Arc::new(Owner { reader: Mutex::default(), left: jobs.len().into(), ended });
        let sink: Arc<dyn ReadSink> = Arc::<Owner>::clone(&owner);
        let Reader { reader, .. } = reader;
        let weak = Arc::downgrade(&owner);
        *owner.reader.lock().unwrap() = Some(Arc::clone(&reader));
        drop(owner);
        reader.submit(jobs, &sink);
        drop((reader, sink));
        wait.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        // The reader lets go of the sink, which was the last to hold the reader.
        let started = std::time::Instant::now();
        while weak.strong_count() > 0 {
            assert!(started.elapsed().as_secs() < 60, "the reader and its sink keep each other");
            std::thread::yield_now();
        }
    }
}
