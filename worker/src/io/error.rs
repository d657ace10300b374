//! Why a slab is not there: every copy that was tried, with file, offset, wanted and found.

use std::{fmt, io, path::PathBuf};

/// Why a slab could not be read.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// No copy gave it.
    #[error("reading expert {expert} of layer {layer}: {}", listing(.failures))]
    Failed {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// What happened to each copy, in the order in which they were tried.
        failures: Vec<CopyFailure>,
    },
    /// No directory has it.
    #[error("expert {expert} of layer {layer} is in no container directory of this worker")]
    NoSuchExpert {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// The memory that the asker gave does not fit.
    #[error("expert {expert} of layer {layer} takes {wanted} bytes, its memory has {found}")]
    Memory {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Bytes of the slab.
        wanted: u64,
        /// Bytes of the memory.
        found: usize,
    },
    /// The reader ended first.
    #[error("the reader was closed before expert {expert} of layer {layer} was read")]
    Closed {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
}

/// What happened to one copy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {wanted} bytes at {offset} wanted, {got} read: {cause}", file.display())]
pub struct CopyFailure {
    /// The file.
    pub file: PathBuf,
    /// Where the slab begins in it.
    pub offset: u64,
    /// Bytes of the slab.
    pub wanted: u64,
    /// Bytes that came before it failed.
    pub got: u64,
    /// What was wrong.
    pub cause: Cause,
}

/// What was wrong with a read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The system refused, with this number.
    System(i32),
    /// The system put the read off, with this number, more often than it is asked.
    Busy(i32),
    /// The file ends inside the slab.
    Truncated,
    /// The bytes have another digest than the manifest promises.
    Digest {
        /// The manifest's.
        expected: String,
        /// That of the bytes.
        found: String,
    },
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(number) => io::Error::from_raw_os_error(*number).fmt(f),
            Self::Busy(number) => {
                let answer = io::Error::from_raw_os_error(*number);
                write!(f, "put off again and again ({answer})")
            }
            Self::Truncated => f.write_str("the file ends inside the slab"),
            Self::Digest { expected, found } => {
                write!(f, "their digest is {found}, the manifest says {expected}: they are damaged")
            }
        }
    }
}

fn listing(failures: &[CopyFailure]) -> String {
    failures.iter().map(CopyFailure::to_string).collect::<Vec<_>>().join("; ")
}
