//! Write access to a rectangle of a row-major matrix, so that threads can own disjoint column ranges of one output.
//!
//! A product is cut over output rows of the weights, which are columns of the result: a slice cannot express that, and
//! copying through private buffers would cost a pass over the result.

#![expect(
    unsafe_code,
    reason = "disjoint rectangles of one slice; splitting consumes the parent, so no two overlap"
)]

use std::marker::PhantomData;

/// A rectangle of a row-major f32 matrix, exclusively owned.
#[derive(Debug)]
pub(crate) struct TileMut<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    cols: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a tile is an exclusive borrow of plain floats, as `&mut [f32]` is.
unsafe impl Send for TileMut<'_> {}

impl<'a> TileMut<'a> {
    /// All of `out`, which holds `rows` rows of `cols` values.
    pub(crate) fn new(out: &'a mut [f32], rows: usize, cols: usize) -> Self {
        let len = rows.checked_mul(cols).expect("a slice of this length exists");
        assert_eq!(out.len(), len, "output holds rows x columns values");
        Self { start: out.as_mut_ptr(), stride: cols, rows, cols, owner: PhantomData }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// The first `at` rows, and the rest.
    pub(crate) fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows, "split inside the tile");
        let offset = if at == self.rows { 0 } else { at * self.stride };
        // SAFETY: row `at` lies inside the slice that this tile was made from (or the offset is 0).
        let below = unsafe { self.start.add(offset) };
        (
            Self {
                start: self.start,
                stride: self.stride,
                rows: at,
                cols: self.cols,
                owner: PhantomData,
            },
            Self {
                start: below,
                stride: self.stride,
                rows: self.rows - at,
                cols: self.cols,
                owner: PhantomData,
            },
        )
    }

    /// The first `at` columns, and the rest.
    pub(crate) fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols, "split inside the tile");
        let offset = if self.rows == 0 { 0 } else { at };
        // SAFETY: column `at` of the first row lies inside, or one past the end of, the slice of this tile.
        let right = unsafe { self.start.add(offset) };
        (
            Self {
                start: self.start,
                stride: self.stride,
                rows: self.rows,
                cols: at,
                owner: PhantomData,
            },
            Self {
                start: right,
                stride: self.stride,
                rows: self.rows,
                cols: self.cols - at,
                owner: PhantomData,
            },
        )
    }

    /// Row `index` of the rectangle.
    pub(crate) fn row_mut(&mut self, index: usize) -> &mut [f32] {
        assert!(index < self.rows, "row {index} of a tile of {} rows", self.rows);
        // SAFETY: row `index` begins inside the slice that the tile was made from.
        let start = unsafe { self.start.add(index * self.stride) };
        // SAFETY: `cols` values from there lie inside that slice, which stays borrowed for 'a; the tile owns this
        // rectangle alone, and `&mut self` lets only one of its rows be out at a time.
        unsafe { std::slice::from_raw_parts_mut(start, self.cols) }
    }
}
