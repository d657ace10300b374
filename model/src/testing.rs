//! Checkpoints to break, for the tests of this crate.

use std::path::Path;

use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::class::NumericClass;
use crate::error::Result;
use crate::plan::Plan;
use crate::safetensors::{DType, HeaderEntry, TensorFile, TensorWriter};
use crate::tiny::{Preset, TinyOptions, write_checkpoint};

/// A tensor with its data.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// A tiny checkpoint in a directory of its own.
pub(crate) fn checkpoint(preset: Preset, options: &TinyOptions) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    write_checkpoint(preset, options, directory.path()).unwrap();
    directory
}

/// The same in three files with an index.
pub(crate) fn sharded(preset: Preset) -> TempDir {
    checkpoint(preset, &TinyOptions { shards: 3, ..TinyOptions::default() })
}

pub(crate) fn shard(number: usize) -> String {
    format!("model-{number:05}-of-00003.safetensors")
}

pub(crate) const INDEX: &str = "model.safetensors.index.json";

pub(crate) fn load(path: &Path) -> Vec<Stored> {
    let file = TensorFile::open(path).unwrap();
    let read = |(name, info): (&str, &crate::safetensors::TensorInfo)| {
        let mut bytes = vec![0; usize::try_from(info.bytes()).unwrap()];
        file.read(info, 0, &mut bytes).unwrap();
        Stored { name: name.to_owned(), dtype: info.dtype, shape: info.shape.clone(), bytes }
    };
    file.header().tensors().map(read).collect()
}

pub(crate) fn store(path: &Path, tensors: &[Stored]) {
    let entry = |tensor: &Stored| HeaderEntry {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
    };
    let entries: Vec<HeaderEntry> = tensors.iter().map(entry).collect();
    let mut writer = TensorWriter::create(path, &entries).unwrap();
    for tensor in tensors {
        writer.write(&tensor.bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// Changes the tensors of a file.
pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Vec<Stored>)) {
    let mut tensors = load(path);
    change(&mut tensors);
    store(path, &tensors);
}

/// Changes one tensor of a file.
pub(crate) fn edit_tensor(path: &Path, name: &str, change: impl FnOnce(&mut Stored)) {
    edit(path, |tensors| {
        change(tensors.iter_mut().find(|tensor| tensor.name == name).expect("the tensor exists"))
    });
}

/// Changes a JSON object file.
pub(crate) fn edit_json(path: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let mut map: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut map);
    std::fs::write(path, serde_json::to_vec(&map).unwrap()).unwrap();
}

/// Changes the weight map of an index.
pub(crate) fn edit_index(directory: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    edit_json(&directory.join(INDEX), |index| change(index["weight_map"].as_object_mut().unwrap()));
}

/// Reads a checkpoint as a conversion does before it writes anything.
pub(crate) fn plan(directory: &Path) -> Result<Plan> {
    Plan::make(directory, &NumericClass::default())
}

/// The checkpoint is refused, and the message holds all of `fragments`.
pub(crate) fn check_refused(directory: &Path, fragments: &[&str]) {
    let text = plan(directory).expect_err("the checkpoint must be refused").to_string();
    check_text(&text, fragments);
}

/// The checkpoint is read, and one warning holds all of `fragments`.
pub(crate) fn check_warned(directory: &Path, fragments: &[&str]) {
    let warnings = plan(directory).expect("the checkpoint must be read").warnings;
    let found =
        warnings.iter().any(|warning| fragments.iter().all(|fragment| warning.contains(fragment)));
    assert!(found, "no warning with {fragments:?} in {warnings:#?}");
}

pub(crate) fn check_text(text: &str, fragments: &[&str]) {
    for fragment in fragments {
        assert!(text.contains(fragment), "{fragment:?} is not in: {text}");
    }
}
