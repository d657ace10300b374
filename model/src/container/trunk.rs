//! The trunk in memory: one arena of huge pages. A lazily faulting file mapping would halve the speed of the first
//! products, and its pages could vanish under memory pressure.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use shimmer_kernels::{Arena, Matrix, MatrixLayout};

use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{Manifest, TensorEntry};
use crate::schema::{self, TRUNK_FILE};

/// Everything but the routed experts, checked and in memory.
pub struct Trunk {
    path: PathBuf,
    arena: Arena,
    tensors: BTreeMap<String, Place>,
}

/// Where a tensor lies in the arena.
#[derive(Debug, Clone, Copy)]
struct Place {
    start: usize,
    bytes: usize,
    /// `None` for a vector.
    layout: Option<MatrixLayout>,
}

impl fmt::Debug for Trunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trunk")
            .field("path", &self.path)
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

pub(super) fn load(directory: &Path, manifest: &Manifest) -> Result<Trunk> {
    let path = directory.join(TRUNK_FILE);
    let file = files::open(&path)?;
    let mut tensors = BTreeMap::new();
    let mut total = 0;
    for (tensor, entry) in schema::trunk_tensors(&manifest.config, &manifest.numeric_class)
        .into_iter()
        .zip(&manifest.tensors)
    {
        let bytes =
            usize::try_from(entry.bytes).expect("opening compared it with a layout in memory");
        let layout = tensor.layout()?;
        tensors.insert(tensor.name, Place { start: total, bytes, layout });
        total += bytes;
    }
    let mut arena = Arena::new(total).map_err(Error::io("making room in memory for", &path))?;
    let mut rest = arena.as_mut_slice();
    let mut parts: Vec<(&TensorEntry, &mut [u8])> = Vec::with_capacity(manifest.tensors.len());
    for entry in &manifest.tensors {
        let bytes = usize::try_from(entry.bytes).expect("checked above");
        let (part, tail) = rest.split_at_mut(bytes);
        parts.push((entry, part));
        rest = tail;
    }
    parts.into_par_iter().try_for_each(|(entry, part)| {
        files::read_exact_at(&file, part, entry.offset).map_err(Error::io("reading", &path))?;
        let found = blake3::hash(part).to_hex();
        if found.as_str() == entry.blake3 {
            return Ok(());
        }
        let what = format!("tensor {}", entry.name);
        Err(Error::Digest {
            file: path.clone(),
            what,
            expected: entry.blake3.clone(),
            found: found.to_string(),
        })
    })?;
    Ok(Trunk { path, arena, tensors })
}

impl Trunk {
    /// A matrix by its canonical name.
    pub fn matrix(&self, name: &str) -> Result<Matrix<'_>> {
        let place = self.place(name)?;
        let Some(layout) = place.layout else { return Err(self.no_such(name, "matrix")) };
        let bytes = &self.bytes(place)[..layout.total_bytes()];
        Matrix::from_bytes(layout, bytes).map_err(Error::layout(name))
    }

    /// A vector by its canonical name.
    pub fn vector(&self, name: &str) -> Result<&[f32]> {
        let place = self.place(name)?;
        if place.layout.is_some() {
            return Err(self.no_such(name, "vector"));
        }
        Ok(bytemuck::cast_slice(self.bytes(place)))
    }

    /// Whether there is a tensor of this name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Bytes held in memory.
    #[must_use]
    pub fn bytes_held(&self) -> usize {
        self.tensors.values().map(|place| place.bytes).sum()
    }

    fn bytes(&self, place: Place) -> &[u8] {
        &self.arena.as_slice()[place.start..place.start + place.bytes]
    }

    fn place(&self, name: &str) -> Result<Place> {
        self.tensors.get(name).copied().ok_or_else(|| self.no_such(name, "tensor"))
    }

    fn no_such(&self, name: &str, kind: &str) -> Error {
        Error::NoSuch { place: self.path.clone(), what: format!("{kind} {name}") }
    }
}
