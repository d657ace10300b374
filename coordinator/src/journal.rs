//! The journal: what is needed to give the rest of an answer when its coordinator has died.
//!
//! Generated tokens are a function of weights, arithmetic, prompt, parameters and seed. So it is enough to have the request on
//! the drive before its client hears of it; the tokens are written as they come, by a thread of their own that nobody
//! waits for, and what of them gets lost is generated again. One file for each request lies in a directory that several
//! coordinators may share over a network file system:
//!
//! * A file has its name only when it is whole and on the drive, and the name only once: `record` has the bytes.
//! * A file has one writer. Whoever resumes a request puts a file of its own in the place of the old one, in one step, and a writer
//!   that is still there writes into a file without a name.
//! * A journal that fails (a full drive, a server that hangs) costs requests their promise to be resumable, nothing else.
//!
//! Start reading at [`Journal`].

mod counters;
mod directory;
mod payload;
mod record;
mod retention;
mod writer;

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use tokio::sync::Semaphore;

pub use counters::JournalStats;
use directory::Directory;
pub use record::{Accepted, Damage, Ending, Recovered};
pub use writer::Entry;
use writer::Shared;

/// Most acceptances that wait for the drive at a time; more go on without a journal.
const MAX_ACCEPTING: usize = 256;
/// Longest wait for the last tokens when the process ends.
const CLOSE: Duration = Duration::from_secs(2);

/// Where a journal lies and how much of it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalOptions {
    /// Made where there is none.
    pub directory: PathBuf,
    /// How long a file stays after the last sign of life of its request.
    pub keep: Duration,
    /// Bytes of all files together.
    pub limit_bytes: u64,
    /// Longest wait for the drive before a request goes on without a journal.
    pub timeout: Duration,
}

/// Why a journal cannot be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The directory is not there, not writable, or its file system lacks what is needed.
    #[error("the directory {path} cannot hold one")]
    Directory {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The thread could not be started.
    #[error("cannot start the thread of the journal")]
    Thread(#[source] std::io::Error),
    /// A file cannot be read or written.
    #[error("the journal's file {path}: {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what was written.
    #[error("the journal's file {path} is damaged {damage}")]
    Damaged {
        /// Its path.
        path: PathBuf,
        /// Where and how.
        damage: Damage,
    },
    /// What may be removed is removed, and still there is no room.
    #[error(
        "the journal's files have {bytes} bytes; {needed_bytes} more would be above the limit of {limit_bytes}"
    )]
    Limit {
        /// Of the files that must stay.
        bytes: u64,
        /// Of the new request.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The drive did not answer in time.
    #[error("the drive of the journal in {path} does not answer")]
    Stalled {
        /// The directory.
        path: PathBuf,
    },
}

/// What became of writing a request down.
#[derive(Debug)]
pub enum Acceptance {
    /// It is on the drive.
    Kept(Entry),
    /// The journal holds another request of that id.
    Exists,
    /// It could not be written down and can be served without, which was counted and logged.
    Without,
}

/// How a request was resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It had ended; its events were given without a model.
    Ended,
    /// It went on behind its known tokens.
    Continued,
    /// It was generated again, because its events need the logits.
    Again,
}

/// A journal of one coordinator. Clones share it; when the last one is dropped, the thread writes what is left and ends.
#[derive(Clone, Debug)]
pub struct Journal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    accepting: Arc<Semaphore>,
    /// Closed when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(CLOSE) == Err(crossbeam_channel::RecvTimeoutError::Timeout) {
            tracing::warn!(
                "the drive of the journal does not answer; its last tokens are left to be generated again"
            );
        }
    }
}

impl Journal {
    /// Opens the directory, which is made where there is none.
    ///
    /// # Errors
    /// It cannot be written, or its file system has no hard links.
    pub fn open(options: JournalOptions) -> Result<Self, JournalError> {
        let directory = Directory::open(&options.directory)?;
        let shared = Arc::new(Shared::new(directory, options));
        // A journal that is above its limit is no reason not to serve.
        match shared.clean(0) {
            Err(JournalError::Limit { .. }) | Ok(()) => {}
            Err(error) => return Err(error),
        }
        let (running, ended) = bounded::<()>(0);
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("shimmer-journal".to_owned());
        let _detached = thread
            .spawn(move || {
                let _running = running;
                writer::run(&of_thread);
            })
            .map_err(JournalError::Thread)?;
        let accepting = Arc::new(Semaphore::new(MAX_ACCEPTING));
        Ok(Self { inner: Arc::new(Inner { shared, accepting, ended: Mutex::new(ended) }) })
    }

    /// What it counts.
    pub fn stats(&self) -> JournalStats {
        let shared = &self.inner.shared;
        shared.counters.read(shared.open_files())
    }

    /// Counts a resumed request.
    pub fn count_resumed(&self, way: Way) {
        let counters = &self.inner.shared.counters;
        match way {
            Way::Ended => counters.resumed_ended.add(1),
            Way::Continued => counters.resumed_continued.add(1),
            Way::Again => counters.resumed_again.add(1),
        }
    }

