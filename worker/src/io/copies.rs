//! The copies of the container that slabs are read from.

use std::{
    fs::File,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use shimmer_model::Container;

use super::{
    files::{DirectFile, NotDirect, network_file_system},
    mirrors::Health,
};
use crate::Error;

/// One directory with the container, or with some of its layers.
#[derive(Debug)]
pub(super) struct Copy {
    container: Arc<Container>,
    weight: u32,
    pub(super) health: Health,
    /// By layer; none for a layer whose file is not here.
    layers: Vec<Option<Layer>>,
    /// Files that can only be read through the page cache although more was asked for.
    pub(super) not_direct: u64,
}

#[derive(Debug)]
struct Layer {
    direct: Option<DirectFile>,
    /// Experts whose bytes were as the manifest says.
    checked: Experts,
    /// Experts whose bytes were not.
    damaged: Experts,
}

/// One bit for each expert of a layer.
#[derive(Debug)]
struct Experts(Box<[AtomicU64]>);

impl Experts {
    fn none(count: u32) -> Self {
        Self((0..count.div_ceil(u64::BITS)).map(|_| AtomicU64::new(0)).collect())
    }

    fn has(&self, expert: u32) -> bool {
        let (word, bit) = Self::place(expert);
        self.0[word].load(Relaxed) & bit != 0
    }

    fn add(&self, expert: u32) {
        let (word, bit) = Self::place(expert);
        self.0[word].fetch_or(bit, Relaxed);
    }

    fn place(expert: u32) -> (usize, u64) {
        ((expert / u64::BITS) as usize, 1 << (expert % u64::BITS))
    }
}

impl Copy {
    /// Takes the files of a container; with `direct` also opens them past the page cache.
    pub(super) fn new(container: Arc<Container>, weight: u32, direct: bool) -> Result<Self, Error> {
        let config = container.config();
        let mut layers = Vec::with_capacity(config.layers.len());
        let (mut not_direct, mut reason): (u64, Option<NotDirect>) = (0, None);
        for layer in (0u32..).take(config.layers.len()) {
            let Ok((_, path)) = container.expert_file(layer) else {
                layers.push(None);
                continue;
            };
            let file = if direct { open_direct(path)? } else { None };
            let direct = match file {
                Some(Err(refusal)) => {
                    not_direct += 1;
                    reason.get_or_insert(refusal);
                    None
                }
                Some(Ok(file)) => Some(file),
                None => None,
            };
            let none = || Experts::none(config.experts(layer));
            layers.push(Some(Layer { direct, checked: none(), damaged: none() }));
        }
        if let Some(reason) = reason {
            tracing::warn!(
                directory = %container.dir().display(), files = not_direct, %reason,
                "layer files are read through the page cache"
            );
        }
        advise_on_network(&container);
        Ok(Self { container, weight, health: Health::default(), layers, not_direct })
    }

    pub(super) fn dir(&self) -> &Path {
        self.container.dir()
    }

    pub(super) fn weight(&self) -> u32 {
        self.weight
    }

    fn layer(&self, layer: u32) -> Option<&Layer> {
        self.layers.get(usize::try_from(layer).ok()?)?.as_ref()
    }

    /// Whether the file of a layer is here.
    pub(super) fn has(&self, layer: u32) -> bool {
        self.layer(layer).is_some()
    }

    /// The file of a layer that is read past the page cache, unless it cannot be.
    pub(super) fn direct(&self, layer: u32) -> Option<&DirectFile> {
        self.layer(layer)?.direct.as_ref()
    }

    /// The handle for reads through the page cache, and its path.
    pub(super) fn buffered(&self, layer: u32) -> (&File, &Path) {
        self.container.expert_file(layer).expect("only layers that are here are read")
    }

    /// Whether an expert's bytes in this copy were compared with the manifest, and equal.
    pub(super) fn is_checked(&self, layer: u32, expert: u32) -> bool {
        self.layer(layer).is_some_and(|layer| layer.checked.has(expert))
    }

    /// Whether they were compared and differed: then this copy of the slab is asked last.
    pub(super) fn is_damaged(&self, layer: u32, expert: u32) -> bool {
        self.layer(layer).is_some_and(|layer| layer.damaged.has(expert))
    }

    /// Remembers a comparison.
    pub(super) fn set_checked(&self, layer: u32, expert: u32, equal: bool) {
        let layer = self.layer(layer).expect("only layers that are here are read");
        if equal { layer.checked.add(expert) } else { layer.damaged.add(expert) }
    }
}

fn open_direct(path: &Path) -> Result<Option<Result<DirectFile, NotDirect>>, Error> {
    let file = DirectFile::open(path);
    file.map(Some).map_err(|source| Error::OpenDirect { file: path.to_path_buf(), source })
}

/// Says once that slabs come over a network.
fn advise_on_network(container: &Container) {
    let first = (0u32..).take(container.config().layers.len());
    let Some((file, _)) = first.filter_map(|layer| container.expert_file(layer).ok()).next() else {
        return;
    };
    if let Some(file_system) = network_file_system(file) {
        tracing::warn!(
            directory = %container.dir().display(), file_system,
            "experts are read over a network file system; `shimmer mirror stage` copies them to a local drive, and \
             `--mirror` reads them from there"
        );
    }
}
