//! A Hugging Face checkpoint directory: which files count, which tensors they hold, and reading them as f32.
//!
//! Everything structural is checked when the checkpoint is opened: all files that the index names are there and whole,
//! headers and index agree, no tensor is there twice. Nothing is computed from a checkpoint that is not whole.

mod read;
mod shards;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) use read::{Fp8Scales, TensorReader};

use crate::error::{Error, MissingCase, Result};
use crate::files;
use crate::safetensors::{TensorFile, TensorInfo};
use crate::schema::TEXT_FILES;

/// Hint of errors about a directory whose files do not belong together.
pub(crate) const DOWNLOAD_AGAIN: &str = "download the checkpoint again into an empty directory";

/// An opened checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    directory: PathBuf,
    files: Vec<TensorFile>,
    /// File of each tensor.
    tensors: BTreeMap<String, usize>,
    /// File name of the index, if there is one.
    index: Option<String>,
    /// Names that the index sends to a file whose header lacks them, with that file.
    unfulfilled: BTreeMap<String, String>,
    warnings: Vec<String>,
}

impl Checkpoint {
    /// Opens the files that count and compares them with the index.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let found = shards::find(directory)?;
        let mut warnings = found.warnings;
        let mut files = Vec::with_capacity(found.files.len());
        for name in &found.files {
            files.push(TensorFile::open(&directory.join(name))?);
        }
        let tensors = collect(&files)?;
        let mut unfulfilled = BTreeMap::new();
        if let Some(index) = &found.index {
            for (tensor, file) in &index.weight_map {
                match tensors.get(tensor) {
                    Some(&at) if found.files[at] == *file => {}
                    Some(&at) => {
                        return Err(Error::IndexMismatch {
                            index: index.name.clone(),
                            tensor: tensor.clone(),
                            file: file.clone(),
                            found: format!("it is in {}", found.files[at]),
                            hint: DOWNLOAD_AGAIN,
                        });
                    }
                    None => {
                        unfulfilled.insert(tensor.clone(), file.clone());
                    }
                }
            }
            let extra: Vec<&String> =
                tensors.keys().filter(|name| !index.weight_map.contains_key(*name)).collect();
            if let Some(first) = extra.first() {
                warnings.push(format!(
                    "{}: {} tensors are in the files but not in the index, first {first}; they are used",
                    index.name,
                    extra.len()
                ));
            }
        }
        let index = found.index.map(|index| index.name);
        Ok(Self {
            directory: directory.to_path_buf(),
            files,
            tensors,
            index,
            unfulfilled,
            warnings,
        })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Strays and disagreements that do not stop the reading.
    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// All tensors by name.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &TensorFile, &TensorInfo)> {
        self.tensors.iter().map(|(name, &at)| {
            let file = &self.files[at];
            (
                name.as_str(),
                file,
                file.header().get(name).expect("the map was made from the headers"),
            )
        })
    }

    pub(crate) fn find(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let file = &self.files[*self.tensors.get(name)?];
        Some((file, file.header().get(name)?))
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor that the model cannot do without; the error says in which of three ways it is missing.
    pub(crate) fn require(&self, name: &str, hint: &str) -> Result<(&TensorFile, &TensorInfo)> {
        self.find(name).ok_or_else(|| self.missing(name, hint))
    }

    pub(crate) fn missing(&self, name: &str, hint: &str) -> Error {
        let case = match (&self.index, self.unfulfilled.get(name)) {
            (Some(index), Some(file)) => {
                MissingCase::HeaderLacksIt { index: index.clone(), file: file.clone() }
            }
            (Some(index), None) => MissingCase::NotInIndex { index: index.clone() },
            (None, _) => {
                let file =
                    self.files.first().and_then(|file| file.path().file_name()).unwrap_or_default();
                MissingCase::NotInFile { file: file.to_string_lossy().into_owned() }
            }
        };
        Error::MissingTensor {
            place: self.directory.clone(),
            tensor: name.to_owned(),
            case,
            hint: hint.to_owned(),
        }
    }

    /// Names that the index promises and no header has.
    pub(crate) fn unfulfilled(&self) -> impl Iterator<Item = &str> {
        self.unfulfilled.keys().map(String::as_str)
    }

    /// Identifies the configuration, the text files, names, types, shapes and places of all tensors, and a sample of the
    /// data of each: enough to tell a checkpoint from a fine-tuned sibling with the same headers, and from itself with
    /// another tokenizer or chat template.
    pub(crate) fn fingerprint(&self) -> Result<String> {
        const SAMPLE_BYTES: usize = 64;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&files::read_small(&self.directory.join("config.json"))?);
        for name in TEXT_FILES {
            let path = self.directory.join(name);
            if path.is_file() {
                let text = files::read_small(&path)?;
                hasher.update(format!("{name} {}\n", text.len()).as_bytes());
                hasher.update(&text);
            }
        }
        for file in &self.files {
            hasher.update(file.header().digest().as_bytes());
        }
        for (_, file, info) in self.tensors() {
            let size = info.bytes().min(SAMPLE_BYTES as u64);
            let mut sample = [0; SAMPLE_BYTES];
            let sample = &mut sample[..usize::try_from(size).expect("a sample is small")];
            file.read(info, (info.bytes() - size) / 2, sample)?;
            hasher.update(sample);
        }
        Ok(hasher.finalize().to_hex().to_string())
    }
}

/// The file of every tensor; a name in two files is refused.
fn collect(files: &[TensorFile]) -> Result<BTreeMap<String, usize>> {
    let name_of =
        |at: usize| files[at].path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut tensors = BTreeMap::new();
    for (at, file) in files.iter().enumerate() {
        for (name, _) in file.header().tensors() {
            if let Some(first) = tensors.insert(name.to_owned(), at) {
                let (first, second) = (name_of(first), name_of(at));
                return Err(Error::DuplicateTensor { tensor: name.to_owned(), first, second });
            }
        }
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests;
