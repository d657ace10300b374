//! Tiny containers for the unit tests of this crate.

use std::sync::Arc;

use shimmer_kernels::WeightFormat;
use shimmer_model::{
    Container, ConvertOptions, NumericClass, convert,
    tiny::{self, Preset, TinyOptions},
};
use tempfile::TempDir;

/// A container of a tiny checkpoint, and the directory that it lives in.
pub(crate) fn container(preset: Preset, format: WeightFormat) -> (TempDir, Arc<Container>) {
    let dir = TempDir::new().unwrap();
    let (source, out) = (dir.path().join("checkpoint"), dir.path().join("container"));
    tiny::write_checkpoint(preset, &TinyOptions::default(), &source).unwrap();
    let class = NumericClass { experts: format, ..NumericClass::default() };
    convert(&ConvertOptions { source, out: out.clone(), class, name: None }, &()).unwrap();
    let container = Container::open(&out).unwrap();
    (dir, Arc::new(container))
}
