//! Bits that flip in the memory of a running process.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
};

use shimmer_model::Container;

/// Slabs lie at multiples of this.
const ALIGNMENT: usize = 64;
/// So many bytes of a slab are compared to find it.
const COMPARED: usize = 64;
/// What is read of a process at a time.
const PIECE: usize = 4 << 20;

/// Where bytes of experts lie in the memory of a process.
#[derive(Debug)]
pub struct Weights {
    memory: File,
    /// Address of a byte in each slab that was found.
    places: Vec<u64>,
}

impl Weights {
    /// Finds every expert that a process holds in its own memory, by content.
    ///
    /// # Panics
    /// The container cannot be read, or the process is not ours to look into.
    pub fn find(pid: u32, container: &Container) -> Self {
        let beginnings = beginnings(container);
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .expect("the memory of a child can be opened");
        let mut places = Vec::new();
        let mut piece = vec![0; PIECE];
        for (start, end) in regions(pid).expect("the regions of a child can be listed") {
            let mut at = start;
            while at < end {
                let length = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
                let piece = &mut piece[..length];
                // A region may be gone, or never have been touched.
                if memory.read_exact_at(piece, at).is_ok() {
                    let found = piece.chunks(ALIGNMENT).enumerate().filter(|(_, chunk)| {
                        beginnings.binary_search_by(|b| b[..].cmp(chunk)).is_ok()
                    });
                    places.extend(found.map(|(index, _)| at + (index * ALIGNMENT) as u64));
                }
                at += length as u64;
            }
        }
        Self { memory, places }
    }

    /// Number of slabs that were found.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether none was found.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Flips one bit of each; false for those of a process that has ended.
    pub fn flip(&self) -> bool {
        let flip = |&place: &u64| -> io::Result<()> {
            let mut byte = [0];
            self.memory.read_exact_at(&mut byte, place)?;
            self.memory.write_all_at(&[byte[0] ^ 0x40], place)
        };
        self.places.iter().all(|place| flip(place).is_ok())
    }
}

/// The first bytes of every expert, in order.
fn beginnings(container: &Container) -> Vec<[u8; COMPARED]> {
    let mut all = Vec::new();
    for (layer, experts) in container.config().moe_layers() {
        let (file, path) = container.expert_file(layer).expect("the container is whole");
        for expert in 0..experts {
            let entry = container.expert_entry(layer, expert).expect("the layer has the expert");
            let mut bytes = [0; COMPARED];
            file.read_exact_at(&mut bytes, entry.offset)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            all.push(bytes);
        }
    }
    all.sort_unstable();
    all
}

/// Private memory of a process that can be written to and belongs to no file.
fn regions(pid: u32) -> io::Result<Vec<(u64, u64)>> {
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        let (range, rights) = (fields.next()?, fields.next()?);
        let inode = fields.nth(2)?;
        let (start, end) = range.split_once('-')?;
        let address = |text| u64::from_str_radix(text, 16).ok();
        (rights == "rw-p" && inode == "0").then_some((address(start)?, address(end)?))
    };
    Ok(fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().filter_map(parse).collect())
}
