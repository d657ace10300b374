//! The stretches of a container's file that have a digest each.

use crate::manifest::{ExpertEntry, FileEntry, Manifest, TensorEntry};
use crate::schema::{self, TRUNK_FILE};

/// A stretch of a file with one digest.
pub(crate) struct Part<'a> {
    /// For messages.
    pub(crate) name: String,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// blake3 in hex.
    pub(crate) digest: &'a str,
}

/// The parts of a file in order. Of tensor files they are what follows the header; a text file is one part.
pub(crate) fn parts<'a>(manifest: &'a Manifest, entry: &'a FileEntry) -> Vec<Part<'a>> {
    let mut parts: Vec<Part<'a>> = if entry.file == TRUNK_FILE {
        let part = |tensor: &'a TensorEntry| Part {
            name: format!("tensor {}", tensor.name),
            offset: tensor.offset,
            bytes: tensor.bytes,
            digest: &tensor.blake3,
        };
        manifest.tensors.iter().map(part).collect()
    } else {
        let experts = manifest.experts.iter().filter(|expert| expert.file == entry.file);
        let part = |expert: &'a ExpertEntry| Part {
            name: schema::expert_name(expert.layer, expert.expert),
            offset: expert.offset,
            bytes: expert.bytes,
            digest: &expert.blake3,
        };
        experts.map(part).collect()
    };
    if parts.is_empty() {
        let (name, digest) = ("the file".to_owned(), entry.blake3.as_str());
        parts.push(Part { name, offset: 0, bytes: entry.bytes, digest });
    }
    parts.sort_by_key(|part| part.offset);
    parts
}
