//! Opening: everything that can be checked without reading the data.

use std::path::{Component, Path};

use super::{Container, ExpertFile};
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{ExpertEntry, FileEntry, MANIFEST_FILE, Manifest};
use crate::safetensors::{DType, TensorFile};
use crate::schema::{self, TEXT_FILES, TRUNK_FILE};

const AGAIN: &str = "the container is damaged: restore it or convert again";

pub(super) fn open(directory: &Path) -> Result<Container> {
    let manifest = Manifest::read(directory)?;
    let layers = check(directory, &manifest)?;
    Ok(Container { directory: directory.to_path_buf(), manifest, layers })
}

/// Compares a manifest with the files of its directory.
pub(super) fn check(directory: &Path, manifest: &Manifest) -> Result<Vec<Option<ExpertFile>>> {
    let check = Check { directory, manifest };
    check.config()?;
    check.text_files()?;
    check.trunk()?;
    check.layers()
}

struct Check<'a> {
    directory: &'a Path,
    manifest: &'a Manifest,
}

impl Check<'_> {
    fn refuse(&self, problem: String) -> Error {
        Error::Manifest { file: self.directory.join(MANIFEST_FILE), problem, hint: AGAIN }
    }

    fn config(&self) -> Result<()> {
        match self.manifest.config.fault() {
            Some(fault) => Err(self.refuse(fault)),
            None => Ok(()),
        }
    }

    /// The manifest's entry of a file; every file that is opened has one.
    fn entry(&self, name: &str) -> Result<&FileEntry> {
        let entry = self.manifest.files.iter().find(|entry| entry.file == name);
        entry.ok_or_else(|| self.refuse(format!("file {name} has no entry")))
    }

    fn text_files(&self) -> Result<()> {
        let mut names: Vec<&str> =
            self.manifest.files.iter().map(|entry| entry.file.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.refuse(format!("file {} has two entries", twice[0])));
        }
        for entry in &self.manifest.files {
            let plain = Path::new(&entry.file)
                .components()
                .all(|part| matches!(part, Component::Normal(_)));
            if !plain || entry.file.is_empty() {
                return Err(
                    self.refuse(format!("file name {:?} leads out of the container", entry.file))
                );
            }
            if TEXT_FILES.contains(&entry.file.as_str()) {
                let path = self.directory.join(&entry.file);
                if !path.is_file() {
                    let hint =
                        "the container is not whole: copy it again or convert again".to_owned();
                    return Err(Error::MissingFile { path, hint });
                }
                let file = files::open(&path)?;
                self.length(&path, files::length(&file, &path)?, entry)?;
            }
        }
        Ok(())
    }

    fn length(&self, path: &Path, found: u64, entry: &FileEntry) -> Result<()> {
        if found == entry.bytes {
            return Ok(());
        }
        let hint = "the manifest has another length: copy the file again or convert again";
        Err(Error::FileLength { file: path.to_path_buf(), expected: entry.bytes, found, hint })
    }

    /// Opens a tensor file and compares its length and header with the manifest.
    fn tensor_file(&self, name: &str) -> Result<TensorFile> {
        let entry = self.entry(name)?;
        let path = self.directory.join(name);
        if !path.is_file() {
            let hint = "the container is not whole: copy it again or convert again".to_owned();
            return Err(Error::MissingFile { path, hint });
        }
        // The length first: a file that is cut short is better told by the manifest than by its header.
        let found = files::length(&files::open(&path)?, &path)?;
        self.length(&path, found, entry)?;
        let file = TensorFile::open(&path)?;
        let found = file.header().digest().to_hex();
        if found.as_str() != entry.blake3 {
            let expected = entry.blake3.clone();
            return Err(Error::Digest {
                file: path,
                what: "the header".to_owned(),
                expected,
                found: found.to_string(),
            });
        }
        Ok(file)
    }

    fn trunk(&self) -> Result<()> {
        let expected = schema::trunk_tensors(&self.manifest.config, &self.manifest.numeric_class);
        let file = self.tensor_file(TRUNK_FILE)?;
        if let Some((wanted, found)) = expected
            .iter()
            .zip(&self.manifest.tensors)
            .find(|(wanted, found)| wanted.name != found.name)
        {
            return Err(
                self.refuse(format!("tensor {} stands where {} should", found.name, wanted.name))
            );
        }
        if expected.len() != self.manifest.tensors.len() {
            let (found, wanted) = (self.manifest.tensors.len(), expected.len());
            return Err(
                self.refuse(format!("{found} tensors in the trunk, the model has {wanted}"))
            );
        }
        if file.header().tensors().count() != expected.len() {
            return Err(self.refuse(format!(
                "{TRUNK_FILE} does not have the tensors that the manifest lists"
            )));
        }
        for (wanted, entry) in expected.iter().zip(&self.manifest.tensors) {
            let name = &entry.name;
            if wanted.shape != entry.shape {
                let (found, wanted) = (&entry.shape, &wanted.shape);
                return Err(self.refuse(format!(
                    "tensor {name} has shape {found:?}, the model has {wanted:?}"
                )));
            }
            if wanted.format != entry.format {
                let (found, wanted) = (entry.format, wanted.format);
                return Err(self.refuse(format!(
                    "tensor {name} is stamped {found}, the numeric class has {wanted}"
                )));
            }
            if wanted.stored_bytes()? != entry.bytes {
                let wanted = wanted.stored_bytes()?;
                return Err(self.refuse(format!(
                    "tensor {name} has {} bytes, its format needs {wanted}",
                    entry.bytes
                )));
            }
            let vector = entry.shape.len() == 1;
            let dtype = if vector { DType::F32 } else { DType::U8 };
            self.place(&file, TRUNK_FILE, name, dtype, (&entry.file, entry.offset, entry.bytes))?;
        }
        Ok(())
    }

    /// Compares the place of a tensor in the manifest with the header of the file.
    fn place(
        &self,
        file: &TensorFile,
        file_name: &str,
        tensor: &str,
        dtype: DType,
        (entry_file, offset, bytes): (&str, u64, u64),
    ) -> Result<()> {
        let Some(info) = file.header().get(tensor) else {
            return Err(self.refuse(format!("{file_name} does not have tensor {tensor}")));
        };
        let at = file.header().data_start() + info.start();
        if entry_file != file_name || offset != at || bytes != info.bytes() || info.dtype != dtype {
            let found = format!("{} bytes of {} at {at} of {file_name}", info.bytes(), info.dtype);
            return Err(self.refuse(format!(
                "tensor {tensor} is {bytes} bytes of {dtype} at {offset} of {entry_file}, its header says {found}"
            )));
        }
        Ok(())
    }

    fn layers(&self) -> Result<Vec<Option<ExpertFile>>> {
        let Manifest { config, numeric_class, experts, .. } = self.manifest;
        let mut next = 0;
        let mut layers = Vec::with_capacity(config.layers.len());
        for layer in (0u32..).take(config.layers.len()) {
            let Some(layout) = schema::expert_layout(config, numeric_class, layer)? else {
                layers.push(None);
                continue;
            };
            let count = config.experts(layer) as usize;
            let entries = experts.get(next..next + count).ok_or_else(|| {
                self.refuse(format!("experts of layer {layer} are not all listed"))
            })?;
            let name = schema::expert_file(layer);
            self.experts(layer, entries, layout.slab_bytes() as u64)?;
            let path = self.directory.join(&name);
            let file =
                if path.exists() { Some(self.expert_file(&name, layer, entries)?) } else { None };
            layers.push(Some(ExpertFile { path, layout, first_entry: next, experts: count, file }));
            next += count;
        }
        if next != experts.len() {
            return Err(
                self.refuse(format!("{} experts listed, the model has {next}", experts.len()))
            );
        }
        Ok(layers)
    }

    /// Entries of one layer: in order, aligned, of the length that the layout has.
    fn experts(&self, layer: u32, entries: &[ExpertEntry], slab_bytes: u64) -> Result<()> {
        let name = schema::expert_file(layer);
        self.entry(&name)?;
        for (expert, entry) in (0u32..).zip(entries) {
            if (entry.layer, entry.expert, entry.file.as_str()) != (layer, expert, name.as_str()) {
                let found =
                    format!("expert {} of layer {} in {}", entry.expert, entry.layer, entry.file);
                return Err(self.refuse(format!(
                    "{found} stands where expert {expert} of layer {layer} should"
                )));
            }
            if entry.bytes != slab_bytes {
                let found = entry.bytes;
                return Err(self.refuse(format!(
                    "expert {expert} of layer {layer} has {found} bytes, its format needs {slab_bytes}"
                )));
            }
            if entry.offset % 4096 != 0 {
                let found = entry.offset;
                return Err(self.refuse(format!(
                    "expert {expert} of layer {layer} begins at {found}, off page"
                )));
            }
        }
        Ok(())
    }

    fn expert_file(
        &self,
        name: &str,
        layer: u32,
        entries: &[ExpertEntry],
    ) -> Result<std::fs::File> {
        let file = self.tensor_file(name)?;
        if file.header().tensors().count() != entries.len() {
            return Err(
                self.refuse(format!("{name} does not have the experts that the manifest lists"))
            );
        }
        for entry in entries {
            let tensor = schema::expert_name(layer, entry.expert);
            self.place(&file, name, &tensor, DType::U8, (&entry.file, entry.offset, entry.bytes))?;
        }
        files::open(file.path())
    }
}
