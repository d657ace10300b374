//! Grouped-query attention over paged keys and values, for prefill chunks and decode rows alike.

use crate::kernels::Kernels;
use crate::kv::{KvLayout, PAGE_POSITIONS, PagePlace};
use crate::strided::TileMut;

/// Consecutive query rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpan<'a> {
    /// The sequence's pages in order of position; page `i` holds positions `64 i .. 64 i + 64`.
    pub pages: &'a [u32],
    /// Position of the first row. Row `i` sees positions `0 ..= first_position + i`, which must be written.
    pub first_position: usize,
    /// Query rows.
    pub rows: usize,
}

/// One layer's attention for all rows of a step.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRequest<'a> {
    /// Shape of the layer's cache.
    pub layout: KvLayout,
    /// The bytes that hold the pages.
    pub cache: &'a [u8],
    /// Where this layer's pages lie in them.
    pub place: PagePlace,
    /// Query heads; a multiple of the kv heads. Head `h` reads kv head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Factor on every score, usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// `[rows][heads][head_dim]`, rotated.
    pub queries: &'a [f32],
    /// Spans in the order of their rows, covering all of them.
    pub spans: &'a [AttentionSpan<'a>],
}

/// The part of a request that is computed in one piece: some rows of one span, one kv head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attend<'a> {
    pub(crate) layout: KvLayout,
    cache: &'a [u8],
    place: PagePlace,
    pages: &'a [u32],
    pub(crate) scale: f32,
    kv_head: usize,
    /// Query heads of this kv head.
    pub(crate) group: usize,
    /// Queries of this piece's first row and later ones, all heads.
    queries: &'a [f32],
    /// Values from one query row to the next.
    row_stride: usize,
    first_position: usize,
}

impl<'a> Attend<'a> {
    /// Query `head` of the group in row `row`.
    #[inline(always)]
    pub(crate) fn query(&self, row: usize, head: usize) -> &'a [f32] {
        let dim = self.layout.head_dim;
        &self.queries[row * self.row_stride + (self.kv_head * self.group + head) * dim..][..dim]
    }

    /// Positions that row `row` sees.
    #[inline(always)]
    pub(crate) fn limit(&self, row: usize) -> usize {
        self.first_position + row + 1
    }

    /// Keys and values of the page that holds `position`.
    #[inline(always)]
    pub(crate) fn head_of(&self, position: usize) -> (&'a [u8], &'a [u8]) {
        let page = self.layout.page(self.cache, self.place, self.pages[position / PAGE_POSITIONS]);
        self.layout.head(page, self.kv_head)
    }

    fn later(self, row: usize) -> Self {
        Self {
            queries: &self.queries[row * self.row_stride..],
            first_position: self.first_position + row,
            ..self
        }
    }

    /// Rough cost of `rows` rows: multiplications with keys and values.
    fn cost(&self, rows: usize) -> usize {
        rows * self.group * self.layout.head_dim * 2 * (self.first_position + rows)
    }
}

/// Work below this many multiplications stays on its thread: about 20 microseconds.
const GRAIN: usize = 1 << 19;

impl Kernels {
    /// Attention of every query row over the cache. `out` is `[rows][heads][head_dim]`.
    ///
    /// Panics if shapes do not fit each other or a page list is shorter than the positions seen.
    pub fn attention(&self, request: &AttentionRequest<'_>, out: &mut [f32]) {
        let AttentionRequest { layout, heads, spans, .. } = *request;
        let width = heads * layout.head_dim;
        let rows: usize = spans.iter().map(|s| s.rows).sum();
        assert!(
            layout.kv_heads > 0 && heads.is_multiple_of(layout.kv_heads),
            "{heads} query heads share {} kv heads",
            layout.kv_heads
        );
        assert_eq!(request.queries.len(), rows * width, "queries of every row and head");
        for span in spans {
            let pages = (span.first_position + span.rows).div_ceil(PAGE_POSITIONS);
            assert!(span.rows == 0 || pages <= span.pages.len(), "a page for every position seen");
        }
        self.attend_spans(request, spans, request.queries, TileMut::new(out, rows, width));
    }

