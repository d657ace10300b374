//! The thread that appends tokens. Whoever generates leaves them in memory and never waits; the thread comes round and
//! writes what has gathered.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Timespec, Timestamps, UTIME_NOW};

use super::counters::{Count, Counters};
use super::directory::Directory;
use super::record::{Ending, Record, encode};
use super::retention::{Rules, given_up};
use super::{JournalError, JournalOptions};

/// How often the thread comes round: as much of an answer has to be generated again after a crash.
const ROUND: Duration = Duration::from_millis(25);
/// Longest wait for rounds when a request is read; a drive that is slower costs tokens that are generated again.
const SETTLE: Duration = Duration::from_millis(500);
/// How often appended bytes are forced to the drive, or to the server of a network file system.
const SYNC: Duration = Duration::from_secs(1);
/// How often a file that is open is touched, so that nobody else takes it for left; a quarter of the time to keep if
/// that is shorter.
const TOUCH: Duration = Duration::from_secs(15);
/// How often the directory is cleaned up; an eighth of the time to keep if that is shorter.
const CLEAN: Duration = Duration::from_secs(60);
/// Most tokens of all requests that wait to be written: 4 MB, hours of generating.
const MAX_PENDING: u64 = 1 << 20;

/// What a request has said since the last round.
#[derive(Debug, Default)]
struct Pending {
    ids: Vec<u32>,
    ending: Option<Ending>,
    /// Nothing more will come.
    closed: bool,
    /// Tokens were left out, so that no later one may follow.
    overrun: bool,
}

/// A request whose file is open.
#[derive(Debug)]
struct Slot {
    name: String,
    pending: Mutex<Pending>,
}

impl Slot {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's own part of a slot.
#[derive(Debug)]
struct Open {
    slot: Arc<Slot>,
    /// None after a failed write: what stands behind a torn record would not be read.
    file: Option<File>,
    /// Place of the next token.
    next: u32,
    /// Bytes were appended since the last time they were forced out.
    unsynced: bool,
}

/// What all parts of a journal share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) directory: Directory,
    pub(super) options: JournalOptions,
    pub(super) counters: Counters,
    /// Files that the thread has not taken over yet.
    arrivals: Mutex<Vec<Open>>,
    /// Names of all open files, and how often: a file that is taken over is open twice for a moment.
    open: Mutex<BTreeMap<String, u64>>,
    wake: Condvar,
    /// Rounds that the thread has gone, and who waits for them.
    rounds: Count,
    round: Condvar,
    stop: AtomicBool,
    /// One clean-up at a time.
    cleaning: Mutex<()>,
    /// The last acceptance failed: said once, not once for each request.
    pub(super) degraded: AtomicBool,
}

/// A request's way into the journal. Dropping it closes the file.
#[derive(Debug)]
pub struct Entry {
    shared: Arc<Shared>,
    slot: Arc<Slot>,
    /// Tokens that the file had at first and that come again from the beginning.
    skip: usize,
}

impl Entry {
    /// Notes the next generated tokens, those of the beginning first. Never waits.
    pub fn tokens(&mut self, ids: &[u32]) {
        let known = self.skip.min(ids.len());
        self.skip -= known;
        let ids = &ids[known..];
        if ids.is_empty() {
            return;
        }
        let mut pending = self.slot.pending();
        if pending.overrun {
            return;
        }
        if self.shared.counters.pending_tokens.get() + ids.len() as u64 > MAX_PENDING {
            pending.overrun = true;
            drop(pending);
            self.shared.counters.overruns.add(1);
            tracing::warn!(
                file = self.slot.name,
                "the journal cannot keep up; what it lacks would be generated again"
            );
            return;
        }
        pending.ids.extend_from_slice(ids);
        self.shared.counters.pending_tokens.add(ids.len() as u64);
    }

    /// Notes the end.
    pub fn finish(&mut self, ending: Ending) {
        self.slot.pending().ending = Some(ending);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.slot.pending().closed = true;
    }
}

impl Shared {
    pub(super) fn new(directory: Directory, options: JournalOptions) -> Self {
        Self {
            directory,
            options,
            counters: Counters::default(),
            arrivals: Mutex::default(),
            open: Mutex::default(),
            wake: Condvar::new(),
            rounds: Count::default(),
            round: Condvar::new(),
            stop: AtomicBool::new(false),
            cleaning: Mutex::default(),
            degraded: AtomicBool::new(false),
        }
    }

    /// Takes a file over that has `known` tokens, of which the first `again` will come again.
    pub(super) fn attach(
        self: &Arc<Self>,
        id: &str,
        file: File,
        known: usize,
        again: usize,
    ) -> Entry {
        let slot = Arc::new(Slot { name: Directory::name(id), pending: Mutex::default() });
        let next = u32::try_from(known).expect("the context is counted in u32");
        let open = Open { slot: Arc::clone(&slot), file: Some(file), next, unsynced: false };
        *self.names().entry(slot.name.clone()).or_default() += 1;
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(open);
        self.wake.notify_one();
        Entry { shared: Arc::clone(self), slot, skip: again }
    }

    pub(super) fn open_files(&self) -> u64 {
        self.names().values().sum()
    }

