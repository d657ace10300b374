//! Reading ahead: hints wait in a ring, and pilots read the experts they name while other layers are computed.
//!
//! Hints are advice. Each is dropped when it comes too late, when the expert is there, or when it would cost more than it
//! brings; none of that changes a byte. A pilot reads on its own thread into a slot of the cache, so that more pilots never
//! take more memory and never stand in front of the demand path. Start reading at [`Pilots`].

mod pilots;
mod ring;

pub(crate) use pilots::{Hint, Pilots};
