//! Matrix products cut into pieces for the rayon pool. Every output is computed whole by one thread, so the cut is free.

use crate::activations::{ActivationRows, RowsView};
use crate::strided::TileMut;
use crate::{BLOCK_ROWS, Kernels, Matrix};

/// Work worth handing to another thread, in nanoseconds of one thread.
const GRAIN_NS: usize = 10_000;

/// Rough cost of a product on one thread: reading the weights once, or the multiplications if they take longer.
pub(crate) fn cost_ns(w: &Matrix<'_>, rows: usize, planes: usize) -> usize {
    let read = w.weights().len() / 12;
    let unit = if w.format().is_integer() { 128 / planes.max(1) } else { 24 };
    let multiply = w.rows() * w.cols() / unit * rows;
    read.max(multiply)
}

/// Pieces into which work of this cost is cut: a few for each thread, so that a disturbed thread can be helped.
pub(crate) fn pieces(cost_ns: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads == 1 { 1 } else { (cost_ns / GRAIN_NS).min(threads * 4) }
}

/// Products of the blocks from `first_block` with `x`, in about `pieces` pieces.
pub(crate) fn product(
    kernels: &Kernels,
    w: &Matrix<'_>,
    first_block: usize,
    x: RowsView<'_>,
    mut out: TileMut<'_>,
    pieces: usize,
) {
    let blocks = out.cols().div_ceil(BLOCK_ROWS);
    if pieces >= 2 && blocks >= 2 {
        let half = blocks.div_ceil(2);
        let (left, right) = out.split_cols(half * BLOCK_ROWS);
        rayon::join(
            || product(kernels, w, first_block, x, left, pieces / 2),
            || product(kernels, w, first_block + half, x, right, pieces - pieces / 2),
        );
    } else if pieces >= 2 && x.len() >= 16 {
        let half = (x.len() / 2).next_multiple_of(8);
        let (upper, lower) = out.split_rows(half);
        let (first, second) = x.split(half);
        rayon::join(
            || product(kernels, w, first_block, first, upper, pieces / 2),
            || product(kernels, w, first_block, second, lower, pieces - pieces / 2),
        );
    } else {
        kernels.matmul_piece(w, first_block, x, &mut out);
    }
}

fn check(w: &Matrix<'_>, x: &ActivationRows) {
    assert_eq!(
        w.cols(),
        x.cols(),
        "a matrix of {} columns applied to rows of {}",
        w.cols(),
        x.cols()
    );
    assert!(
        w.format().accepts(x.format()),
        "{} weights do not take {} activations",
        w.format(),
        x.format()
    );
}

impl Kernels {
    /// `out[row][r] = sum over k of w[r][k] * x[row][k]`; `out` is `[x.rows()][w.rows()]`.
    ///
    /// Panics if shapes or formats do not fit each other.
    pub fn matmul(&self, w: &Matrix<'_>, x: &ActivationRows, out: &mut [f32]) {
        check(w, x);
        let cost = cost_ns(w, x.rows(), x.format().planes());
        let out = TileMut::new(out, x.rows(), w.rows());
        product(self, w, 0, RowsView::all(x), out, pieces(cost));
    }

    /// Several matrices reading the same rows, in one fork-join: q/k/v, or gate and up.
    pub fn matmul_many(&self, jobs: &mut [(Matrix<'_>, &mut [f32])], x: &ActivationRows) {
        self.products_of(jobs, RowsView::all(x));
    }

    pub(crate) fn products_of(&self, jobs: &mut [(Matrix<'_>, &mut [f32])], x: RowsView<'_>) {
        for (w, _) in jobs.iter() {
            check(w, x.buffer());
        }
        let planes = x.buffer().format().planes();
        let cost = jobs.iter().map(|(w, _)| cost_ns(w, x.len(), planes)).sum();
        self.products(jobs, x, cost, pieces(cost));
    }

    fn products(
        &self,
        jobs: &mut [(Matrix<'_>, &mut [f32])],
        x: RowsView<'_>,
        cost: usize,
        pieces: usize,
    ) {
        match jobs {
            [] => {}
            [(w, out)] => product(self, w, 0, x, TileMut::new(out, x.len(), w.rows()), pieces),
            _ if pieces < 2 => {
                for (w, out) in jobs {
                    product(self, w, 0, x, TileMut::new(out, x.len(), w.rows()), 1);
                }
            }
            _ => {
                let planes = x.buffer().format().planes();
                let (mut at, mut before) = (0, 0);
                while at + 1 < jobs.len() && (at == 0 || before < cost / 2) {
                    before += cost_ns(&jobs[at].0, x.len(), planes);
                    at += 1;
                }
                let (left, right) = jobs.split_at_mut(at);
                let left_pieces = (pieces * before).div_ceil(cost.max(1)).clamp(1, pieces);
                rayon::join(
                    || self.products(left, x, before, left_pieces),
                    || self.products(right, x, cost - before, (pieces - left_pieces).max(1)),
                );
            }
        }
    }
}
