//! The usage history of a store: read when it starts, written now and then and at the end.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError, atomic::Ordering::Relaxed},
    thread::{self, JoinHandle},
    time::Duration,
};

use super::tiered::Shared;
use crate::{Error, history, residency::Usage, tier_options::UsageFile};

/// Time between two saves: what a crash may cost is the memory of that long.
const SAVE_INTERVAL: Duration = Duration::from_secs(300);

/// Stores of one process may share a file: each reads it, adds what is new and writes it, alone.
static WRITING: Mutex<()> = Mutex::new(());

/// Use of a store's experts, over its runs.
#[derive(Debug)]
pub(super) struct History {
    file: UsageFile,
    digest: String,
    /// As of the start; none if there was no history.
    pub(super) earlier: Option<Usage>,
    /// Works and uses by layer, in the order of the layers, that have been written.
    written: Mutex<Vec<(u64, Vec<u64>)>>,
}

impl History {
    /// Reads the history of a container.
    pub(super) fn open(file: UsageFile, digest: &str) -> Result<Self, Error> {
        let earlier = history::load(&file.path, digest)?;
        if earlier.is_none() && file.read_only {
            tracing::warn!(file = %file.path.display(), "there is no usage history; no expert counts as used");
        }
        Ok(Self { file, digest: digest.to_owned(), earlier, written: Mutex::default() })
    }
}

impl Shared {
    /// Adds what was used since the last save to the file. A failure is logged, and its uses wait for the next save.
    pub(super) fn save_usage(&self) {
        let Some(history) = self.history.as_ref().filter(|history| !history.file.read_only) else {
            return;
        };
        let mut written = history.written.lock().unwrap_or_else(PoisonError::into_inner);
        let now: Vec<(u32, u64, Vec<u64>)> = self
            .layers()
            .map(|layer| {
                let state = layer.lock();
                (layer.layer, state.slots.time(), state.slots.uses().to_vec())
            })
            .collect();
        written.resize_with(now.len(), Default::default);
        let unchanged = now.iter().zip(&*written).all(|((_, works, _), (old, _))| works == old);
        if unchanged {
            return;
        }
        let _alone = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        let (path, digest) = (&history.file.path, &history.digest);
        let saved = history::load(path, digest).and_then(|usage| {
            let mut usage = usage.unwrap_or_default();
            for ((layer, works, uses), (old_works, old_uses)) in now.iter().zip(&*written) {
                let old = old_uses.iter().chain(std::iter::repeat(&0));
                let new: Vec<u64> = uses.iter().zip(old).map(|(uses, old)| uses - old).collect();
                usage.add(*layer, works - old_works, &new);
            }
            history::save(path, digest, &usage)
        });
        match saved {
            Ok(()) => *written = now.into_iter().map(|(_, works, uses)| (works, uses)).collect(),
            Err(error) => {
                self.counters.usage_save_failures.fetch_add(1, Relaxed);
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "the usage history was not saved");
            }
        }
    }
}

/// A thread that saves the history now and then.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    ended: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the thread, if there is a history to write.
    pub(super) fn start(shared: &Arc<Shared>) -> Result<Option<Self>, Error> {
        if shared.history.as_ref().is_none_or(|history| history.file.read_only) {
            return Ok(None);
        }
        let ended = Arc::new((Mutex::new(false), Condvar::new()));
        let (saved, end) = (Arc::clone(shared), Arc::clone(&ended));
        let run = move || {
            let (ended, changed) = &*end;
            let mut over = ended.lock().unwrap_or_else(PoisonError::into_inner);
            while !*over {
                let waited = changed.wait_timeout(over, SAVE_INTERVAL);
                over = waited.unwrap_or_else(PoisonError::into_inner).0;
                if !*over {
                    drop(over);
                    saved.save_usage();
                    over = ended.lock().unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        let thread = thread::Builder::new().name("shimmer-usage".to_owned()).spawn(run);
        let thread = thread.map_err(|source| Error::UsageThread { source })?;
        Ok(Some(Self { shared: Arc::clone(shared), ended, thread: Some(thread) }))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let (ended, changed) = &*self.ended;
        *ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("saving does not panic");
        }
        self.shared.save_usage();
    }
}

#[cfg(test)]
mod tests;
