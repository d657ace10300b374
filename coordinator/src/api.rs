//! The public gRPC API: requests are checked and turned into generations, their events into a numbered stream.
//!
//! It holds no state of a request but its stream and what the journal has of it: dropping that stream, as tonic does when a
//! client goes, ends the generation, and Resume begins another one where it was. Every refusal names the field and carries `google.rpc` details. Start reading at [`Inference`].

mod cluster;
mod convert;
mod door;
mod inference;
mod keys;
mod resume;
mod server;
mod status;
mod stream;
mod validate;

#[cfg(test)]
mod tests;

pub use cluster::ClusterStatus;
pub(crate) use door::{Door, note_call};
pub use door::{DoorCounters, DoorOptions, DoorReport};
use inference::off_thread;
pub use inference::{Inference, InferenceParts};
pub use keys::{ApiKeys, KeyRefusal};
pub use server::{ServeError, ServerOptions, serve};
pub use stream::GenerateStream;
