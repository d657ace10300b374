//! Checkpoints and containers of Shimmer.
//!
//! Reads Hugging Face checkpoints strictly, describes them in one normalised [`ModelConfig`], converts them into the
//! container that coordinators and workers load, and opens, verifies and inspects containers. Also makes the tiny seeded
//! checkpoints of the tests and the checkpoint of the demo.
//!
//! This crate never opens a socket, never schedules, never prints, and computes nothing but the packing of weights and
//! the self-test of experts, both by `shimmer_kernels`.
//!
//! Start reading at [`Container`], what everything else loads; then [`convert()`], which makes one.

mod byte_level;
mod checkpoint;
mod class;
mod config;
mod container;
mod convert;
pub mod demo;
mod error;
mod files;
pub mod gguf;
mod incoming;
mod inspect;
mod manifest;
mod mirror;
mod parts;
mod place;
mod plan;
mod safetensors;
mod schema;
pub mod self_test;
mod splitmix;
#[cfg(test)]
mod testing;
pub mod tiny;
mod verify;

pub use class::NumericClass;
pub use config::{AttentionConfig, Family, Ffn, LayerConfig, ModelConfig, QkNorm, RopeConfig};
pub use container::{Container, Trunk};
pub use convert::{ConvertOptions, ConvertProgress, ConvertReport, convert};
pub use error::{Error, MissingCase, Result};
pub use incoming::{Fault, Incoming, IncomingFile, Offer, Settled, Standing};
pub use inspect::{Inspection, LayerSummary};
pub use manifest::{
    ExpertEntry, FileEntry, MANIFEST_FILE, Manifest, SCHEMA_VERSION, SourceInfo, TensorEntry,
};
pub use mirror::{
    Layers, MirrorOptions, MirrorPlan, MirrorReport, ParseLayersError, PlannedFile, plan_mirror,
    stage_mirror,
};
pub use verify::{VerifyReport, verify};
