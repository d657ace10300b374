//! What runs beside a connection.

use std::{io, thread};

/// Where jobs run that take longer than the bytes of a connection should wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Beside {
    /// On threads: the connection goes on moving bytes meanwhile.
    #[default]
    Threads,
    /// Nowhere: they run where they come up, and the clock of a simulation stands still meanwhile.
    Nothing,
}

impl Beside {
    /// Runs a job on a thread of its own.
    pub(super) fn start(self, name: &str, job: impl FnOnce() + Send + 'static) -> io::Result<()> {
        match self {
            Self::Threads => drop(thread::Builder::new().name(name.to_owned()).spawn(job)?),
            Self::Nothing => job(),
        }
        Ok(())
    }

    /// Runs a job on a pool.
    pub(super) fn compute(self, pool: &rayon::ThreadPool, job: impl FnOnce() + Send + 'static) {
        match self {
            Self::Threads => pool.spawn(job),
            Self::Nothing => job(),
        }
    }
}
