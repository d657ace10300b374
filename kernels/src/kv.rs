//! Pages of the key and value cache.
//!
//! A page holds 64 positions of one layer: for each kv head the keys as `[4 blocks of 16 positions][head_dim][16]`, then
//! the values as `[64 positions][head_dim]`. Keys lie transposed because a score needs one lane per position.

use half::{bf16, f16};

use crate::{BLOCK_ROWS, KvFormat};

/// Positions of one page.
pub const PAGE_POSITIONS: usize = 64;

/// Positions that attention sums before it folds, aligned to position 0: four pages.
pub const ATTENTION_BLOCK: usize = 256;

/// The shape of one layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Element type.
    pub format: KvFormat,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

/// Where page `i` of a layer lies in the cache's bytes: at `i * stride + offset`. The caller chooses whether pages of all
/// layers lie together or each layer has a run of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagePlace {
    /// Bytes from one page to the next.
    pub stride: usize,
    /// Bytes before the first page of this layer.
    pub offset: usize,
}

impl KvLayout {
    /// Bytes of one page of one layer, all heads, keys and values.
    pub const fn page_bytes(&self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    /// Bytes of one head in a page: keys, then values.
    pub(crate) const fn head_bytes(&self) -> usize {
        2 * PAGE_POSITIONS * self.head_dim * self.format.element_bytes()
    }

    /// The bytes of page `page`.
    pub fn page<'a>(&self, bytes: &'a [u8], place: PagePlace, page: u32) -> &'a [u8] {
        let start = page as usize * place.stride + place.offset;
        &bytes[start..start + self.page_bytes()]
    }

    /// The bytes of page `page`, to write.
    pub fn page_mut<'a>(&self, bytes: &'a mut [u8], place: PagePlace, page: u32) -> &'a mut [u8] {
        let start = page as usize * place.stride + place.offset;
        &mut bytes[start..start + self.page_bytes()]
    }

    /// Keys and values of one head within a page's bytes.
    pub(crate) fn head<'a>(&self, page: &'a [u8], kv_head: usize) -> (&'a [u8], &'a [u8]) {
        let head = &page[kv_head * self.head_bytes()..][..self.head_bytes()];
        head.split_at(self.head_bytes() / 2)
    }

    /// Element index of a key within a head's keys.
    pub(crate) const fn key_index(&self, slot: usize, dim: usize) -> usize {
        ((slot / BLOCK_ROWS) * self.head_dim + dim) * BLOCK_ROWS + slot % BLOCK_ROWS
    }

    /// Stores the key and value of one position and head, rounded to the format. `slot` is the position modulo 64.
    pub fn store(&self, page: &mut [u8], slot: usize, kv_head: usize, key: &[f32], value: &[f32]) {
        assert!(slot < PAGE_POSITIONS, "slot {slot} of a page of {PAGE_POSITIONS}");
        assert_eq!(key.len(), self.head_dim, "a key has head_dim elements");
        assert_eq!(value.len(), self.head_dim, "a value has head_dim elements");
        let head = &mut page[kv_head * self.head_bytes()..][..self.head_bytes()];
        let (keys, values) = head.split_at_mut(self.head_bytes() / 2);
        for (dim, x) in key.iter().enumerate() {
            write_element(self.format, keys, self.key_index(slot, dim), *x);
        }
        for (dim, x) in value.iter().enumerate() {
            write_element(self.format, values, slot * self.head_dim + dim, *x);
        }
    }
}

/// Rounds half to even into the format.
#[inline(always)]
fn write_element(format: KvFormat, bytes: &mut [u8], index: usize, x: f32) {
    match format {
        KvFormat::F32 => bytes[index * 4..][..4].copy_from_slice(&x.to_le_bytes()),
        KvFormat::F16 => bytes[index * 2..][..2].copy_from_slice(&f16::from_f32(x).to_le_bytes()),
        KvFormat::Bf16 => bytes[index * 2..][..2].copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
    }
}

/// Widens exactly.
#[inline(always)]
pub(crate) fn read_element(format: KvFormat, bytes: &[u8], index: usize) -> f32 {
    match format {
        KvFormat::F32 => {
            let b = &bytes[index * 4..][..4];
            f32::from_le_bytes([b[0], b[1], b[2], b[3]])
        }
        KvFormat::F16 => f16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
        KvFormat::Bf16 => bf16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
    }
}
