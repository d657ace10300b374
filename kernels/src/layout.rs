//! How a matrix lies in memory, on disk and on a device: the R16 layout, and a checked view of such bytes.
//!
//! Rows are cut into blocks of 16 (the last one padded with zero rows). Float formats store a block as
//! `[column][16 rows]`. Integer formats store it as `[group of 64 columns][chunk][64 bytes]`, where byte
//! `4 * row + (column % 4)` of a chunk belongs to one of four neighbouring columns; `q8g64` has 16 chunks of four columns
//! in a group, `q4g64` has 8, chunk `c` in the low nibbles and chunk `c + 8` in the high ones. Scales of all blocks follow
//! as `[block][group][16]` f16. So one 64-byte load is one vector operand for 16 output rows and nothing is repacked.

use half::{bf16, f16};

use crate::{BLOCK_ROWS, GROUP, WeightFormat};

/// A shape, length or value that a layout cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A matrix without rows or columns.
    #[error("a matrix of {rows} rows and {cols} columns holds nothing")]
    Empty {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// A size that does not fit the address space.
    #[error(
        "a {format} matrix of {rows} rows and {cols} columns does not fit this machine's address space"
    )]
    TooLarge {
        /// Its format.
        format: WeightFormat,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// A byte slice or source of another length than the layout says.
    #[error("{part} holds {found} {unit}, expected {expected}")]
    Length {
        /// Which slice.
        part: &'static str,
        /// "bytes" or "values".
        unit: &'static str,
        /// The length the layout asks for.
        expected: usize,
        /// The length that was given.
        found: usize,
    },
    /// A weight that no format can represent.
    #[error("weight at row {row}, column {col} is not finite")]
    NonFinite {
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
    },
    /// A weight beyond the range of its format (of the f16 scale for integer formats).
    #[error("weight {value} at row {row}, column {col} is out of the range of {format}")]
    OutOfRange {
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
        /// The weight.
        value: String,
        /// The format asked for.
        format: WeightFormat,
    },
}

pub(crate) fn check_length(
    part: &'static str,
    unit: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), LayoutError> {
    if expected == found {
        Ok(())
    } else {
        Err(LayoutError::Length { part, unit, expected, found })
    }
}

/// The shape of one matrix and where its parts lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixLayout {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    weight_bytes: usize,
    scale_bytes: usize,
}

impl MatrixLayout {
    /// Lays out `rows` x `cols` elements; refuses empty matrices and sizes beyond the address space.
    pub fn new(format: WeightFormat, rows: usize, cols: usize) -> Result<Self, LayoutError> {
        if rows == 0 || cols == 0 {
            return Err(LayoutError::Empty { rows, cols });
        }
        let sizes = || -> Option<(usize, usize)> {
            let blocks = rows.div_ceil(BLOCK_ROWS);
            let (units, groups) = if format.is_integer() {
                (cols.div_ceil(GROUP), cols.div_ceil(GROUP))
            } else {
                (cols, 0)
            };
            let weights = blocks
                .checked_mul(BLOCK_ROWS)?
                .checked_mul(units)?
                .checked_mul(format.unit_bytes())?;
            let scales = blocks.checked_mul(BLOCK_ROWS * 2)?.checked_mul(groups)?;
            // The sum and its paddings must stay below isize::MAX as every slice does.
            let total = weights.checked_add(scales)?.checked_add(1 << 13)?;
            isize::try_from(total).ok().map(|_| (weights, scales))
        };
        let (weight_bytes, scale_bytes) =
            sizes().ok_or(LayoutError::TooLarge { format, rows, cols })?;
        Ok(Self { format, rows, cols, weight_bytes, scale_bytes })
    }

