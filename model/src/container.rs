//! An opened container: the only thing that coordinators and workers load.

mod open;
mod trunk;

use std::fs::File;
use std::path::{Path, PathBuf};

use shimmer_kernels::ExpertLayout;

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{ExpertEntry, Manifest};
use crate::schema;
pub use trunk::Trunk;

/// A container whose structure has been checked: manifest digest, sizes, headers, shapes, formats. The data of slabs and
/// tensors is checked when it is read.
///
/// Cheap to share: reads are positional and take `&self`.
#[derive(Debug)]
pub struct Container {
    directory: PathBuf,
    manifest: Manifest,
    /// By position of the layer among the model's layers.
    layers: Vec<Option<ExpertFile>>,
}

/// The experts of one layer.
#[derive(Debug)]
struct ExpertFile {
    path: PathBuf,
    layout: ExpertLayout,
    /// Place of expert 0 in the manifest's list; the others follow.
    first_entry: usize,
    experts: usize,
    /// `None` when the file is not in this directory.
    file: Option<File>,
}

impl Container {
    /// Opens a container directory. Layer files may be missing (a worker needs only what it serves), everything else
    /// must be there and agree.
    pub fn open(directory: &Path) -> Result<Self> {
        open::open(directory)
    }

    /// Compares the files of a directory with a manifest that is not in it yet.
    pub(crate) fn check(directory: &Path, manifest: &Manifest) -> Result<()> {
        open::check(directory, manifest).map(drop)
    }

    /// What the container holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.manifest.config
    }

    /// Identity of the container, in hex.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.manifest.digest
    }

    /// Where it is.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.directory
    }

    /// Loads the trunk into memory and checks the digest of every tensor.
    pub fn trunk(&self) -> Result<Trunk> {
        trunk::load(&self.directory, &self.manifest)
    }

    /// Layers whose expert file is not in this directory, ascending.
    #[must_use]
    pub fn absent_layers(&self) -> Vec<u32> {
        let absent =
            |file: &Option<ExpertFile>| file.as_ref().is_some_and(|file| file.file.is_none());
        (0u32..)
            .zip(&self.layers)
            .filter(|(_, file)| absent(file))
            .map(|(layer, _)| layer)
            .collect()
    }

    /// Layout of the experts of a layer that has some.
    pub fn expert_layout(&self, layer: u32) -> Result<ExpertLayout> {
        Ok(self.layer(layer)?.layout)
    }

    /// The manifest's entry of an expert.
    pub fn expert_entry(&self, layer: u32, expert: u32) -> Result<&ExpertEntry> {
        let file = self.layer(layer)?;
        let index = usize::try_from(expert).ok().filter(|&index| index < file.experts);
        let index =
            index.ok_or_else(|| self.no_such(format!("expert {expert} in layer {layer}")))?;
        Ok(&self.manifest.experts[file.first_entry + index])
    }

    /// The open file with the experts of a layer and its path, for readers that choose the call, the memory and the moment
    /// themselves. [`Error::AbsentLayer`] when it is not in this directory.
    pub fn expert_file(&self, layer: u32) -> Result<(&File, &Path)> {
        let place = self.layer(layer)?;
        match &place.file {
            Some(file) => Ok((file, &place.path)),
            None => Err(Error::AbsentLayer { file: place.path.clone(), layer }),
        }
    }

    /// Reads the slab of an expert and checks its digest. `out` has the length that the layout says.
    pub fn read_expert(&self, layer: u32, expert: u32, out: &mut [u8]) -> Result<()> {
        let entry = self.read_expert_unchecked(layer, expert, out)?;
        let found = blake3::hash(out).to_hex();
        if found.as_str() == entry.blake3 {
            return Ok(());
        }
        Err(Error::Digest {
            file: self.layer(layer)?.path.clone(),
            what: schema::expert_name(layer, expert),
            expected: entry.blake3.clone(),
            found: found.to_string(),
        })
    }

    /// Reads the slab of an expert without looking at its digest, for a caller that has checked it before.
    pub fn read_expert_unchecked(
        &self,
        layer: u32,
        expert: u32,
        out: &mut [u8],
    ) -> Result<&ExpertEntry> {
        let entry = self.expert_entry(layer, expert)?;
        let place = self.layer(layer)?;
        assert_eq!(
            out.len(),
            place.layout.slab_bytes(),
            "the buffer of a slab has the slab's length"
        );
        let (file, path) = self.expert_file(layer)?;
        files::read_exact_at(file, out, entry.offset).map_err(Error::io("reading", path))?;
        Ok(entry)
    }

    /// `tokenizer.json`, if the container has one.
    pub fn tokenizer_json(&self) -> Result<Option<Vec<u8>>> {
        self.text("tokenizer.json")
    }

    /// `tokenizer_config.json`, if the container has one.
    pub fn tokenizer_config(&self) -> Result<Option<Vec<u8>>> {
        self.text("tokenizer_config.json")
    }

    /// `generation_config.json`, if the container has one.
    pub fn generation_config(&self) -> Result<Option<Vec<u8>>> {
        self.text("generation_config.json")
    }

    /// The chat template: `chat_template.jinja`, else the string of that name in `tokenizer_config.json`.
    pub fn chat_template(&self) -> Result<Option<String>> {
        if let Some(bytes) = self.text("chat_template.jinja")? {
            return Ok(Some(String::from_utf8_lossy(&bytes).into_owned()));
        }
        let Some(bytes) = self.tokenizer_config()? else { return Ok(None) };
        let path = self.directory.join("tokenizer_config.json");
        let config: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(Error::json(&path))?;
        Ok(config.get("chat_template").and_then(serde_json::Value::as_str).map(str::to_owned))
    }

    /// Reads a text file that the manifest lists, and checks its digest.
    fn text(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(entry) = self.manifest.files.iter().find(|entry| entry.file == name) else {
            return Ok(None);
        };
        let path = self.directory.join(name);
        let bytes = files::read_small(&path)?;
        let found = blake3::hash(&bytes).to_hex();
        if found.as_str() != entry.blake3 {
            let expected = entry.blake3.clone();
            return Err(Error::Digest {
                file: path,
                what: "the file".to_owned(),
                expected,
                found: found.to_string(),
            });
        }
        Ok(Some(bytes))
    }

    fn layer(&self, layer: u32) -> Result<&ExpertFile> {
        let file = usize::try_from(layer)
            .ok()
            .and_then(|index| self.layers.get(index))
            .and_then(Option::as_ref);
        file.ok_or_else(|| self.no_such(format!("layer {layer} with experts")))
    }

    fn no_such(&self, what: String) -> Error {
        Error::NoSuch { place: self.directory.clone(), what }
    }
}

#[cfg(test)]
mod tests;
