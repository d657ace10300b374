//! Paged keys and values of every running sequence.
//!
//! One arena, made at start, is cut into pages of 64 positions. A page holds these positions for all layers, so that a
//! sequence needs one page list. A page that was never written costs address space only.

use std::io;

use shimmer_kernels::{Arena, KvLayout, PAGE_POSITIONS, PagePlace};

/// Pages that are not in use.
#[derive(Clone, Debug)]
pub struct PageAllocator {
    free: Vec<u32>,
    total: usize,
}

impl PageAllocator {
    /// All of `total` pages are free; low numbers go out first, so that a quiet server touches little memory.
    pub fn new(total: u32) -> Self {
        Self { free: (0..total).rev().collect(), total: total as usize }
    }

    /// Pages in use and free.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Pages free.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Takes `count` pages, or none at all.
    pub fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        let rest = self.free.len().checked_sub(count)?;
        let mut taken = self.free.split_off(rest);
        taken.reverse();
        Some(taken)
    }

    /// Gives pages back.
    pub fn give(&mut self, mut pages: Vec<u32>) {
        pages.reverse();
        self.free.append(&mut pages);
        assert!(self.free.len() <= self.total, "pages were given back twice");
    }
}

/// Pages that hold `positions` positions; a sequence always has one.
pub fn pages_for(positions: usize) -> usize {
    positions.div_ceil(PAGE_POSITIONS).max(1)
}

/// The bytes of all pages.
#[derive(Debug)]
pub struct KvCache {
    arena: Arena,
    layout: KvLayout,
    layers: usize,
}

impl KvCache {
    /// Pages that a budget holds for a model of this shape.
    pub fn pages_in(budget_bytes: u64, layout: KvLayout, layers: usize) -> u32 {
        let page = layout.page_bytes().saturating_mul(layers.max(1));
        u64::try_from(page)
            .map_or(0, |page| u32::try_from(budget_bytes / page.max(1)).unwrap_or(u32::MAX))
    }

    /// Address space for `pages` pages of `layers` layers.
    pub fn new(pages: u32, layout: KvLayout, layers: usize) -> io::Result<Self> {
        let bytes = layout
            .page_bytes()
            .checked_mul(layers)
            .and_then(|page| page.checked_mul(pages as usize));
        let bytes = bytes.ok_or_else(|| {
            io::Error::new(io::ErrorKind::OutOfMemory, "more KV pages than addresses")
        })?;
        Ok(Self { arena: Arena::new(bytes)?, layout, layers })
    }

    /// Shape of one layer's pages.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Where a layer's part of each page lies.
    pub fn place(&self, layer: usize) -> PagePlace {
        let bytes = self.layout.page_bytes();
        PagePlace { stride: bytes * self.layers, offset: bytes * layer }
    }

    /// All pages, to read.
    pub fn bytes(&self) -> &[u8] {
        self.arena.as_slice()
    }

    /// All pages, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.arena.as_mut_slice()
    }
}

#[cfg(test)]
mod tests;
