//! Tokenizer and chat template against transformers, on committed golden files.
//!
//! `make_goldens.py` beside this file writes everything under `goldens/` and `tokenizers/`; it needs transformers.

#![allow(clippy::unwrap_used, reason = "test crate")]

mod templates;
mod tokenizers;

use std::path::PathBuf;

use serde_json::Value;

/// A file of this suite.
fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/text").join(name)
}

fn json(name: &str) -> Value {
    let bytes = std::fs::read(path(name)).unwrap_or_else(|error| panic!("read {name}: {error}"));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("parse {name}: {error}"))
}
