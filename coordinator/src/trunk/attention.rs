//! HOT PATH. Grouped-query attention of one layer: norm, projections, biases and norms that the family has, rotation,
//! cache, attention, output projection, residual.

use shimmer_kernels::{AttentionRequest, AttentionSpan};

use super::buffers::Buffers;
use super::weights::Attention;
use super::{Shape, rows};
use crate::kv_cache::KvCache;

pub(super) fn forward(
    shape: &Shape,
    weights: &Attention<'_>,
    layer: usize,
    spans: &[AttentionSpan<'_>],
    cache: &mut KvCache,
    buffers: &mut Buffers,
) {
    let Shape { config, kernels, class, .. } = shape;
    let (hidden, count) = (config.hidden_size, buffers.rows());
    rows::rms_norm(kernels, &buffers.x, hidden, weights.norm, config.rms_norm_eps, &mut buffers.h);
    project(shape, weights, buffers);
    rotate(shape, weights, spans, buffers);
    write(shape, layer, spans, cache, buffers);
    let attention = &config.attention;
    let request = AttentionRequest {
        layout: cache.layout(),
        cache: cache.bytes(),
        place: cache.place(layer),
        heads: attention.heads,
        scale: scale(attention.head_dim),
        queries: &buffers.q,
        spans,
    };
    kernels.attention(&request, &mut buffers.heads);
    buffers.activations.set(
        kernels,
        class.trunk_activations(),
        &buffers.heads,
        count,
        attention.q_rows(),
    );
    kernels.matmul(&weights.o, &buffers.activations, &mut buffers.y);
    if let Some(bias) = weights.o_bias {
        rows::add_bias(kernels, &mut buffers.y, bias);
    }
    rows::add(kernels, &mut buffers.x, &buffers.y, hidden);
}

/// Queries, keys and values with their biases; all three matrices read the same quantised rows.
fn project(shape: &Shape, weights: &Attention<'_>, buffers: &mut Buffers) {
    let Shape { config, kernels, class, .. } = shape;
    let count = buffers.rows();
    let Buffers { h, q, k, v, activations, .. } = buffers;
    activations.set(kernels, class.trunk_activations(), h, count, config.hidden_size);
    kernels.matmul_many(
        &mut [(weights.q, &mut q[..]), (weights.k, &mut k[..]), (weights.v, &mut v[..])],
        activations,
    );
    for (x, bias) in [(q, weights.q_bias), (k, weights.k_bias), (v, weights.v_bias)] {
        if let Some(bias) = bias {
            rows::add_bias(kernels, x, bias);
        }
    }
}

/// Norms of queries and keys, then the rotation by position.
fn rotate(
    shape: &Shape,
    weights: &Attention<'_>,
    spans: &[AttentionSpan<'_>],
    buffers: &mut Buffers,
) {
    let attention = &shape.config.attention;
    let Buffers { q, k, heads, .. } = buffers;
    for (x, width, norm) in
        [(q, attention.q_rows(), weights.q_norm), (k, attention.kv_rows(), weights.k_norm)]
    {
        if let Some(weight) = norm {
            // The weight's length says whether a head or the whole projection is normed.
            let before = &mut heads[..x.len()];
            before.copy_from_slice(x);
            rows::rms_norm(&shape.kernels, before, width, weight, shape.config.rms_norm_eps, x);
        }
        let mut first = 0;
        for span in spans {
            let part = &mut x[first * width..(first + span.rows) * width];
            rows::each(part, width, |row, part| {
                for (position, row) in
                    (span.first_position + row..).zip(part.chunks_exact_mut(width))
                {
                    for head in row.chunks_exact_mut(attention.head_dim) {
                        shape.kernels.rope(head, &shape.rope, position);
                    }
                }
            });
            first += span.rows;
        }
    }
}

/// Rounds keys and values into the pages of their sequences.
fn write(
    shape: &Shape,
    layer: usize,
    spans: &[AttentionSpan<'_>],
    cache: &mut KvCache,
    buffers: &Buffers,
) {
    let width = shape.config.attention.kv_rows();
    let (layout, place) = (cache.layout(), cache.place(layer));
    let mut first = 0;
    for span in spans {
        let range = first * width..(first + span.rows) * width;
        let (k, v) = (&buffers.k[range.clone()], &buffers.v[range]);
        shape.kernels.write_kv(
            layout,
            cache.bytes_mut(),
            place,
            span.pages,
            span.first_position,
            k,
            v,
        );
        first += span.rows;
    }
}

/// 1 / sqrt(head_dim), both operations rounded in f32.
fn scale(head_dim: usize) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "a head has far fewer than 2^24 dimensions")]
    let dim = head_dim as f32;
    1.0 / dim.sqrt()
}
