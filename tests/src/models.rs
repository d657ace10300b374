//! Checkpoints and containers made for one test.

use std::path::{Path, PathBuf};

use shimmer_model::{
    ConvertOptions, NumericClass, convert,
    tiny::{Preset, TinyOptions, write_checkpoint},
};
use tempfile::TempDir;

/// A tiny checkpoint and the containers made of it; they vanish when it is dropped.
#[derive(Debug)]
pub struct TinyModel {
    directory: TempDir,
}

impl TinyModel {
    /// The checkpoint of a preset.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn new(preset: Preset) -> Self {
        Self::with_options(preset, &TinyOptions::default())
    }

    /// A variation of a preset's checkpoint.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn with_options(preset: Preset, options: &TinyOptions) -> Self {
        let directory = TempDir::new().expect("a temporary directory can be made");
        let model = Self { directory };
        write_checkpoint(preset, options, &model.checkpoint())
            .expect("a tiny checkpoint can be written");
        model
    }

    /// The Hugging Face directory.
    pub fn checkpoint(&self) -> PathBuf {
        self.directory.path().join("checkpoint")
    }

    /// Its container in a numeric class, converted at the first call.
    ///
    /// # Panics
    /// The conversion fails.
    pub fn container(&self, class: NumericClass) -> PathBuf {
        let name = class.to_string().replace(['/', ' '], "-");
        make_container(&self.checkpoint(), &self.directory.path().join(name), class)
    }
}

/// Converts a checkpoint unless the container is there already.
///
/// # Panics
/// The conversion fails.
pub fn make_container(checkpoint: &Path, out: &Path, class: NumericClass) -> PathBuf {
    let options =
        ConvertOptions { source: checkpoint.to_owned(), out: out.to_owned(), class, name: None };
    match convert(&options, &()) {
        Ok(_) => out.to_owned(),
        Err(error) => panic!("cannot convert {}: {error}", checkpoint.display()),
    }
}