    /// Output rows.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Input columns.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    pub const fn format(&self) -> WeightFormat {
        self.format
    }

    /// Groups of 64 columns of a row (also for float formats, where no scale belongs to them).
    pub const fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// Blocks of 16 rows.
    pub const fn blocks(&self) -> usize {
        self.rows.div_ceil(BLOCK_ROWS)
    }

    /// Bytes of all weights.
    pub const fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Bytes of all scales; 0 for float formats.
    pub const fn scale_bytes(&self) -> usize {
        self.scale_bytes
    }

    /// Where the scales begin when both parts are stored as one run: the weights padded to 64 bytes.
    pub const fn scale_offset(&self) -> usize {
        self.weight_bytes.next_multiple_of(64)
    }

    /// Bytes of the matrix stored as one run: weights padded to 64 bytes, then scales.
    pub const fn total_bytes(&self) -> usize {
        if self.scale_bytes == 0 {
            self.weight_bytes
        } else {
            self.scale_offset() + self.scale_bytes
        }
    }

    /// Bytes of the weights of one block.
    pub(crate) const fn block_bytes(&self) -> usize {
        self.weight_bytes / self.blocks()
    }

    /// Byte of the element in the weights, and whether it is the high nibble (q4 only).
    pub(crate) const fn element(&self, row: usize, col: usize) -> (usize, bool) {
        let (block, lane) = (row / BLOCK_ROWS, row % BLOCK_ROWS);
        let base = block * self.block_bytes();
        let chunk = (col % GROUP) / 4;
        let within = lane * 4 + col % 4;
        match self.format {
            WeightFormat::Q8G64 => (base + (col / GROUP) * 1024 + chunk * 64 + within, false),
            WeightFormat::Q4G64 => {
                (base + (col / GROUP) * 512 + (chunk % 8) * 64 + within, chunk >= 8)
            }
            WeightFormat::Bf16 | WeightFormat::F16 => (base + (col * BLOCK_ROWS + lane) * 2, false),
            WeightFormat::F32 => (base + (col * BLOCK_ROWS + lane) * 4, false),
        }
    }

    /// Byte of the scale of `row` and `group` in the scales.
    pub(crate) const fn scale(&self, row: usize, group: usize) -> usize {
        (((row / BLOCK_ROWS) * self.groups() + group) * BLOCK_ROWS + row % BLOCK_ROWS) * 2
    }
}

/// A matrix in R16 layout over borrowed bytes. The slices have exactly the lengths of the layout; no alignment is needed.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    layout: MatrixLayout,
    weights: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// Views separate weights and scales.
    pub fn new(
        layout: MatrixLayout,
        weights: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self, LayoutError> {
        check_length("weights", "bytes", layout.weight_bytes(), weights.len())?;
        check_length("scales", "bytes", layout.scale_bytes(), scales.len())?;
        Ok(Self { layout, weights, scales })
    }

    /// Views one run of [`MatrixLayout::total_bytes`] bytes.
    pub fn from_bytes(layout: MatrixLayout, bytes: &'a [u8]) -> Result<Self, LayoutError> {
        check_length("matrix", "bytes", layout.total_bytes(), bytes.len())?;
        let scales =
            if layout.scale_bytes() == 0 { &[][..] } else { &bytes[layout.scale_offset()..] };
        Self::new(layout, &bytes[..layout.weight_bytes()], scales)
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.layout.rows()
    }

    /// Input columns.
    pub fn cols(&self) -> usize {
        self.layout.cols()
    }

    /// Element type.
    pub fn format(&self) -> WeightFormat {
        self.layout.format()
    }

    /// Its shape and offsets.
    pub fn layout(&self) -> &MatrixLayout {
        &self.layout
    }

    /// All weights.
    pub fn weights(&self) -> &'a [u8] {
        self.weights
    }

    /// All scales.
    pub fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// Dequantises one row: for integer formats f32(q) * f32(scale), one multiply. Panics beyond the shape.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        assert!(index < self.rows(), "row {index} of a matrix of {} rows", self.rows());
        assert_eq!(out.len(), self.cols(), "a row has as many values as the matrix has columns");
        for (col, value) in out.iter_mut().enumerate() {
            *value = self.value(index, col);
        }
    }

    /// Dequantised element.
    pub(crate) fn value(&self, row: usize, col: usize) -> f32 {
        let (at, high) = self.layout.element(row, col);
        match self.format() {
            WeightFormat::Q8G64 => {
                f32::from(self.weights[at].cast_signed()) * self.scale(row, col / GROUP)
            }
            WeightFormat::Q4G64 => {
                let byte = self.weights[at];
                let nibble = if high { byte >> 4 } else { byte & 15 };
                (f32::from(nibble) - 8.0) * self.scale(row, col / GROUP)
            }
            format => read_float(format, &self.weights[at..]),
        }
    }

    /// The scale of one row and group, widened.
    pub(crate) fn scale(&self, row: usize, group: usize) -> f32 {
        let at = self.layout.scale(row, group);
        f16::from_le_bytes([self.scales[at], self.scales[at + 1]]).to_f32()
    }
}

/// The float at the beginning of `bytes`, widened exactly.
#[inline(always)]
pub(crate) fn read_float(format: WeightFormat, bytes: &[u8]) -> f32 {
    match format {
        WeightFormat::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        WeightFormat::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

#[cfg(test)]
mod tests;
