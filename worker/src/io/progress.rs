//! One slab read as a state machine, for all backends: it is told what the system answered and says what comes next.
//!
//! It owns no file, memory or clock. A copy that fails is left for the next one from the beginning, so that the bytes of
//! two copies never mix.

use std::ops::Range;

use super::error::Cause;

/// The largest piece that one call is asked for: Linux returns at most 2^31 - 4096 bytes however much is asked.
pub(super) const PIECE_BYTES: usize = 1 << 30;

/// How often in a row a copy may answer "interrupted" or "busy". A disk does so hardly ever; more is a fault of its own.
pub(super) const AGAIN_MAX: u32 = 64;

/// A copy that may be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Its number.
    pub(super) copy: usize,
    /// The alignment of reads past the page cache; none if it is read through it.
    pub(super) direct: Option<usize>,
    /// Whether this copy of the slab was compared with the manifest before.
    pub(super) checked: bool,
}

/// A part of the slab, read by one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Which copy.
    pub(super) copy: usize,
    /// Past the page cache.
    pub(super) direct: bool,
    /// Which bytes of the slab.
    pub(super) range: Range<usize>,
}

/// What comes next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Read this and tell [`Progress::answered`].
    Read(Piece),
    /// Compare the digest of all bytes and tell [`Progress::checked`].
    Check { copy: usize },
    /// The slab is there; the flag says whether all of it passed the page cache by.
    Done { copy: usize, direct: bool },
    /// No copy is left.
    Failed,
}

/// Something that concerns more than this read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// The file refuses reads past the page cache.
    DirectRefused { copy: usize },
    /// The copy could not give the slab.
    CopyFailed { copy: usize },
}

/// Why a copy was left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) copy: usize,
    /// Bytes that had come.
    pub(super) got: usize,
    pub(super) cause: Cause,
}

/// The state of one read.
#[derive(Debug)]
pub(super) struct Progress {
    length: usize,
    /// In the order in which they are tried; the first is the current one.
    candidates: std::vec::IntoIter<Candidate>,
    current: Option<Candidate>,
    /// Bytes of the current copy that are in place.
    done: usize,
    /// Whether some of them came through the page cache.
    buffered: bool,
    again: u32,
    bytes: u64,
    failures: Vec<Failure>,
}

impl Progress {
    /// A read of `length` bytes.
    pub(super) fn new(length: usize, candidates: Vec<Candidate>) -> Self {
        let mut candidates = candidates.into_iter();
        let current = candidates.next();
        let failures = Vec::new();
        Self { length, candidates, current, done: 0, buffered: false, again: 0, bytes: 0, failures }
    }

    /// What comes next.
    pub(super) fn step(&self) -> Step {
        let Some(Candidate { copy, direct, checked }) = self.current else { return Step::Failed };
        if self.done < self.length {
            let end = self.length.min(self.done.saturating_add(PIECE_BYTES));
            // After a short read that ends off the alignment the rest goes through the page cache, which takes any offset.
            let direct = direct.is_some_and(|align| self.done.is_multiple_of(align));
            return Step::Read(Piece { copy, direct, range: self.done..end });
        }
        if checked { Step::Done { copy, direct: !self.buffered } } else { Step::Check { copy } }
    }

    /// The system answered the current [`Step::Read`]: with bytes, or with an error number.
    pub(super) fn answered(&mut self, piece: &Piece, answer: Result<usize, i32>) -> Option<Notice> {
        match answer {
            Ok(0) => self.fail(Cause::Truncated),
            Ok(count) => {
                assert!(count <= piece.range.len(), "a read gives no more than it is asked for");
                self.done += count;
                self.bytes += count as u64;
                self.buffered |= !piece.direct;
                self.again = 0;
                None
            }
            Err(number @ (libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                self.again += 1;
                if self.again > AGAIN_MAX { self.fail(Cause::Busy(number)) } else { None }
            }
            Err(libc::EINVAL) if piece.direct => {
                let current =
                    self.current.as_mut().expect("a copy that answers is the current one");
                current.direct = None;
                Some(Notice::DirectRefused { copy: current.copy })
            }
            Err(number) => self.fail(Cause::System(number)),
        }
    }

    /// The digest was compared: the error holds what the manifest says and what was found.
    pub(super) fn checked(&mut self, digest: Result<(), Cause>) -> Option<Notice> {
        match digest {
            Ok(()) => {
                let current =
                    self.current.as_mut().expect("a copy that is checked is the current one");
                current.checked = true;
                None
            }
            Err(cause) => self.fail(cause),
        }
    }

    /// Bytes that came from files so far, those of failed copies included.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The copies that failed, in order.
    pub(super) fn failures(&self) -> &[Failure] {
        &self.failures
    }

    fn fail(&mut self, cause: Cause) -> Option<Notice> {
        let Candidate { copy, .. } = self.current.take()?;
        self.failures.push(Failure { copy, got: self.done, cause });
        self.current = self.candidates.next();
        (self.done, self.again, self.buffered) = (0, 0, false);
        Some(Notice::CopyFailed { copy })
    }
}

#[cfg(test)]
mod tests;
