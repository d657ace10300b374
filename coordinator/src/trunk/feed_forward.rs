//! HOT PATH. The feed-forward part of one layer: a dense one, or routed experts with the shared one computed while the
//! workers compute theirs.

use shimmer_kernels::{ActivationFormat, Expert};

use super::buffers::Buffers;
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

/// x += routed(h), then x += shared(h).
pub(super) fn experts(
    shape: &Shape,
    moe: &Moe<'_>,
    place: Place,
    exchange: &mut Exchange,
    transport: &mut dyn ExpertTransport,
    faults: &mut RowFaults,
    buffers: &mut Buffers,
) {
    let Shape { config, kernels, class, .. } = shape;
    let (count, hidden) = (buffers.rows(), config.hidden_size);
    let Buffers {
        x,
        h,
        y,
        routed,
        scores,
        choices,
        activations,
        expert_rows,
        router_rows,
        scratch,
        all_rows,
        ..
    } = buffers;
    let rule = config.gating.as_ref().expect("a model with routed experts has a gating rule");
    let layer = u32::try_from(place.layer).expect("layers are few");
    router_rows.set(kernels, ActivationFormat::F32, h, count, hidden);
    scores.resize(count * moe.experts, 0.0);
    kernels.matmul(&moe.router, router_rows, scores);
    choices.choose(rule, scores, moe.experts, moe.bias, layer, faults);
    expert_rows.set(kernels, class.expert_activations(), h, count, hidden);
    let round = LayerRound {
        step: place.step,
        layer,
        activations: expert_rows,
        choices,
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
