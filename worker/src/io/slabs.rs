//! What all backends share: the copies, which of them a slab is read from, and what follows from an answer.

use std::{
    collections::BTreeSet,
    os::unix::fs::FileExt as _,
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_model::Container;

use super::{
    Cause, CopyFailure, ReadDone, ReadError, ReadJob, ReadReport,
    copies::Copy,
    edge::{Edge, System},
    mirrors::{self, FAILURES_MAX, TRIAL_EVERY},
    progress::{Candidate, Notice, Piece, Progress, Step},
};
use crate::{Counters, Error, TierCounters, tier_options::Mirror};

/// The slabs of a container and its mirrors.
#[derive(Debug)]
pub(super) struct Slabs {
    container: Arc<Container>,
    copies: Vec<Copy>,
    counters: Arc<TierCounters>,
    edge: Box<dyn Edge>,
}

/// A job under way.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) job: ReadJob,
    /// Where the slab begins in its file, the same in every copy.
    offset: u64,
    progress: Progress,
    service: Duration,
}

impl Work {
    /// All bytes have come, and are to be compared with the digest.
    pub(super) fn is_unchecked(&self) -> bool {
        matches!(self.progress.step(), Step::Check { .. })
    }
}

/// What a job needs next.
#[derive(Debug)]
pub(super) enum Next {
    /// This read; the answer goes to [`Slabs::answered`].
    Read(Piece),
    /// Nothing: it has ended.
    Ended(Result<ReadReport, ReadError>),
}

/// Opens mirrors, each for itself: it must be the same container in another place.
pub(super) fn open_mirrors(
    container: &Container,
    mirrors: &[Mirror],
) -> Vec<Result<Container, Error>> {
    let mut places = BTreeSet::from([container.dir().canonicalize().ok()]);
    let mut open = |Mirror { dir, .. }: &Mirror| {
        let refuse = |reason| Error::Mirror { dir: dir.clone(), reason };
        let place = dir.canonicalize().map_err(|error| refuse(error.to_string()))?;
        if !places.insert(Some(place)) {
            return Err(refuse("it is the container itself, or given twice".to_owned()));
        }
        let mirror = Container::open(dir).map_err(|error| refuse(error.to_string()))?;
        if mirror.digest() != container.digest() {
            let (found, wanted) = (mirror.digest(), container.digest());
            return Err(refuse(format!("its digest is {found}, the container's is {wanted}")));
        }
        Ok(mirror)
    };
    mirrors.iter().map(&mut open).collect()
}

impl Slabs {
    /// Opens all copies. A mirror must be the same container; it may lack layer files. One that was there at the start and
    /// is gone when experts have to be read again is done without: the others have the same slabs.
    pub(super) fn open(
        container: &Arc<Container>,
        mirrors: &[Mirror],
        direct: bool,
        counters: &Arc<TierCounters>,
    ) -> Result<Self, Error> {
        let mut copies = vec![Copy::new(Arc::clone(container), 1, direct)?];
        for (Mirror { dir, weight }, mirror) in mirrors.iter().zip(open_mirrors(container, mirrors))
        {
            let mirror = match mirror {
                Ok(mirror) => mirror,
                Err(error) => {
                    Counters::bump(&counters.copies_set_aside);
                    tracing::warn!(%error, "slabs are read without this mirror");
                    continue;
                }
            };
            let absent = mirror.absent_layers();
            copies.push(Copy::new(Arc::new(mirror), *weight, direct)?);
            tracing::info!(mirror = %dir.display(), weight, absent_layers = ?absent, "slabs are also read from a mirror");
        }
        for copy in &copies {
            Counters::add(&counters.direct_fallbacks, copy.not_direct);
        }
        let (container, counters) = (Arc::clone(container), Arc::clone(counters));
        Ok(Self { container, copies, counters, edge: Box::new(System) })
    }

    #[cfg(test)]
    pub(super) fn set_edge(&mut self, edge: Box<dyn Edge>) {
        self.edge = edge;
    }