    /// Writes a new request down; it is on the drive when this returns [`Acceptance::Kept`].
    pub async fn accept(&self, accepted: Accepted) -> Acceptance {
        let shared = Arc::clone(&self.inner.shared);
        let id = accepted.generation.id.clone();
        let accept = move || publish(&shared, accepted);
        let outcome = match self.on_the_drive(accept).await {
            Some(outcome) => outcome,
            None => Err(self.stalled()),
        };
        let shared = &self.inner.shared;
        match outcome {
            Ok(Some(entry)) => {
                if shared.degraded.swap(false, Ordering::Relaxed) {
                    tracing::info!("requests are written to the journal again");
                }
                Acceptance::Kept(entry)
            }
            Ok(None) => Acceptance::Exists,
            Err(error) => {
                shared.counters.accept_failures.add(1);
                if !shared.degraded.swap(true, Ordering::Relaxed) {
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::error!(request_id = id, %error, source,
                        "requests go on without a journal and cannot be resumed until it can be written again");
                }
                Acceptance::Without
            }
        }
    }

    /// What the journal knows of a request, whoever wrote it; none when it knows nothing.
    ///
    /// # Errors
    /// Its file cannot be read or is damaged, which was counted and logged.
    pub async fn recover(&self, id: &str) -> Result<Option<Recovered>, JournalError> {
        let (shared, id) = (Arc::clone(&self.inner.shared), id.to_owned());
        let recover = move || {
            shared.settle(&id);
            let path = shared.directory.file(&id);
            let bytes = match shared.directory.read(&id) {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Ok(None),
                Err(source) => return Err(JournalError::File { path, source }),
            };
            let recovered = record::read(&bytes).and_then(|recovered| {
                let found = &recovered.accepted.generation.id;
                if *found == id {
                    return Ok(Some(recovered));
                }
                Err(Damage { offset: 0, what: format!("it holds request {found:?}") })
            });
            recovered.map_err(|damage| JournalError::Damaged { path, damage })
        };
        let recovered = match self.on_the_drive(recover).await {
            Some(recovered) => recovered,
            None => Err(self.stalled()),
        };
        if let Err(error) = &recovered {
            self.inner.shared.counters.read_failures.add(1);
            tracing::error!(%error, "a request cannot be resumed");
        }
        recovered
    }

    /// Goes on with a request's file. Its first `again` tokens will be given to the entry once more. None when it cannot be
    /// written: then the old file stays, by which the request can still be resumed.
    pub async fn take_over(&self, recovered: Recovered, again: usize) -> Option<Entry> {
        let shared = Arc::clone(&self.inner.shared);
        let (id, known) = (recovered.accepted.generation.id.clone(), recovered.tokens.len());
        let path = shared.directory.file(&id);
        let replace = {
            let id = id.clone();
            move || {
                let bytes = record::file(&recovered);
                let file = shared.directory.replace(&id, &bytes)?;
                shared.counters.written_bytes.add(bytes.len() as u64);
                Ok::<_, std::io::Error>(shared.attach(&id, file, known, again))
            }
        };
        let failed = match self.on_the_drive(replace).await {
            Some(Ok(entry)) => return Some(entry),
            Some(Err(source)) => JournalError::File { path, source },
            None => self.stalled(),
        };
        self.inner.shared.counters.append_failures.add(1);
        tracing::error!(request_id = id, error = %failed, "a resumed request is not written further");
        None
    }

    /// Runs what waits for the drive where it holds nobody up; none when it takes too long.
    async fn on_the_drive<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let permit = Arc::clone(&self.inner.accepting).try_acquire_owned().ok()?;
        let work = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        // What comes too late is dropped there, an entry with its file closed.
        tokio::time::timeout(self.inner.shared.options.timeout, work).await.ok()?.ok()
    }

    fn stalled(&self) -> JournalError {
        JournalError::Stalled { path: self.inner.shared.directory.path().to_owned() }
    }
}

/// Makes the file of a new request, after a clean-up if there is no room; none if the id has one.
fn publish(shared: &Arc<Shared>, accepted: Accepted) -> Result<Option<Entry>, JournalError> {
    let id = accepted.generation.id.clone();
    let bytes = record::file(&Recovered { accepted, tokens: Vec::new(), ending: None });
    let length = bytes.len() as u64;
    let counters = &shared.counters;
    if counters.bytes.get().saturating_add(length) > shared.options.limit_bytes {
        shared.clean(length)?;
    }
    let failed = |source| JournalError::File { path: shared.directory.file(&id), source };
    let Some(file) = shared.directory.publish(&id, &bytes).map_err(failed)? else {
        return Ok(None);
    };
    counters.accepted.add(1);
    counters.written_bytes.add(length);
    counters.bytes.add(length);
    Ok(Some(shared.attach(&id, file, 0, 0)))
}

#[cfg(test)]
mod tests;
