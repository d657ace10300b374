use shimmer_kernels::{AttentionRequest, AttentionSpan, Isa, KvFormat};

use super::*;
use crate::test_support::kernels;

#[test]
fn pages_are_taken_whole_or_not_at_all() {
    let mut pages = PageAllocator::new(4);
    let first = pages.take(3).unwrap();
    assert_eq!(first, [0, 1, 2]);
    assert_eq!(pages.take(2), None);
    assert_eq!(pages.available(), 1);
    pages.give(first);
    assert_eq!(pages.take(4).unwrap(), [0, 1, 2, 3]);
    assert_eq!(pages.take(0).unwrap(), [0_u32; 0]);
}

#[test]
fn a_budget_is_counted_in_whole_pages_of_all_layers() {
    let layout = KvLayout { format: KvFormat::F16, kv_heads: 2, head_dim: 16 };
    let page = u64::try_from(layout.page_bytes()).unwrap() * 3;
    assert_eq!(page, 2 * 2 * 64 * 16 * 2 * 3);
    let check = |budget, pages| assert_eq!(KvCache::pages_in(budget, layout, 3), pages);
    check(0, 0);
    check(page - 1, 0);
    check(page * 5 + 1, 5);
    check(u64::MAX, u32::MAX);
}

#[test]
fn layers_of_a_page_do_not_overlap() {
    let layout = KvLayout { format: KvFormat::F32, kv_heads: 1, head_dim: 4 };
    let cache = KvCache::new(3, layout, 2).unwrap();
    let begin = |page: usize, layer| cache.place(layer).stride * page + cache.place(layer).offset;
    let mut begins: Vec<usize> = (0..3).flat_map(|page| [begin(page, 0), begin(page, 1)]).collect();
    begins.push(cache.bytes().len());
    assert!(begins.windows(2).all(|pair| pair[1] - pair[0] == layout.page_bytes()), "{begins:?}");
}

/// Attention of one row at the end of `positions` positions, over pages that held `garbage` before.
fn attend(isa: Isa, format: KvFormat, positions: usize, garbage: u8) -> Option<Vec<f32>> {
    let kernels = kernels(isa)?;
    let layout = KvLayout { format, kv_heads: 2, head_dim: 32 };
    let mut cache = KvCache::new(6, layout, 1).unwrap();
    cache.bytes_mut().fill(garbage);
    let pages: Vec<u32> = (0..6).rev().collect();
    let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) * 0.03;
    let kv: Vec<f32> = (0..positions * 64).map(value).collect();
    let place = cache.place(0);
    kernels.write_kv(layout, cache.bytes_mut(), place, &pages, 0, &kv, &kv);
    let queries: Vec<f32> = (0..128).map(value).collect();
    let spans = [AttentionSpan { pages: &pages, first_position: positions - 1, rows: 1 }];
    let request = AttentionRequest {
        layout,
        cache: cache.bytes(),
        place,
        heads: 4,
        scale: 0.2,
        queries: &queries,
        spans: &spans,
    };
    let mut out = vec![0.0; 128];
    kernels.attention(&request, &mut out);
    Some(out)
}

/// Pages are given from one sequence to the next with their old contents, which may be NaN.
#[test]
fn what_a_page_held_before_never_shows() {
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16] {
            for positions in [1, 15, 17, 63, 64, 65, 250, 257, 300] {
                let clean = attend(isa, format, positions, 0);
                assert!(clean.iter().flatten().all(|y| y.is_finite()));
                assert_eq!(
                    attend(isa, format, positions, 0xff),
                    clean,
                    "{isa} {format} {positions}"
                );
            }
        }
    }
}
