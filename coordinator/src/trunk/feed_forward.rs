//! HOT PATH. The feed-forward part of one layer: a dense one, or routed experts with the shared one computed while the
//! workers compute theirs.

use shimmer_kernels::Expert;

use super::buffers::Buffers;
use super::pilot::{Ahead, Pilot};
use super::weights::Moe;
use super::{Shape, rows};
use crate::dispatch::{Exchange, ExpertTransport, LayerRound};
use crate::gating::RowFaults;

/// Where in the order of all work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) step: u64,
    pub(super) layer: usize,
}

/// The norm before the feed-forward part, into `h`.
pub(super) fn norm(shape: &Shape, weight: &[f32], buffers: &mut Buffers) {
    let config = &shape.config;
    rows::rms_norm(
        &shape.kernels,
        &buffers.x,
        config.hidden_size,
        weight,
        config.rms_norm_eps,
        &mut buffers.h,
    );
}

/// x += mlp(h).
pub(super) fn dense(shape: &Shape, mlp: &Expert<'_>, buffers: &mut Buffers) {
    let Shape { config, kernels, class, .. } = shape;
    let count = buffers.rows();
    let Buffers { x, h, y, activations, scratch, all_rows, .. } = buffers;
    activations.set(kernels, class.trunk_activations(), h, count, config.hidden_size);
    kernels.expert(mlp, activations, all_rows, y, scratch);
    rows::add(kernels, x, y, config.hidden_size);
}

/// What a layer with routed experts reaches outside.
pub(super) struct Reach<'a> {
    pub(super) exchange: &'a mut Exchange,
    pub(super) transport: &'a mut dyn ExpertTransport,
    pub(super) faults: &'a mut RowFaults,
    /// While some worker wants hints: who predicts, and the next layer with routed experts.
    pub(super) pilot: Option<(&'a mut Pilot, Option<Ahead<'a>>)>,
}

/// x += routed(h), then x += shared(h).
pub(super) fn experts(
    shape: &Shape,
    moe: &Moe<'_>,
    place: Place,
    reach: Reach<'_>,
    buffers: &mut Buffers,
) {
    let Shape { config, kernels, class, .. } = shape;
    let (count, hidden) = (buffers.rows(), config.hidden_size);
    let Buffers { x, h, y, routed, router, activations, expert_rows, scratch, all_rows, .. } =
        buffers;
    let Reach { exchange, transport, faults, pilot } = reach;
    let layer = u32::try_from(place.layer).expect("layers are few");
    router.route(shape, moe, layer, h, faults);
    let hints = pilot.and_then(|(pilot, ahead)| {
        pilot.measure(layer, &router.choices, faults);
        Some(pilot.predict(shape, ahead?, x, transport, faults))
    });
    expert_rows.set(kernels, class.expert_activations(), h, count, hidden);
    let round = LayerRound {
        step: place.step,
        layer,
        activations: expert_rows,
        choices: &router.choices,
        hints,
        deadline: shape.layer_deadline,
    };
    let shared = || {
        if let Some(shared) = &moe.shared {
            activations.set(kernels, class.trunk_activations(), h, count, hidden);
            kernels.expert(shared, activations, all_rows, y, scratch);
        }
    };
    exchange.run(transport, &round, faults, shared, routed);
    rows::add(kernels, x, routed, hidden);
    if moe.shared.is_some() {
        rows::add(kernels, x, y, hidden);
    }
}
