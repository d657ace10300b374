//! Everything that a step writes, made once for the largest step. `resize` below the first size never allocates.

use shimmer_kernels::{ActivationRows, ExpertScratch};
use shimmer_model::{Ffn, ModelConfig};

use super::router::Router;

/// Rows of the step in progress.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Residual stream, `[rows][hidden]`.
    pub(super) x: Vec<f32>,
    /// A normed copy of it.
    pub(super) h: Vec<f32>,
    /// Output of a part, added to the residual stream afterwards.
    pub(super) y: Vec<f32>,
    /// Sums of routed experts.
    pub(super) routed: Vec<f32>,
    /// `[rows][heads][head_dim]`.
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    /// Queries or keys before their norm, later the attention's output.
    pub(super) heads: Vec<f32>,
    pub(super) router: Router,
    /// Quantised rows of the trunk's matrices.
    pub(super) activations: ActivationRows,
    /// Rows as the experts take them.
    pub(super) expert_rows: ActivationRows,
    pub(super) scratch: ExpertScratch,
    /// 0, 1, 2, ...: all rows, for a feed-forward part that every row passes.
    pub(super) all_rows: Vec<u32>,
    /// `[logit rows][vocab]`.
    pub(super) logits: Vec<f32>,
    sizes: Sizes,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: usize,
    q: usize,
    kv: usize,
}

impl Buffers {
    pub(super) fn new(config: &ModelConfig, max_rows: usize, max_logit_rows: usize) -> Self {
        let sizes = Sizes {
            hidden: config.hidden_size,
            q: config.attention.q_rows(),
            kv: config.attention.kv_rows(),
        };
        let experts = config.layers.iter().map(|layer| match layer.ffn {
            Ffn::Moe { experts, .. } => experts,
            Ffn::Dense { .. } => 0,
        });
        let floats = |width: usize| Vec::with_capacity(max_rows * width);
        Self {
            x: floats(sizes.hidden),
            h: floats(sizes.hidden),
            y: floats(sizes.hidden),
            routed: floats(sizes.hidden),
            q: floats(sizes.q),
            k: floats(sizes.kv),
            v: floats(sizes.kv),
            heads: floats(sizes.q),
            router: Router::with_capacity(max_rows * experts.max().unwrap_or(0)),
            activations: ActivationRows::new(),
            expert_rows: ActivationRows::new(),
            scratch: ExpertScratch::default(),
            all_rows: Vec::with_capacity(max_rows),
            logits: vec![0.0; max_logit_rows * config.vocab_size],
            sizes,
        }
    }

    /// Sets the number of rows.
    pub(super) fn resize(&mut self, rows: usize) {
        let Sizes { hidden, q, kv } = self.sizes;
        for buffer in [&mut self.x, &mut self.h, &mut self.y, &mut self.routed] {
            buffer.resize(rows * hidden, 0.0);
        }
        self.q.resize(rows * q, 0.0);
        self.heads.resize(rows * q, 0.0);
        self.k.resize(rows * kv, 0.0);
        self.v.resize(rows * kv, 0.0);
        self.all_rows.clear();
        self.all_rows.extend(0..u32::try_from(rows).expect("a step has fewer than 2^32 rows"));
    }

    /// Rows of the step.
    pub(super) fn rows(&self) -> usize {
        self.all_rows.len()
    }
}
