//! Choice of the next token from logits: a pure function of logits, history, parameters, seed and position.

mod params;

pub use params::{InvalidParameter, Sampling};