    pub(super) fn edge(&self) -> &dyn Edge {
        &*self.edge
    }

    pub(super) fn counters(&self) -> &TierCounters {
        &self.counters
    }

    /// Reads on this thread.
    pub(super) fn read(&self, job: ReadJob) -> ReadDone {
        match self.begin(job) {
            Ok(work) => self.finish(work),
            Err(done) => done,
        }
    }

    /// Does what is left of a job on this thread.
    pub(super) fn finish(&self, mut work: Work) -> ReadDone {
        loop {
            let piece = match self.next(&mut work) {
                Next::Read(piece) => piece,
                Next::Ended(outcome) => return ReadDone { job: work.job, outcome },
            };
            let started = Instant::now();
            let (file, offset) = self.place(&work, &piece);
            let answer = file.read_at(&mut work.job.memory[piece.range.clone()], offset);
            // An error without a number comes from no system call; there is none that a positional read makes.
            let answer = answer.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO));
            self.answered(&mut work, &piece, answer, started.elapsed());
        }
    }

    /// Chooses the copies of a slab; a job that cannot be begun has ended.
    pub(super) fn begin(&self, job: ReadJob) -> Result<Work, ReadDone> {
        let (layer, expert) = (job.layer, job.expert);
        let refuse = |job, error| Err(ReadDone { job, outcome: Err(error) });
        let Ok(entry) = self.container.expert_entry(layer, expert) else {
            return refuse(job, ReadError::NoSuchExpert { layer, expert });
        };
        if job.memory.len() as u64 != entry.bytes {
            let (wanted, found) = (entry.bytes, job.memory.len());
            return refuse(job, ReadError::Memory { layer, expert, wanted, found });
        }
        let candidates = self.candidates(&job, entry.offset);
        if candidates.is_empty() {
            return refuse(job, ReadError::NoSuchExpert { layer, expert });
        }
        let progress = Progress::new(job.memory.len(), candidates);
        Ok(Work { job, offset: entry.offset, progress, service: Duration::ZERO })
    }

    fn candidates(&self, job: &ReadJob, offset: u64) -> Vec<Candidate> {
        let (layer, expert) = (job.layer, job.expert);
        let present = self.copies.iter().enumerate().filter(|(_, copy)| copy.has(layer));
        let weights = present.map(|(number, copy)| (number, copy.weight())).collect();
        let mut order = mirrors::order(weights, layer, expert);
        if let [first, _, ..] = order[..]
            && !self.copies[first].health.admits()
        {
            order.rotate_left(1);
        }
        order.sort_by_key(|number| self.copies[*number].is_damaged(layer, expert));
        let candidate = |number| {
            let copy: &Copy = &self.copies[number];
            // Arenas are aligned far beyond what any device wants. Memory that is not still gets its bytes.
            let fits = |alignment: &usize| {
                let address = job.memory.as_ptr().addr();
                let length = job.memory.len();
                (address as u64 | offset | length as u64).is_multiple_of(*alignment as u64)
            };
            let direct = copy.direct(layer).and_then(|file| file.alignment()).filter(fits);
            Candidate { copy: number, direct, checked: copy.is_checked(layer, expert) }
        };
        order.into_iter().map(candidate).collect()
    }

    /// The file of a piece, and where the piece lies in it.
    pub(super) fn place(&self, work: &Work, piece: &Piece) -> (&std::fs::File, u64) {
        let copy = &self.copies[piece.copy];
        let direct = copy.direct(work.job.layer).filter(|_| piece.direct);
        let file = direct.map_or_else(|| copy.buffered(work.job.layer).0, |direct| direct.file());
        (file, work.offset + piece.range.start as u64)
    }

    /// What a job needs next. Compares digests where that is due.
    pub(super) fn next(&self, work: &mut Work) -> Next {
        loop {
            match work.progress.step() {
                Step::Read(piece) => return Next::Read(piece),
                Step::Check { copy } => {
                    let result = self.check(work, copy);
                    let notice = work.progress.checked(result);
                    self.heed(work, notice);
                }
                Step::Done { copy, direct } => {
                    let copy = &self.copies[copy];
                    if copy.health.succeeded() {
                        tracing::info!(directory = %copy.dir().display(), "a copy that was set aside gives slabs again");
                    }
                    if !work.progress.failures().is_empty() {
                        Counters::bump(&self.counters.mirror_fallbacks);
                    }
                    let (bytes, service) = (work.progress.bytes(), work.service);
                    return Next::Ended(Ok(ReadReport { bytes, service, direct }));
                }
                Step::Failed => return Next::Ended(Err(self.failed(work))),
            }
        }
    }

    /// Takes the system's answer to a read.
    pub(super) fn answered(
        &self,
        work: &mut Work,
        piece: &Piece,
        answer: Result<usize, i32>,
        service: Duration,
    ) {
        work.service += service;
        let slab = (work.job.layer, work.job.expert);
        let bytes = &mut work.job.memory[piece.range.clone()];
        let answer = self.edge.answer(slab, piece, answer, bytes);
        let notice = work.progress.answered(piece, answer);
        self.heed(work, notice);
    }

    fn check(&self, work: &Work, copy: usize) -> Result<(), Cause> {
        let (layer, expert) = (work.job.layer, work.job.expert);
        let entry = self.container.expert_entry(layer, expert).expect("looked up before");
        let found = blake3::hash(&work.job.memory).to_hex();
        let equal = found.as_str() == entry.blake3;
        self.copies[copy].set_checked(layer, expert, equal);
        Counters::bump(&self.counters.slabs_checked);
        if equal {
            return Ok(());
        }
        Counters::bump(&self.counters.slabs_damaged);
        Err(Cause::Digest { expected: entry.blake3.clone(), found: found.to_string() })
    }

    /// Does what concerns more than one read.
    fn heed(&self, work: &Work, notice: Option<Notice>) {
        match notice {
            None => {}
            Some(Notice::DirectRefused { copy }) => {
                let copy = &self.copies[copy];
                let first = copy.direct(work.job.layer).is_some_and(|file| file.refuse());
                if first {
                    Counters::bump(&self.counters.direct_fallbacks);
                    let (_, file) = copy.buffered(work.job.layer);
                    tracing::warn!(
                        file = %file.display(),
                        "a read past the page cache was refused (EINVAL); this file is read through it from now on"
                    );
                }
            }
            // Without another copy the failure is the job's outcome, and whoever asked says so.
            Some(Notice::CopyFailed { copy }) if self.copies.len() > 1 => {
                let copy = &self.copies[copy];
                if let Some(failure) = self.failures(work).pop() {
                    let (layer, expert) = (work.job.layer, work.job.expert);
                    tracing::warn!(layer, expert, %failure, "a copy did not give a slab");
                }
                if copy.health.failed() {
                    Counters::bump(&self.counters.copies_set_aside);
                    tracing::warn!(
                        directory = %copy.dir().display(),
                        "{FAILURES_MAX} reads in a row failed: slabs come from other copies, one in {TRIAL_EVERY} tries this one again"
                    );
                }
            }
            Some(Notice::CopyFailed { .. }) => {}
        }
    }

    fn failures(&self, work: &Work) -> Vec<CopyFailure> {
        let failure = |failure: &super::progress::Failure| CopyFailure {
            file: self.copies[failure.copy].buffered(work.job.layer).1.to_path_buf(),
            offset: work.offset,
            wanted: work.job.memory.len() as u64,
            got: failure.got as u64,
            cause: failure.cause.clone(),
        };
        work.progress.failures().iter().map(failure).collect()
    }

    fn failed(&self, work: &Work) -> ReadError {
        let (layer, expert) = (work.job.layer, work.job.expert);
        ReadError::Failed { layer, expert, failures: self.failures(work) }
    }
}
