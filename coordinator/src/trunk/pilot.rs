//! HOT PATH. Predicts which experts the next layer with routed experts will want: its own norm and router, applied to the
//! state before this layer's experts have been added. Nothing of it enters the state.
//!
//! The path is taken only while some worker wants hints; else nothing here is called and its buffers stay empty.

use shimmer_kernels::AttentionSpan;
use shimmer_proto::expert::v1::Fence;
use shimmer_proto::limits::MAX_HINT_EXPERTS;

use super::feed_forward::Place;
use super::router::Router;
use super::weights::{Ffn, Layer, Moe};
use super::{Shape, rows};
use crate::dispatch::{ExpertTransport, Hints};
use crate::gating::{Choices, RowFaults};
use crate::prediction::{Predicted, Ranking, Recall, RecallMeter};

/// Rows that are looked at. The best guess of each of them fills a hint; the others of a prompt would only repeat it.
const ROWS_MAX: usize = MAX_HINT_EXPERTS;

/// The layer that is predicted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead<'a> {
    layer: u32,
    norm: &'a [f32],
    moe: &'a Moe<'a>,
}

impl<'a> Ahead<'a> {
    /// The next layer with routed experts after `layer`.
    pub(super) fn after(layer: usize, layers: &'a [Layer<'a>]) -> Option<Self> {
        let next = layer + 1;
        layers[next..].iter().zip(next..).find_map(|(layer, index)| match &layer.ffn {
            Ffn::Moe(moe) => Some(Self {
                layer: u32::try_from(index).expect("layers are few"),
                norm: layer.ffn_norm,
                moe,
            }),
            Ffn::Dense(_) => None,
        })
    }

    /// Whether it follows directly.
    pub(super) fn is_next(&self, layer: usize) -> bool {
        self.layer as usize == layer + 1
    }
}

/// Predictions with their buffers and their record.
#[derive(Debug, Default)]
pub(super) struct Pilot {
    h: Vec<f32>,
    router: Router,
    /// Rows without a prediction. Not a fault of the step: their own layer says what is wrong with them.
    skipped: RowFaults,
    ranking: Ranking,
    hints: Hints,
    /// Layer and rows of the prediction that waits for the truth.
    open: Option<(u32, usize)>,
    meter: RecallMeter,
}

impl Pilot {
    /// Starts a step.
    pub(super) fn begin(&mut self, spans: &[AttentionSpan<'_>], layers: usize) {
        self.open = None;
        self.meter.begin(spans, layers);
    }

    /// Predicts from the state `x`, `[rows][hidden]`.
    pub(super) fn predict(
        &mut self,
        shape: &Shape,
        ahead: Ahead<'_>,
        x: &[f32],
        transport: &dyn ExpertTransport,
        faults: &RowFaults,
    ) -> &Hints {
        let Self { h, router, skipped, ranking, hints, .. } = self;
        let hidden = shape.config.hidden_size;
        let rows = (x.len() / hidden).min(ROWS_MAX);
        h.resize(rows * hidden, 0.0);
        let x = &x[..rows * hidden];
        rows::rms_norm(&shape.kernels, x, hidden, ahead.norm, shape.config.rms_norm_eps, h);
        skipped.copy(faults, rows);
        router.route(shape, ahead.moe, ahead.layer, h, skipped);
        ranking.rank(&router.choices, rows, skipped, ahead.moe.experts, MAX_HINT_EXPERTS);
        hints.split(transport, ahead.layer, ranking.experts());
        self.open = Some((ahead.layer, rows));
        &self.hints
    }

    /// Sends what was predicted at a layer that sends no work.
    pub(super) fn send(&self, transport: &mut dyn ExpertTransport, place: Place) {
        let (epoch, generation) = transport.fence_base();
        let layer = u32::try_from(place.layer).expect("layers are few");
        let fence = Fence { epoch, generation, step: place.step, layer, attempt: 0, part: 0 };
        self.hints.send_all(transport, fence);
    }

    /// Compares what a layer chose with what was predicted for it.
    pub(super) fn measure(&mut self, layer: u32, chosen: &Choices, faults: &RowFaults) {
        let open = self.open.take().filter(|(predicted, _)| *predicted == layer);
        let predicted = open.map(|(_, rows)| Predicted {
            choices: &self.router.choices,
            rows,
            skipped: &self.skipped,
            ranking: &self.ranking,
        });
        self.meter.measure(layer as usize, chosen, faults, predicted);
    }

    /// How often predictions came true.
    pub(super) fn recall(&self) -> Recall {
        self.meter.recall()
    }

    /// Hints sent.
    pub(super) fn hints(&self) -> u64 {
        self.hints.made()
    }
}
