//! What can go wrong before or beside serving. Faults of one peer are [`WorkerError`](shimmer_proto::expert::v1::WorkerError)
//! messages to that peer, not errors of this type.

use std::{io, path::PathBuf};

use crate::{
    budget::{BudgetTerm, Size, Term},
    history::HistoryError,
    memory::PlacementError,
};

/// Failure of the worker itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that cannot be used.
    #[error("setting {name} is {value}: {reason}")]
    Setting {
        /// Name of the setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// More memory was asked for than this process can have.
    #[error(
        "--ram {} does not fit: {term} leaves {} for experts, and {} for everything else; lower --ram or give --ram auto",
        Size(*.requested), Size(*.available), Size(*.beside)
    )]
    Budget {
        /// What the user set.
        requested: u64,
        /// What there is.
        available: u64,
        /// What everything but experts takes.
        beside: u64,
        /// Which limit binds.
        term: BudgetTerm,
    },
    /// Everything but experts takes all of the memory.
    #[error(
        "there is no memory for experts: {term} leaves {}, but {} go elsewhere, most of it to {largest}",
        Size(*.available), Size(*.needed)
    )]
    NoRoom {
        /// What everything but experts takes.
        needed: u64,
        /// What there is.
        available: u64,
        /// Which limit binds.
        term: BudgetTerm,
        /// The largest of the other terms.
        largest: Term,
    },
    /// Nothing says how much memory there is.
    #[error("the memory of this host cannot be read from /proc/meminfo; give --ram a size")]
    UnknownMemory,
    /// The container has nothing to serve.
    #[error("the container in {dir} has no layer with routed experts")]
    NoExperts {
        /// Directory of the container.
        dir: String,
    },
    /// Threads could not be started.
    #[error("starting {threads} compute threads")]
    Pool {
        /// How many.
        threads: usize,
        /// What the pool said.
        source: rayon::ThreadPoolBuildError,
    },
    /// Memory could not be placed on the nodes of this machine.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The listening socket failed.
    #[error("listening on {address}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// A mirror cannot be used.
    #[error("mirror {}: {reason}; `shimmer mirror stage` makes one, `shimmer mirror verify` checks one", dir.display())]
    Mirror {
        /// Its directory.
        dir: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A layer file could not be opened a second time.
    #[error("opening {} for reads past the page cache", file.display())]
    OpenDirect {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Threads could not be started.
    #[error("starting {threads} threads that read slabs")]
    IoThreads {
        /// How many.
        threads: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The usage history cannot be used.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// The thread that saves the usage history could not be started.
    #[error("starting a thread that saves the usage history")]
    UsageThread {
        /// What the system said.
        source: io::Error,
    },
    /// The container could not be read.
    #[error(transparent)]
    Model(Box<shimmer_model::Error>),
}

impl From<shimmer_model::Error> for Error {
    fn from(error: shimmer_model::Error) -> Self {
        Self::Model(Box::new(error))
    }
}
