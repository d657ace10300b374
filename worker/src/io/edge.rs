//! Where the system's answers come in. Tests put themselves here and change them, for every backend alike.

use std::fmt;

use super::progress::Piece;

/// What stands between the system and the readers.
pub(super) trait Edge: Send + Sync + fmt::Debug {
    /// What the reader of slab `(layer, expert)` is told when the system has answered the read of a piece into `bytes`: the
    /// number of bytes, or of the error.
    fn answer(
        &self,
        _slab: (u32, u32),
        _piece: &Piece,
        answer: Result<usize, i32>,
        _bytes: &mut [u8],
    ) -> Result<usize, i32> {
        answer
    }

    /// The number of the error with which io_uring is refused.
    fn open_ring(&self) -> Result<(), i32> {
        Ok(())
    }

    /// The number of the error with which a submission is refused, before the system sees it.
    fn submit(&self) -> Result<(), i32> {
        Ok(())
    }
}

/// Hands on what comes.
#[derive(Debug)]
pub(super) struct System;

impl Edge for System {}
