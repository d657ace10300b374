//! Rows that matrices are applied to: quantised once, shared by every matrix that reads them, and sent over the wire in
//! the same form.

use crate::{ActivationFormat, GROUP, Kernels};

/// A wire form that is not rows of the announced shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ActivationError {
    /// Another number of bytes than the shape says.
    #[error("{rows} rows of {cols} {format} values take {expected} bytes, found {found}")]
    Length {
        /// Announced format.
        format: ActivationFormat,
        /// Announced rows.
        rows: usize,
        /// Announced columns.
        cols: usize,
        /// Bytes such rows take.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
    /// A shape that no memory holds, or a format that never travels.
    #[error("{rows} rows of {cols} {format} values cannot be sent")]
    Unsendable {
        /// Announced format.
        format: ActivationFormat,
        /// Announced rows.
        rows: usize,
        /// Announced columns.
        cols: usize,
    },
    /// -128 is outside the quantised range; no sender makes it and kernels rely on its absence.
    #[error("row {row} holds the value -128 at column {col}, outside -127..=127")]
    Value {
        /// The row.
        row: usize,
        /// The column.
        col: usize,
    },
}

/// Reusable buffer of rows in one format.
#[derive(Debug, Clone)]
pub struct ActivationRows {
    format: ActivationFormat,
    rows: usize,
    cols: usize,
    /// f32 rows; empty for integer formats.
    values: Vec<f32>,
    /// `[row][group][plane][64]`; with two planes the upper comes first.
    quantised: Vec<i8>,
    /// `[row][group]`.
    scales: Vec<f32>,
    /// `[row][group]`: minus the sum of the quantised values; lets kernels that bias weights to unsigned undo it.
    negated_sums: Vec<i32>,
}

impl Default for ActivationRows {
    fn default() -> Self {
        Self::new()
    }
}

