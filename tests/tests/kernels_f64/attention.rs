use half::{bf16, f16};
use shimmer_kernels::{
    AttentionRequest, AttentionSpan, KvFormat, KvLayout, PAGE_POSITIONS, PagePlace,
};
use shimmer_tests::{
    random::uniform,
    reference::ops::{self, count},
};

use super::{UNIT, assert_close, scalar, widen};

/// What the cache keeps of a value.
fn stored(format: KvFormat, values: &[f32]) -> Vec<f64> {
    let round = |x: &f32| match format {
        KvFormat::F32 => f64::from(*x),
        KvFormat::F16 => f16::from_f32(*x).to_f64(),
        KvFormat::Bf16 => bf16::from_f32(*x).to_f64(),
    };
    values.iter().map(round).collect()
}

/// `rows` queries after `before` positions; the cache is filled for all of them.
fn check(
    format: KvFormat,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    before: usize,
    rows: usize,
) {
    let name =
        format!("{format} {heads}/{kv_heads} heads of {head_dim}, {rows} rows after {before}");
    let positions = before + rows;
    let layout = KvLayout { format, kv_heads, head_dim };
    let width = kv_heads * head_dim;
    let [queries, keys, values] =
        [(1, rows * heads * head_dim), (2, positions * width), (3, positions * width)]
            .map(|(seed, len)| uniform(seed, len).into_iter().map(|x| x * 2.0).collect::<Vec<_>>());

    // Pages lie in the cache in no particular order.
    let count_of_pages = u32::try_from(positions.div_ceil(PAGE_POSITIONS)).unwrap();
    let pages: Vec<u32> = (0..count_of_pages).rev().collect();
    let place = PagePlace { stride: layout.page_bytes(), offset: 0 };
    let mut cache = vec![0_u8; layout.page_bytes() * pages.len()];
    scalar().write_kv(layout, &mut cache, place, &pages, 0, &keys, &values);
    let scale = 0.3_f32;
    let spans = [AttentionSpan { pages: &pages, first_position: before, rows }];
    let request = AttentionRequest {
        layout,
        cache: &cache,
        place,
        heads,
        scale,
        queries: &queries,
        spans: &spans,
    };
    let mut out = vec![f32::NAN; rows * heads * head_dim];
    scalar().attention(&request, &mut out);

    let (queries, keys, values) = (widen(&queries), stored(format, &keys), stored(format, &values));
    // The reference divides by the root of the head dimension; the kernel takes any factor.
    let correction = f64::from(scale) * count(head_dim).sqrt();
    for row in 0..rows {
        for head in 0..heads {
            let at = (row * heads + head) * head_dim;
            let query: Vec<f64> =
                queries[at..at + head_dim].iter().map(|x| x * correction).collect();
            let kv_head = head / (heads / kv_heads) * head_dim;
            let of_head = |values: &'_ [f64]| -> Vec<Vec<f64>> {
                let rows = values.chunks_exact(width).take(before + row + 1);
                rows.map(|row| row[kv_head..kv_head + head_dim].to_vec()).collect()
            };
            let (keys, values) = (of_head(&keys), of_head(&values));
            let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
            let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
            let expected = ops::attention(&query, &keys, &values);
            // A score's error enters as a relative error of its weight; then one chain of at most 256 terms.
            let score =
                4.0 * count(head_dim) * f64::from(scale) * (count(head_dim) / 8.0 + 4.0) * UNIT;
            let bound = 2.0 * (2.0 * score + (256.0 + 8.0) * UNIT);
            for (index, &expected) in expected.iter().enumerate() {
                assert_close(&name, index, out[at + index], expected, bound);
            }
        }
    }
}

#[test]
fn attention_is_within_its_roundings() {
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16] {
        check(format, 4, 2, 16, 0, 1);
        check(format, 4, 1, 32, 0, 70);
        check(format, 3, 3, 64, 250, 9);
        check(format, 9, 3, 64, 700, 2);
    }
}
