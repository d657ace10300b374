//! HOT PATH. The one router of the model: work and predictions are chosen by it alike.

use shimmer_kernels::{ActivationFormat, ActivationRows};

use super::Shape;
use super::weights::Moe;
use crate::gating::{Choices, RowFaults};

/// Buffers of a choice of experts.
#[derive(Debug, Default)]
pub(super) struct Router {
    rows: ActivationRows,
    /// `[rows][experts]`.
    scores: Vec<f32>,
    pub(super) choices: Choices,
}

impl Router {
    /// With room for the largest step.
    pub(super) fn with_capacity(scores: usize) -> Self {
        Self { scores: Vec::with_capacity(scores), ..Self::default() }
    }

    /// Chooses the experts of normed rows, `[rows][hidden]`. A row whose scores are not finite fails.
    pub(super) fn route(
        &mut self,
        shape: &Shape,
        moe: &Moe<'_>,
        layer: u32,
        h: &[f32],
        faults: &mut RowFaults,
    ) {
        let Shape { config, kernels, .. } = shape;
        let rule = config.gating.as_ref().expect("a model with routed experts has a gating rule");
        let count = h.len() / config.hidden_size;
        self.rows.set(kernels, ActivationFormat::F32, h, count, config.hidden_size);
        self.scores.resize(count * moe.experts, 0.0);
        kernels.matmul(&moe.router, &self.rows, &mut self.scores);
        self.choices.choose(rule, &self.scores, moe.experts, moe.bias, layer, faults);
    }
}