impl ActivationRows {
    /// No rows.
    pub const fn new() -> Self {
        Self {
            format: ActivationFormat::F32,
            rows: 0,
            cols: 0,
            values: Vec::new(),
            quantised: Vec::new(),
            scales: Vec::new(),
            negated_sums: Vec::new(),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How they are kept.
    pub fn format(&self) -> ActivationFormat {
        self.format
    }

    /// Groups of 64 columns, the last one padded with zeros.
    pub(crate) fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// Takes `rows` rows of `cols` values, quantised where the format says so.
    pub fn set(
        &mut self,
        kernels: &Kernels,
        format: ActivationFormat,
        x: &[f32],
        rows: usize,
        cols: usize,
    ) {
        assert_eq!(Some(x.len()), rows.checked_mul(cols), "rows x columns values");
        self.reshape(format, rows, cols);
        if format.is_integer() {
            kernels.quantise(
                format,
                x,
                cols,
                &mut self.quantised,
                &mut self.scales,
                &mut self.negated_sums,
            );
        } else {
            self.values.copy_from_slice(x);
        }
    }

    fn reshape(&mut self, format: ActivationFormat, rows: usize, cols: usize) {
        (self.format, self.rows, self.cols) = (format, rows, cols);
        let groups = if format.is_integer() { rows * self.groups() } else { 0 };
        // Every element is written by the caller, so old contents may stay.
        self.values.resize(if format.is_integer() { 0 } else { rows * cols }, 0.0);
        self.quantised.resize(groups * GROUP * format.planes(), 0);
        self.scales.resize(groups, 0.0);
        self.negated_sums.resize(groups, 0);
    }

    /// Bytes on the wire of such rows; `None` if they cannot be sent (a16g64 never travels) or do not fit memory.
    pub fn wire_bytes(format: ActivationFormat, rows: usize, cols: usize) -> Option<usize> {
        let row = match format {
            ActivationFormat::F32 => cols.checked_mul(4)?,
            ActivationFormat::A8G64 => cols.div_ceil(GROUP).checked_mul(GROUP + 4)?,
            ActivationFormat::A16G64 => return None,
        };
        rows.checked_mul(row).filter(|bytes| isize::try_from(*bytes).is_ok())
    }

    /// Appends the wire form of some of the rows, in the order given. Panics on an index that names no row.
    pub fn write_wire_rows(&self, picked: &[u32], out: &mut Vec<u8>) {
        match self.format {
            ActivationFormat::F32 => {
                picked.iter().for_each(|row| write_floats(self.values(*row as usize), out))
            }
            ActivationFormat::A8G64 => {
                for row in picked {
                    out.extend_from_slice(bytemuck::cast_slice(self.quantised(*row as usize)));
                }
                picked.iter().for_each(|row| write_floats(self.scales(*row as usize), out));
            }
            ActivationFormat::A16G64 => panic!("a16g64 rows never leave the process"),
        }
    }

    /// Appends the wire form: f32 little-endian rows; or all int8 rows, padded to whole groups, then all f32 scales.
    /// Panics for a16g64, which never travels.
    pub fn write_wire(&self, out: &mut Vec<u8>) {
        match self.format {
            ActivationFormat::F32 => write_floats(&self.values, out),
            ActivationFormat::A8G64 => {
                out.extend_from_slice(bytemuck::cast_slice(&self.quantised));
                write_floats(&self.scales, out);
            }
            ActivationFormat::A16G64 => panic!("a16g64 rows never leave the process"),
        }
    }

    /// Takes rows in wire form. On an error the buffer holds no rows.
    pub fn read_wire(
        &mut self,
        format: ActivationFormat,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<(), ActivationError> {
        self.reshape(format, 0, cols);
        let expected = Self::wire_bytes(format, rows, cols).ok_or(ActivationError::Unsendable {
            format,
            rows,
            cols,
        })?;
        if bytes.len() != expected {
            return Err(ActivationError::Length {
                format,
                rows,
                cols,
                expected,
                found: bytes.len(),
            });
        }
        if format == ActivationFormat::F32 {
            self.reshape(format, rows, cols);
            read_floats(bytes, &mut self.values);
            return Ok(());
        }
        let width = self.groups() * GROUP;
        let (values, scales) = bytes.split_at(rows * width);
        if let Some(at) = values.iter().position(|b| *b == 0x80) {
            return Err(ActivationError::Value { row: at / width, col: at % width });
        }
        self.reshape(format, rows, cols);
        self.quantised.copy_from_slice(bytemuck::cast_slice(values));
        read_floats(scales, &mut self.scales);
        for (sum, group) in self.negated_sums.iter_mut().zip(self.quantised.chunks_exact(GROUP)) {
            *sum = -group.iter().map(|q| i32::from(*q)).sum::<i32>();
        }
        Ok(())
    }

    /// f32 values of one row (f32 format only).
    pub(crate) fn values(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    /// Quantised values of one row, `[group][plane][64]` (integer formats only).
    pub(crate) fn quantised(&self, row: usize) -> &[i8] {
        let width = self.groups() * GROUP * self.format.planes();
        &self.quantised[row * width..(row + 1) * width]
    }

    /// Scales of one row.
    pub(crate) fn scales(&self, row: usize) -> &[f32] {
        &self.scales[row * self.groups()..(row + 1) * self.groups()]
    }

    /// Minus the sums of the groups of one row.
    pub(crate) fn negated_sums(&self, row: usize) -> &[i32] {
        &self.negated_sums[row * self.groups()..(row + 1) * self.groups()]
    }
}

fn write_floats(values: &[f32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        out.extend_from_slice(bytemuck::cast_slice(values));
    } else {
        values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
    }
}

fn read_floats(bytes: &[u8], values: &mut [f32]) {
    let (chunks, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty() && chunks.len() == values.len(), "four bytes for each value");
    for (value, chunk) in values.iter_mut().zip(chunks) {
        *value = f32::from_le_bytes(*chunk);
    }
}

/// Some rows of a buffer, by index or all of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsView<'a> {
    rows: &'a ActivationRows,
    picked: Option<&'a [u32]>,
    begin: usize,
    len: usize,
}

impl<'a> RowsView<'a> {
    pub(crate) fn all(rows: &'a ActivationRows) -> Self {
        Self { rows, picked: None, begin: 0, len: rows.rows() }
    }

    /// Panics if an index names no row.
    pub(crate) fn picked(rows: &'a ActivationRows, picked: &'a [u32]) -> Self {
        assert!(picked.iter().all(|r| (*r as usize) < rows.rows()), "every picked row exists");
        Self { rows, picked: Some(picked), begin: 0, len: picked.len() }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn buffer(&self) -> &'a ActivationRows {
        self.rows
    }

    /// Index in the buffer of the view's row `index`.
    pub(crate) fn source(&self, index: usize) -> usize {
        debug_assert!(index < self.len, "row of the view");
        match self.picked {
            Some(picked) => picked[self.begin + index] as usize,
            None => self.begin + index,
        }
    }

    /// The first `at` rows, and the rest.
    pub(crate) fn split(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "split inside the view");
        (Self { len: at, ..self }, Self { begin: self.begin + at, len: self.len - at, ..self })
    }
}

#[cfg(test)]
mod tests;
