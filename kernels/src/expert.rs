//! One expert: its slab, and the one function that every tier and every process computes for it.

use crate::activations::{ActivationRows, RowsView};
use crate::layout::check_length;
use crate::strided::TileMut;
use crate::{Kernels, LayoutError, Matrix, MatrixLayout, WeightFormat, matmul};

/// Slabs begin and end on this boundary, so that a direct read can fetch one whole.
const SLAB_ALIGN: usize = 4096;
/// Parts of a slab begin on this boundary.
const PART_ALIGN: usize = 64;

/// Where the parts of an expert's slab lie: gate, up and down weights, then their scales in the same order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertLayout {
    projection: MatrixLayout,
    down: MatrixLayout,
    weights: [usize; 3],
    scales: [usize; 3],
    slab_bytes: usize,
}

impl ExpertLayout {
    /// gate and up are `[intermediate, hidden]`, down is `[hidden, intermediate]`.
    pub fn new(
        hidden: usize,
        intermediate: usize,
        format: WeightFormat,
    ) -> Result<Self, LayoutError> {
        let projection = MatrixLayout::new(format, intermediate, hidden)?;
        let down = MatrixLayout::new(format, hidden, intermediate)?;
        let matrices = [projection, projection, down];
        let mut end = 0_usize;
        let mut place = |bytes: usize| {
            let begin = end.checked_next_multiple_of(PART_ALIGN)?;
            end = begin.checked_add(bytes)?;
            Some(begin)
        };
        let mut offsets = [0; 6];
        let sizes = matrices
            .iter()
            .map(MatrixLayout::weight_bytes)
            .chain(matrices.iter().map(MatrixLayout::scale_bytes));
        let too_large = LayoutError::TooLarge { format, rows: intermediate, cols: hidden };
        for (offset, bytes) in offsets.iter_mut().zip(sizes) {
            *offset = place(bytes).ok_or_else(|| too_large.clone())?;
        }
        let slab_bytes = end
            .checked_next_multiple_of(SLAB_ALIGN)
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or(too_large)?;
        let [a, b, c, d, e, f] = offsets;
        Ok(Self { projection, down, weights: [a, b, c], scales: [d, e, f], slab_bytes })
    }

    /// Width of the residual stream.
    pub const fn hidden(&self) -> usize {
        self.down.rows()
    }

    /// Width between the projections.
    pub const fn intermediate(&self) -> usize {
        self.projection.rows()
    }

    /// Element type of all three matrices.
    pub const fn format(&self) -> WeightFormat {
        self.down.format()
    }

    /// Bytes of a slab, a multiple of 4096.
    pub const fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// The layouts of gate, up and down, each with the offsets of its weights and of its scales.
    pub const fn parts(&self) -> [(MatrixLayout, usize, usize); 3] {
        let ([gate, up, down], scales) = (self.weights, self.scales);
        [
            (self.projection, gate, scales[0]),
            (self.projection, up, scales[1]),
            (self.down, down, scales[2]),
        ]
    }
}

/// A borrowed expert.
#[derive(Debug, Clone, Copy)]
pub struct Expert<'a> {
    gate: Matrix<'a>,
    up: Matrix<'a>,
    down: Matrix<'a>,
}

impl<'a> Expert<'a> {
    /// Views a slab of exactly [`ExpertLayout::slab_bytes`] bytes.
    pub fn from_slab(layout: &ExpertLayout, slab: &'a [u8]) -> Result<Self, LayoutError> {
        check_length("expert slab", "bytes", layout.slab_bytes(), slab.len())?;
        let [gate, up, down] = layout.parts().map(|(matrix, weights, scales)| {
            let weights = &slab[weights..weights + matrix.weight_bytes()];
            Matrix::new(matrix, weights, &slab[scales..scales + matrix.scale_bytes()])
        });
        Ok(Self { gate: gate?, up: up?, down: down? })
    }

    /// Views three matrices, as a shared expert or a dense feed-forward has them. gate and up must have one shape, down
    /// its transpose.
    pub fn from_matrices(
        gate: Matrix<'a>,
        up: Matrix<'a>,
        down: Matrix<'a>,
    ) -> Result<Self, LayoutError> {
        check_length("up projection", "rows", gate.rows(), up.rows())?;
        check_length("up projection", "columns", gate.cols(), up.cols())?;
        check_length("down projection", "columns", gate.rows(), down.cols())?;
        check_length("down projection", "rows", gate.cols(), down.rows())?;
        Ok(Self { gate, up, down })
    }

    /// Width of the residual stream.
    pub fn hidden(&self) -> usize {
        self.down.rows()
    }

    /// Width between the projections.
    pub fn intermediate(&self) -> usize {
        self.gate.rows()
    }

    /// The gate, up and down matrices.
    pub fn matrices(&self) -> [Matrix<'a>; 3] {
        [self.gate, self.up, self.down]
    }
}

/// Buffers between the projections of one call of [`Kernels::expert`].
#[derive(Debug, Default)]
pub struct ExpertScratch {
    gate: Vec<f32>,
    up: Vec<f32>,
    hidden: ActivationRows,
}

impl Kernels {
    /// `down(silu(gate(x)) * up(x))` for the rows of `x` that `rows` picks; `out` is `[rows.len()][hidden]`.
    ///
    /// The product between the projections is quantised in the format of `x` before `down`. Panics if shapes or formats
    /// do not fit, or an index names no row.
    pub fn expert(
        &self,
        expert: &Expert<'_>,
        x: &ActivationRows,
        rows: &[u32],
        out: &mut [f32],
        scratch: &mut ExpertScratch,
    ) {
        let view = RowsView::picked(x, rows);
        let ExpertScratch { gate, up, hidden } = scratch;
        let width = expert.intermediate();
        gate.resize(rows.len() * width, 0.0);
        up.resize(rows.len() * width, 0.0);
        self.products_of(&mut [(expert.gate, &mut gate[..]), (expert.up, &mut up[..])], view);
        self.swiglu(gate, up);
        hidden.set(self, x.format(), gate, rows.len(), width);
        let all = RowsView::all(hidden);
        let pieces = matmul::pieces(matmul::cost_ns(&expert.down, rows.len(), x.format().planes()));
        matmul::product(
            self,
            &expert.down,
            0,
            all,
            TileMut::new(out, rows.len(), expert.hidden()),
            pieces,
        );
    }
}

#[cfg(test)]
mod tests;
