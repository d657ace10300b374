use proptest::prelude::*;

use crate::simd::tests::levels;
use crate::testing::{Rng, same_bits};
use crate::{
    ATTENTION_BLOCK, AttentionRequest, AttentionSpan, Kernels, KvFormat, KvLayout, PAGE_POSITIONS,
    PagePlace,
};

/// A cache of one sequence whose pages are scattered, and queries for every position.
struct Case {
    layout: KvLayout,
    heads: usize,
    positions: usize,
    queries: Vec<f32>,
    cache: Vec<u8>,
    place: PagePlace,
    pages: Vec<u32>,
}

impl Case {
    fn new(
        format: KvFormat,
        kv_heads: usize,
        group: usize,
        head_dim: usize,
        positions: usize,
        seed: u64,
    ) -> Self {
        let mut rng = Rng(seed);
        let layout = KvLayout { format, kv_heads, head_dim };
        let count = positions.div_ceil(PAGE_POSITIONS);
        let place = PagePlace { stride: layout.page_bytes() + 64, offset: 64 };
        // Unwritten slots hold NaN, so that reading one shows.
        let mut cache = vec![0xff; place.stride * count + 64];
        let pages: Vec<u32> = (0..count as u32).rev().collect();
        let width = kv_heads * head_dim;
        let (k, v) = (rng.floats(positions * width, 1), rng.floats(positions * width, 4));
        let heads = kv_heads * group;
        let queries = rng.floats(positions * heads * head_dim, 2);
        let (kernels, _) = levels();
        kernels.write_kv(layout, &mut cache, place, &pages, 0, &k, &v);
        Self { layout, heads, positions, queries, cache, place, pages }
    }

    /// All positions in chunks of `chunk` rows, or in one call if `together`.
    fn run(&self, kernels: &Kernels, chunk: usize, together: bool) -> Vec<f32> {
        let width = self.heads * self.layout.head_dim;
        let mut out = vec![f32::NAN; self.positions * width];
        let spans: Vec<AttentionSpan<'_>> = (0..self.positions)
            .step_by(chunk)
            .map(|first_position| AttentionSpan {
                pages: &self.pages,
                first_position,
                rows: chunk.min(self.positions - first_position),
            })
            .collect();
        let request = AttentionRequest {
            layout: self.layout,
            cache: &self.cache,
            place: self.place,
            heads: self.heads,
            scale: 0.2,
            queries: &self.queries,
            spans: &spans,
        };
        if together {
            kernels.attention(&request, &mut out);
            return out;
        }
        for span in &spans {
            let rows = span.first_position * width..(span.first_position + span.rows) * width;
            let one = AttentionRequest {
                queries: &self.queries[rows.clone()],
                spans: std::slice::from_ref(span),
                ..request
            };
            kernels.attention(&one, &mut out[rows]);
        }
        out
    }
}

/// Every level, chunk size and grouping of calls gives the bits of the scalar kernels on the whole sequence.
fn check(case: &Case, chunks: &[usize]) {
    let (scalar, others) = levels();
    let expected = case.run(&scalar, case.positions, true);
    assert!(expected.iter().all(|v| v.is_finite()), "no unwritten slot is read");
    for kernels in others {
        for &chunk in chunks {
            for together in [false, true] {
                let found = case.run(&kernels, chunk, together);
                assert!(
                    same_bits(&expected, &found),
                    "{} chunk {chunk} together {together}",
                    kernels.isa()
                );
            }
        }
    }
}

#[test]
fn chunks_do_not_change_bits() {
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16] {
        check(&Case::new(format, 2, 3, 32, 130, 5), &[1, 7, 64, 130]);
    }
}

#[test]
fn blocks_of_positions_fold_in_order() {
    let positions = 2 * ATTENTION_BLOCK + 9;
    check(&Case::new(KvFormat::F32, 1, 2, 16, positions, 6), &[100, positions]);
}

#[test]
fn a_single_query_sees_one_position() {
    check(&Case::new(KvFormat::F32, 3, 1, 64, 1, 7), &[1]);
}

#[test]
fn threads_do_not_change_bits() {
    let case = Case::new(KvFormat::F32, 3, 3, 64, 300, 8);
    let kernels = Kernels::new(None).unwrap();
    let in_pool = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| case.run(&kernels, 300, true))
    };
    assert!(same_bits(&in_pool(1), &in_pool(2)));
}

#[test]
fn scores_far_apart_leave_the_largest() {
    let mut case = Case::new(KvFormat::F32, 1, 1, 16, 300, 9);
    case.queries.iter_mut().for_each(|q| *q *= 1000.0);
    check(&case, &[300]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn levels_agree(
        kv_heads in 1_usize..4, group in 1_usize..10, head_dim in 1_usize..70, positions in 1_usize..290,
        chunk in 5_usize..300, format in prop::sample::select(KvFormat::ALL), seed: u64,
    ) {
        check(&Case::new(format, kv_heads, group, head_dim, positions, seed), &[chunk]);
    }
}
