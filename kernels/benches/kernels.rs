//! Hot functions by shape, as bytes of weights read per second; `plain_read` is the yardstick of the same run.
//!
//! Weights are more than any cache holds where the name says `memory`, and are visited in turn.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "small numbers as inputs"
)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shimmer_kernels::{
    ActivationFormat, ActivationRows, Arena, AttentionRequest, AttentionSpan, Expert, ExpertLayout,
    ExpertScratch, Isa, Kernels, KvFormat, KvLayout, Matrix, MatrixLayout, PAGE_POSITIONS,
    PagePlace, WeightFormat, read_all,
};

const MEMORY_BYTES: usize = 512 << 20;

fn sets() -> Vec<Kernels> {
    [Isa::Avx512, Isa::Avx2].into_iter().filter_map(|isa| Kernels::new(Some(isa)).ok()).collect()
}

/// Bytes that are plausible weights and, as f16, small scales.
fn arena(bytes: usize) -> Arena {
    let mut arena = Arena::new(bytes).expect("memory for the bench");
    for (i, pair) in arena.as_mut_slice().chunks_exact_mut(2).enumerate() {
        pair.copy_from_slice(&[(i % 251) as u8 | 1, 0x1f]);
    }
    arena
}

fn values(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 17) as f32 - 8.0).collect()
}

fn expert_ffn(c: &mut Criterion) {
    let (hidden, intermediate) = (7168, 2048);
    let mut group = c.benchmark_group("expert_ffn");
    group.sample_size(10);
    for format in [WeightFormat::Q4G64, WeightFormat::Q8G64] {
        let layout = ExpertLayout::new(hidden, intermediate, format).expect("a shape that fits");
        let count = MEMORY_BYTES / layout.slab_bytes();
        let arena = arena(count * layout.slab_bytes());
        let x = values(hidden);
        group.throughput(Throughput::Bytes(layout.slab_bytes() as u64));
        let mut next = (0..count).cycle();
        let mut slab = || {
            let at = next.next().unwrap_or(0) * layout.slab_bytes();
            &arena.as_slice()[at..at + layout.slab_bytes()]
        };
        group.bench_function(format!("plain_read_{format}"), |b| {
            b.iter(|| black_box(read_all(slab())))
        });
        for kernels in sets() {
            let mut rows = ActivationRows::new();
            rows.set(&kernels, ActivationFormat::A8G64, &x, 1, hidden);
            let mut out = vec![0.0; hidden];
            let mut scratch = ExpertScratch::default();
            group.bench_function(
                BenchmarkId::new(format!("m1_h7168_i2048_{format}"), kernels.isa()),
                |b| {
                    b.iter(|| {
                        let expert = Expert::from_slab(&layout, slab()).expect("a whole slab");
                        kernels.expert(&expert, &rows, &[0], black_box(&mut out), &mut scratch);
                    });
                },
            );
        }
    }
    group.finish();
}

fn gemm(c: &mut Criterion) {
    let mut group = c.benchmark_group("gemm");
    group.sample_size(10);
    for (format, activations, rows, cols) in [
        (WeightFormat::Q8G64, ActivationFormat::A16G64, 1536, 576),
        (WeightFormat::Q8G64, ActivationFormat::A8G64, 1536, 576),
        (WeightFormat::Q4G64, ActivationFormat::A8G64, 2048, 7168),
        (WeightFormat::Bf16, ActivationFormat::F32, 576, 576),
    ] {
        let layout = MatrixLayout::new(format, rows, cols).expect("a shape that fits");
        let arena = arena(layout.total_bytes());
        let matrix = Matrix::from_bytes(layout, arena.as_slice()).expect("a whole matrix");
        for m in [1, 8, 64] {
            group.throughput(Throughput::Elements((rows * cols * m) as u64));
            for kernels in sets() {
                let mut x = ActivationRows::new();
                x.set(&kernels, activations, &values(m * cols), m, cols);
                let mut out = vec![0.0; m * rows];
                let name = format!("m{m}_n{rows}_k{cols}_{format}_{activations}");
                group.bench_function(BenchmarkId::new(name, kernels.isa()), |b| {
                    b.iter(|| kernels.matmul(&matrix, &x, black_box(&mut out)));
                });
            }
        }
    }
    group.finish();
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    group.sample_size(10);
    let (heads, positions) = (9, 1024);
    let layout = KvLayout { format: KvFormat::F32, kv_heads: 3, head_dim: 64 };
    let place = PagePlace { stride: layout.page_bytes(), offset: 0 };
    let pages: Vec<u32> = (0..).take(positions / PAGE_POSITIONS).collect();
    let cache = arena(layout.page_bytes() * pages.len());
    let width = heads * layout.head_dim;
    for (name, first_position, rows) in
        [("decode_1024", positions - 1, 1), ("prefill_256_at_768", 768, 256)]
    {
        let queries = values(rows * width);
        let spans = [AttentionSpan { pages: &pages, first_position, rows }];
        let request = AttentionRequest {
            layout,
            cache: cache.as_slice(),
            place,
            heads,
            scale: 0.125,
            queries: &queries,
            spans: &spans,
        };
        let mut out = vec![0.0; rows * width];
        for kernels in sets() {
            group.bench_function(BenchmarkId::new(name, kernels.isa()), |b| {
                b.iter(|| kernels.attention(&request, black_box(&mut out)));
            });
        }
    }
    group.finish();
}

fn rows(c: &mut Criterion) {
    let mut group = c.benchmark_group("rows");
    for kernels in sets() {
        let (x, weight) = (values(7168), values(7168));
        let mut out = vec![0.0; 7168];
        group.bench_function(BenchmarkId::new("rms_norm_7168", kernels.isa()), |b| {
            b.iter(|| kernels.rms_norm(&x, &weight, 1e-5, black_box(&mut out)));
        });
        let mut gate = values(2048);
        group.bench_function(BenchmarkId::new("swiglu_2048", kernels.isa()), |b| {
            b.iter(|| kernels.swiglu(black_box(&mut gate), &weight[..2048]));
        });
        let mut quantised = ActivationRows::new();
        group.bench_function(BenchmarkId::new("quantise_7168_a8g64", kernels.isa()), |b| {
            b.iter(|| quantised.set(&kernels, ActivationFormat::A8G64, black_box(&x), 1, 7168));
        });
        let mut sums = vec![0; 7168];
        group.bench_function(BenchmarkId::new("accumulate_7168", kernels.isa()), |b| {
            b.iter(|| kernels.accumulate(black_box(&mut sums), 0.3, &x).is_ok());
        });
    }
    group.finish();
}

criterion_group!(benches, expert_ffn, gemm, attention, rows);
criterion_main!(benches);
