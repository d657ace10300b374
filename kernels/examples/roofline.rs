//! Prints how fast each instruction set reads weights, as a share of a plain read of the same memory in the same run.
//!
//! Times are wall times: nothing else should run.
//!
//! `cargo run --release -p shimmer-kernels --example roofline [MiB of weights [gemm|expert|gemv]]`

#![expect(clippy::print_stdout, reason = "a command-line tool")]
#![expect(clippy::cast_precision_loss, reason = "sizes as numbers to print")]
#![expect(clippy::cast_possible_truncation, reason = "random bytes")]

use std::hint::black_box;
use std::sync::LazyLock;
use std::time::Instant;

use shimmer_kernels::{
    ActivationFormat, ActivationRows, Arena, Expert, ExpertLayout, ExpertScratch, Isa, Kernels,
    Matrix, MatrixLayout, WeightFormat,
};

const ROUNDS: usize = 9;

/// Seconds on the clock.
fn now() -> f64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_secs_f64()
}

/// The shortest of several runs of each job, taken in turns so that a disturbance hits all of them.
fn best_of(jobs: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let mut best = vec![f64::MAX; jobs.len()];
    for _ in 0..ROUNDS {
        for (job, best) in jobs.iter_mut().zip(&mut best) {
            let start = now();
            job();
            *best = best.min(now() - start);
        }
    }
    best
}

/// Reads every byte, in as many streams as the pool has threads.
fn plain_read(bytes: &[u8]) {
    let threads = rayon::current_num_threads();
    rayon::scope(|scope| {
        for part in bytes.chunks(bytes.len().div_ceil(threads)) {
            scope.spawn(move |_| {
                black_box(shimmer_kernels::read_all(part));
            });
        }
    });
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("a pool of a few threads starts")
}

fn fill(bytes: &mut [u8], scales_from: usize) {
    let mut state = 7_u64;
    for (i, byte) in bytes.iter_mut().enumerate() {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Scales are f16 0x1fxx, about 0.007; weights never -128.
        *byte = if i < scales_from {
            (state >> 40) as u8 | 1
        } else if i % 2 == 1 {
            0x1f
        } else {
            (state >> 40) as u8
        };
    }
}

fn sets() -> Vec<Kernels> {
    [Isa::Avx512, Isa::Avx2, Isa::Scalar]
        .into_iter()
        .filter_map(|isa| Kernels::new(Some(isa)).ok())
        .collect()
}

fn matrices_from_memory(megabytes: usize) {
    for (format, activations) in [
        (WeightFormat::Q8G64, ActivationFormat::A8G64),
        (WeightFormat::Q8G64, ActivationFormat::A16G64),
        (WeightFormat::Q4G64, ActivationFormat::A8G64),
        (WeightFormat::Bf16, ActivationFormat::F32),
        (WeightFormat::F32, ActivationFormat::F32),
    ] {
        let cols = 2048;
        let row_bytes =
            MatrixLayout::new(format, 16, cols).expect("a small shape").total_bytes() / 16;
        let rows = (megabytes << 20) / row_bytes / 16 * 16;
        let layout = MatrixLayout::new(format, rows, cols).expect("a shape that fits memory");
        let mut arena = Arena::new(layout.total_bytes()).expect("memory for the weights");
        fill(arena.as_mut_slice(), layout.weight_bytes());
        let matrix = Matrix::from_bytes(layout, arena.as_slice()).expect("a whole matrix");
        let x: Vec<f32> = (0..cols).map(|i| (i % 17) as f32 - 8.0).collect();
        for threads in [1, 2] {
            pool(threads).install(|| {
                for kernels in sets() {
                    if kernels.isa() == Isa::Scalar && threads > 1 {
                        continue;
                    }
                    let mut rows = ActivationRows::new();
                    rows.set(&kernels, activations, &x, 1, cols);
                    let mut out = vec![0.0; layout.rows()];
                    let times = best_of(&mut [
                        &mut || plain_read(arena.as_slice()),
                        &mut || kernels.matmul(&matrix, &rows, black_box(&mut out)),
                    ]);
                    let gigabytes = layout.total_bytes() as f64 / 1e9;
                    println!(
                        "gemv {format:>5} x {activations:<6} {:<7} {threads} thread(s): {:6.2} GB/s, plain read {:6.2}, {:4.0} %",
                        kernels.isa(), gigabytes / times[1], gigabytes / times[0], 100.0 * times[0] / times[1],
                    );
                }
            });
        }
    }
}

