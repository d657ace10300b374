//! What a worker holds beside experts.

use shimmer_model::{Container, Ffn, ModelConfig};

use super::{
    available::{Available, anonymous_bytes},
    messages::MessageShape,
    terms::{Budget, Kind, Term},
};
use crate::{error::Error, tier_options::TierOptions};

/// What decides the size of a worker's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkShape {
    /// Values of a row.
    pub hidden: usize,
    /// Values between the matrices of the widest expert.
    pub intermediate: usize,
    /// Experts of a row.
    pub experts_per_row: usize,
    /// Rows of the largest step.
    pub rows: usize,
    /// Threads that compute.
    pub threads: usize,
}

/// The term of everything on its way from and to coordinators.
const MESSAGES: &str = "messages";

/// Bytes of each row and value between the matrices of an expert: two projections and the quantised product.
const SCRATCH_BYTES: usize = 3 * size_of::<f32>();

/// Rows of an expert up to which buffers between its matrices are kept apart from those of larger works.
pub(crate) const SMALL_ROWS: usize = 16;

/// Most rows of one work of a worker, which announces it: coordinators cut larger steps into parts. The largest step that
/// they form unless they are told otherwise.
pub const STEP_ROWS: usize = 512;

impl Budget {
    /// The memory of a process that is one worker of up to so many coordinators.
    pub fn of_worker(
        container: &Container,
        tiers: &TierOptions,
        threads: usize,
        coordinators: usize,
    ) -> Result<Self, Error> {
        Self::of_worker_with(Available::measure(), container, tiers, threads, coordinators)
    }

    /// The same on a host that has so much memory.
    pub fn of_worker_with(
        available: Available,
        container: &Container,
        tiers: &TierOptions,
        threads: usize,
        coordinators: usize,
    ) -> Result<Self, Error> {
        let shape = WorkShape::of(container.config(), STEP_ROWS, threads);
        let rows = u32::try_from(STEP_ROWS).expect("a step is small");
        let messages = MessageShape::of(container.config(), rows);
        let bytes = coordinators.saturating_mul(messages.bytes() + shape.small_scratch());
        let terms = shape.own_terms().into_iter().chain([anonymous(MESSAGES, bytes)]);
        Self::new(available, tiers.ram, terms.collect())
    }
}

impl WorkShape {
    /// Of a model.
    pub fn of(model: &ModelConfig, rows: usize, threads: usize) -> Self {
        let widths = model.layers.iter().map(|layer| match layer.ffn {
            Ffn::Moe { intermediate, .. } => intermediate,
            Ffn::Dense { .. } => 0,
        });
        Self {
            hidden: model.hidden_size,
            intermediate: widths.max().unwrap_or(0),
            experts_per_row: model.gating.map_or(0, |gating| gating.top_k),
            rows,
            threads,
        }
    }

    /// What the workers of a process hold beside experts once they have computed their largest work, if their coordinator is
    /// in the same process.
    pub fn terms(&self) -> Vec<Term> {
        let Self { hidden, rows, .. } = *self;
        let row = hidden * size_of::<f32>();
        // As sent and as decoded, and one answer.
        let messages = rows * (2 * row + hidden * size_of::<i64>());
        self.own_terms().into_iter().chain([anonymous(MESSAGES, messages)]).collect()
    }

    /// The same without messages.
    fn own_terms(&self) -> Vec<Term> {
        let Self { hidden, intermediate, experts_per_row, rows, threads } = *self;
        let float = size_of::<f32>();
        let sum = size_of::<i64>();
        // A row of 8-bit values with a scale per group, or of 32-bit values: at most the latter.
        let row = hidden * float;
        vec![
            anonymous("outputs of experts", rows * (experts_per_row * row + hidden * sum)),
            // Two projections and the quantised product.
            anonymous("between two matrices", threads * rows * intermediate * SCRATCH_BYTES),
            anonymous("threads and allocator", (8 << 20) + threads * (256 << 10)),
            Term { name: "held already", bytes: anonymous_bytes().unwrap_or(0), kind: Kind::Held },
        ]
    }

    /// What lies between two matrices of small work, which each connection computes by itself.
    fn small_scratch(&self) -> usize {
        SMALL_ROWS.min(self.rows) * self.intermediate * SCRATCH_BYTES
    }
}

fn anonymous(name: &'static str, bytes: usize) -> Term {
    Term { name, bytes: bytes as u64, kind: Kind::Anonymous }
}
