//! What a worker holds beside experts.

use shimmer_model::{Container, Ffn, ModelConfig};

use super::{
    available::{Available, anonymous_bytes},
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

/// Most rows of one work of a worker, which announces it: coordinators cut larger steps into parts. The largest step that
/// they form unless they are told otherwise.
pub const STEP_ROWS: usize = 512;

impl Budget {
    /// The memory of a process that is one worker.
    pub fn of_worker(
        container: &Container,
        tiers: &TierOptions,
        threads: usize,
    ) -> Result<Self, Error> {
        let shape = WorkShape::of(container.config(), STEP_ROWS, threads);
        Self::new(Available::measure(), tiers.ram, shape.terms())
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

    /// What a worker holds beside experts once it has computed its largest work.
    pub fn terms(&self) -> Vec<Term> {
        let Self { hidden, intermediate, experts_per_row, rows, threads } = *self;
        let anonymous =
            |name, bytes: usize| Term { name, bytes: bytes as u64, kind: Kind::Anonymous };
        let float = size_of::<f32>();
        let sum = size_of::<i64>();
        // A row of 8-bit values with a scale per group, or of 32-bit values: at most the latter.
        let row = hidden * float;
        vec![
            anonymous("outputs of experts", rows * (experts_per_row * row + hidden * sum)),
            // As received and as decoded, and one answer as sent.
            anonymous("messages", rows * (2 * row + hidden * sum)),
            // Two projections and the quantised product.
            anonymous("between two matrices", threads * rows * intermediate * 3 * float),
            anonymous("threads and allocator", (8 << 20) + threads * (256 << 10)),
            Term { name: "held already", bytes: anonymous_bytes().unwrap_or(0), kind: Kind::Held },
        ]
    }
}