/// Many experts, more than any cache holds, applied to one row each in turn.
fn experts_from_memory(megabytes: usize, format: WeightFormat) {
    let (hidden, intermediate) = (7168, 2048);
    let layout = ExpertLayout::new(hidden, intermediate, format).expect("a shape that fits");
    let count = ((megabytes << 20) / layout.slab_bytes()).max(2);
    let mut arena = Arena::new(count * layout.slab_bytes()).expect("memory for the experts");
    let scales_from = layout.parts()[0].2;
    for slab in arena.as_mut_slice().chunks_exact_mut(layout.slab_bytes()) {
        fill(slab, scales_from);
    }
    let x: Vec<f32> = (0..hidden).map(|i| (i % 17) as f32 - 8.0).collect();
    for threads in [1, 2] {
        pool(threads).install(|| {
            for kernels in sets().into_iter().filter(|k| k.isa() != Isa::Scalar) {
                let mut rows = ActivationRows::new();
                rows.set(&kernels, ActivationFormat::A8G64, &x, 1, hidden);
                let mut out = vec![0.0; hidden];
                let mut scratch = ExpertScratch::default();
                let times = best_of(&mut [&mut || plain_read(arena.as_slice()), &mut || {
                    for slab in arena.as_slice().chunks_exact(layout.slab_bytes()) {
                        let expert = Expert::from_slab(&layout, slab).expect("a whole slab");
                        kernels.expert(&expert, &rows, &[0], black_box(&mut out), &mut scratch);
                    }
                }]);
                let gigabytes = arena.len() as f64 / 1e9;
                println!(
                    "expert_ffn/m1_h7168_i2048_{format} {:<7} {threads} thread(s): {:6.2} GB/s, plain read {:6.2}, {:4.0} %",
                    kernels.isa(), gigabytes / times[1], gigabytes / times[0], 100.0 * times[0] / times[1],
                );
            }
        });
    }
}

fn products_from_cache() {
    for (label, rows, cols, format, activations) in [
        ("qkv", 960, 576, WeightFormat::Q8G64, ActivationFormat::A16G64),
        ("shared up", 1536, 576, WeightFormat::Q8G64, ActivationFormat::A16G64),
        ("shared down", 576, 1536, WeightFormat::Q8G64, ActivationFormat::A16G64),
        ("expert up", 2048, 7168, WeightFormat::Q4G64, ActivationFormat::A8G64),
        ("bf16", 576, 576, WeightFormat::Bf16, ActivationFormat::F32),
    ] {
        let layout = MatrixLayout::new(format, rows, cols).expect("a shape that fits");
        let mut arena = Arena::new(layout.total_bytes()).expect("memory for the weights");
        fill(arena.as_mut_slice(), layout.weight_bytes());
        let matrix = Matrix::from_bytes(layout, arena.as_slice()).expect("a whole matrix");
        for m in [1, 2, 4, 8, 64, 512] {
            let x: Vec<f32> = (0..m * cols).map(|i| (i % 17) as f32 - 8.0).collect();
            let mut line = String::new();
            for kernels in sets().into_iter().filter(|k| k.isa() != Isa::Scalar) {
                pool(1).install(|| {
                    let mut rows = ActivationRows::new();
                    rows.set(&kernels, activations, &x, m, cols);
                    let mut out = vec![0.0; m * layout.rows()];
                    let repeat = (2000 / m).max(1);
                    let times = best_of(&mut [&mut || {
                        for _ in 0..repeat {
                            kernels.matmul(&matrix, &rows, black_box(&mut out));
                        }
                    }]);
                    let macs = (layout.rows() * cols * m * repeat) as f64 / 1e9;
                    line += &format!(" {} {:7.1} GMAC/s", kernels.isa(), macs / times[0]);
                });
            }
            println!("gemm {label} {format}x{activations} {rows}x{cols} m={m}:{line}");
        }
    }
}

fn main() {
    let megabytes = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(512);
    let part = std::env::args().nth(2).unwrap_or_default();
    if "gemm".contains(&part) {
        products_from_cache();
    }
    if "expert".contains(&part) {
        experts_from_memory(megabytes, WeightFormat::Q4G64);
        experts_from_memory(megabytes, WeightFormat::Q8G64);
    }
    if "gemv".contains(&part) {
        matrices_from_memory(megabytes);
    }
}