    fn names(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_round(&self) {
        // Under the lock that its waiters hold, so that none looks and then misses it.
        let _names = self.names();
        self.rounds.add(1);
        self.round.notify_all();
    }

    fn close(&self, name: &str) {
        let mut names = self.names();
        if let Some(count) = names.get_mut(name) {
            *count -= 1;
            if *count == 0 {
                names.remove(name);
            }
        }
    }

    /// Waits until what was said about a request here is in its file: for two rounds, since one may be half over.
    pub(super) fn settle(&self, id: &str) {
        let name = Directory::name(id);
        let until = self.rounds.get() + 2;
        let open = |names: &mut BTreeMap<String, u64>| {
            names.contains_key(&name) && self.rounds.get() < until
        };
        let waited = self.round.wait_timeout_while(self.names(), SETTLE, open);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends the thread after its last round.
    pub(super) fn stop(&self) {
        // Under the lock, so that the thread does not begin to wait between looking and being woken.
        let _arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        self.stop.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// Removes what is too old, and more if `needed_bytes` would not fit otherwise.
    ///
    /// # Errors
    /// They do not fit even so, or the directory cannot be read.
    pub(super) fn clean(&self, needed_bytes: u64) -> Result<(), JournalError> {
        let _one = self.cleaning.lock().unwrap_or_else(PoisonError::into_inner);
        let open = self.names().clone();
        let failed =
            |source| JournalError::Directory { path: self.directory.path().to_owned(), source };
        let mut facts = self.directory.facts(|name| open.contains_key(name)).map_err(failed)?;
        let JournalOptions { keep, limit_bytes, .. } = self.options;
        let rules = Rules { keep, limit_bytes, fresh: 4 * touch(keep) };
        let names: BTreeSet<String> = given_up(&facts, rules, needed_bytes).into_iter().collect();
        for name in &names {
            self.directory.remove(name).map_err(failed)?;
            self.counters.removed.add(1);
        }
        facts.retain(|fact| !names.contains(&fact.name));
        let bytes = facts.iter().map(|fact| fact.bytes).sum();
        self.counters.bytes.set(bytes);
        if bytes.saturating_add(needed_bytes) > limit_bytes {
            return Err(JournalError::Limit { bytes, needed_bytes, limit_bytes });
        }
        Ok(())
    }
}

fn touch(keep: Duration) -> Duration {
    TOUCH.min(keep / 4)
}

/// The thread. It ends after [`Shared::stop`], when everything that was said is written.
pub(super) fn run(shared: &Shared) {
    let clean_every = CLEAN.min(shared.options.keep / 8);
    let touch_every = touch(shared.options.keep);
    let mut open: Vec<Open> = Vec::new();
    let start = Instant::now();
    let (mut cleaned, mut touched, mut synced) = (start, start, start);
    loop {
        let stopping = shared.stop.load(Ordering::Acquire);
        open.append(&mut shared.arrivals.lock().unwrap_or_else(PoisonError::into_inner));
        let now = Instant::now();
        let sync = stopping || now.duration_since(synced) >= SYNC;
        if sync {
            synced = now;
        }
        let touch = now.duration_since(touched) >= touch_every;
        if touch {
            touched = now;
        }
        open.retain_mut(|open| visit(shared, open, sync, touch) && !stopping);
        shared.end_round();
        if stopping {
            return;
        }
        if now.duration_since(cleaned) >= clean_every {
            cleaned = now;
            if let Err(error) = shared.clean(0)
                && !matches!(error, JournalError::Limit { .. })
            {
                shared.counters.clean_failures.add(1);
                tracing::warn!(%error, "the journal could not be cleaned up");
            }
        }
        let wait = if open.is_empty() { clean_every } else { ROUND };
        let arrivals = shared.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.is_empty() && !shared.stop.load(Ordering::Acquire) {
            // Tokens do not wake anybody: they are fetched.
            drop(shared.wake.wait_timeout(arrivals, wait).unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// Writes what a request has said; false when it says nothing more.
fn visit(shared: &Shared, open: &mut Open, sync: bool, touch: bool) -> bool {
    let (ids, ending, closed) = {
        let mut pending = open.slot.pending();
        (std::mem::take(&mut pending.ids), pending.ending.take(), pending.closed)
    };
    shared.counters.pending_tokens.sub(ids.len() as u64);
    let last = closed || ending.is_some();
    let mut bytes = Vec::new();
    if !ids.is_empty() {
        let first = open.next;
        open.next += u32::try_from(ids.len()).expect("the context is counted in u32");
        bytes.extend(encode(&Record::Tokens { first, ids }));
    }
    if let Some(ending) = ending {
        bytes.extend(encode(&Record::Finished(ending)));
    }
    if let Some(file) = &mut open.file {
        open.unsynced |= !bytes.is_empty();
        let now = open.unsynced && (sync || last);
        let written =
            file.write_all(&bytes).and_then(|()| if now { file.sync_data() } else { Ok(()) });
        let touched = written.and_then(|()| {
            if touch && !last { Ok(rustix::fs::futimens(&*file, &now_times())?) } else { Ok(()) }
        });
        match touched {
            Ok(()) => {
                open.unsynced &= !now;
                shared.counters.written_bytes.add(bytes.len() as u64);
                shared.counters.bytes.add(bytes.len() as u64);
            }
            Err(error) => {
                open.file = None;
                shared.counters.append_failures.add(1);
                let file = shared.directory.path().join(&open.slot.name);
                tracing::error!(file = %file.display(), %error,
                    "cannot append to the journal; the request goes on, and what the file lacks would be generated again");
            }
        }
    }
    if last {
        shared.close(&open.slot.name);
    }
    !last
}

/// Now, by the clock of whoever has the file.
fn now_times() -> Timestamps {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Timestamps { last_access: now, last_modification: now }
}