    /// Halves the list of spans until one is left.
    fn attend_spans(
        &self,
        request: &AttentionRequest<'_>,
        spans: &[AttentionSpan<'_>],
        queries: &[f32],
        out: TileMut<'_>,
    ) {
        let [span] = spans else {
            let (left, right) = spans.split_at(spans.len() / 2);
            if left.is_empty() {
                return;
            }
            let rows: usize = left.iter().map(|s| s.rows).sum();
            let (left_out, right_out) = out.split_rows(rows);
            let (left_queries, right_queries) = queries.split_at(rows * right_out.cols());
            let positions: usize = spans.iter().map(|s| s.rows * (s.first_position + s.rows)).sum();
            let first = || self.attend_spans(request, left, left_queries, left_out);
            let second = || self.attend_spans(request, right, right_queries, right_out);
            if positions * out_cost(request) < GRAIN {
                first();
                second();
            } else {
                rayon::join(first, second);
            }
            return;
        };
        let group = request.heads / request.layout.kv_heads;
        let work = Attend {
            layout: request.layout,
            cache: request.cache,
            place: request.place,
            pages: span.pages,
            scale: request.scale,
            kv_head: 0,
            group,
            queries,
            row_stride: request.heads * request.layout.head_dim,
            first_position: span.first_position,
        };
        self.attend_heads(work, request.layout.kv_heads, out);
    }

    /// Halves kv heads, then rows, until a piece is small.
    fn attend_heads(&self, work: Attend<'_>, kv_heads: usize, out: TileMut<'_>) {
        let cost = work.cost(out.rows()) * kv_heads;
        if kv_heads > 1 {
            let half = kv_heads / 2;
            let (left, right) = out.split_cols(half * work.group * work.layout.head_dim);
            let upper = Attend { kv_head: work.kv_head + half, ..work };
            let first = || self.attend_heads(work, half, left);
            let second = || self.attend_heads(upper, kv_heads - half, right);
            if cost < GRAIN {
                first();
                second();
            } else {
                rayon::join(first, second);
            }
            return;
        }
        if out.rows() >= 16 && cost >= 4 * GRAIN {
            // Later rows see more positions; the cut keeps whole tiles of eight rows.
            let half = (out.rows() / 2).next_multiple_of(8);
            let (upper, lower) = out.split_rows(half);
            rayon::join(
                || self.attend_heads(work, 1, upper),
                || self.attend_heads(work.later(half), 1, lower),
            );
            return;
        }
        let mut out = out;
        self.attend(&work, &mut out);
    }

    /// Rounds the keys and values of one sequence's new rows into its pages; `k` and `v` are `[rows][kv_heads][head_dim]`.
    #[expect(clippy::too_many_arguments, reason = "where to, and what")]
    pub fn write_kv(
        &self,
        layout: KvLayout,
        cache: &mut [u8],
        place: PagePlace,
        pages: &[u32],
        first_position: usize,
        k: &[f32],
        v: &[f32],
    ) {
        assert_eq!(k.len(), v.len(), "as many keys as values");
        let width = layout.kv_heads * layout.head_dim;
        assert!(k.len().is_multiple_of(width), "whole rows of keys");
        for (position, (k, v)) in
            (first_position..).zip(k.chunks_exact(width).zip(v.chunks_exact(width)))
        {
            let page = layout.page_mut(cache, place, pages[position / PAGE_POSITIONS]);
            let heads = k.chunks_exact(layout.head_dim).zip(v.chunks_exact(layout.head_dim));
            for (kv_head, (k, v)) in heads.enumerate() {
                layout.store(page, position % PAGE_POSITIONS, kv_head, k, v);
            }
        }
    }
}

/// Multiplications per query row and position.
fn out_cost(request: &AttentionRequest<'_>) -> usize {
    2 * request.heads * request.layout.head_dim
}

#[cfg(test)]
mod tests;
