//! HOT PATH. The dense part of the model: one forward pass over the rows of a step.
//!
//! A row is one position of one sequence; a step mixes rows of many sequences, decode rows and prompt chunks. Every
//! operation gives each row the bits it would have alone. What differs between families is in the configuration and in
//! which weights a layer has; there is one forward pass.

mod attention;
mod buffers;
mod feed_forward;
mod pilot;
mod router;
mod rows;
mod weights;

use std::time::Duration;

use shimmer_kernels::{AttentionSpan, Kernels, RopeTable};
use shimmer_model::{Container, ModelConfig, NumericClass};

use crate::dispatch::{
    Exchange, ExpertTransport, FaultCounts, FaultPolicy, StepTrace, WorkerStats,
};
use crate::gating::RowFaults;
use crate::histogram::Histogram;
use crate::kv_cache::KvCache;
use crate::prediction::Recall;
use buffers::Buffers;
use feed_forward::{Place, Reach};
use pilot::{Ahead, Pilot};
use weights::Weights;

/// The rows of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepRows<'a> {
    /// Number of the step; grows for as long as the engine lives.
    pub step: u64,
    /// Token of every row.
    pub tokens: &'a [u32],
    /// Sequences of the rows, in order.
    pub spans: &'a [AttentionSpan<'a>],
}

/// What cannot change while the engine runs.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) config: ModelConfig,
    pub(crate) class: NumericClass,
    pub(crate) kernels: Kernels,
    pub(crate) rope: RopeTable,
    pub(crate) layer_deadline: Duration,
}

/// The forward pass with its buffers. Borrows the weights from the container's trunk.
#[derive(Debug)]
pub struct Trunk<'w> {
    shape: Shape,
    weights: Weights<'w>,
    buffers: Buffers,
    exchange: Exchange,
    faults: RowFaults,
    pilot: Pilot,
}

/// Settings of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct TrunkOptions {
    /// Most rows of a step.
    pub max_rows: usize,
    /// Most rows whose logits are computed at once.
    pub max_logit_rows: usize,
    /// Positions of the longest sequence.
    pub positions: usize,
    /// What is done about workers that are late or wrong.
    pub faults: FaultPolicy,
    /// Longest wait for the experts of one layer.
    pub layer_deadline: Duration,
}

impl<'w> Trunk<'w> {
    /// Finds every weight by name and makes the buffers.
    pub fn new(
        container: &Container,
        weights: &'w shimmer_model::Trunk,
        kernels: Kernels,
        options: TrunkOptions,
    ) -> Result<Self, shimmer_model::Error> {
        let config = container.config().clone();
        let weights = Weights::find(&config, weights)?;
        let rope = RopeTable::new(config.rope.theta, config.rope.rotary_dim, options.positions);
        let class = container.manifest().numeric_class;
        let buffers = Buffers::new(&config, options.max_rows, options.max_logit_rows);
        let exchange = Exchange::new(kernels, options.faults);
        let shape = Shape { config, class, kernels, rope, layer_deadline: options.layer_deadline };
        let (faults, pilot) = (RowFaults::default(), Pilot::default());
        Ok(Self { shape, weights, buffers, exchange, faults, pilot })
    }

    /// Runs all layers over the rows; keys and values go to `cache`. Afterwards [`Trunk::faults`] says which rows failed,
    /// and [`Trunk::logits`] gives the logits of the others.
    pub fn forward(
        &mut self,
        step: &StepRows<'_>,
        cache: &mut KvCache,
        transport: &mut dyn ExpertTransport,
    ) {
        let rows = step.tokens.len();
        assert_eq!(
            rows,
            step.spans.iter().map(|span| span.rows).sum::<usize>(),
            "a token for every row"
        );
        self.faults.reset(rows);
        self.buffers.resize(rows);
        self.weights.embed(step.tokens, &mut self.buffers.x);
        let hinting = (0..transport.workers().len()).any(|worker| transport.wants_hints(worker));
        if hinting {
            self.pilot.begin(step.spans, self.weights.layers.len());
        }
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let (shape, buffers) = (&self.shape, &mut self.buffers);
            attention::forward(shape, &layer.attention, index, step.spans, cache, buffers);
            feed_forward::norm(shape, layer.ffn_norm, buffers);
            let place = Place { step: step.step, layer: index };
            let ahead = || Ahead::after(index, &self.weights.layers);
            match &layer.ffn {
                weights::Ffn::Dense(mlp) => {
                    // With several dense layers in a row the last one predicts best, and it is early enough.
                    if let Some(ahead) = ahead().filter(|ahead| hinting && ahead.is_next(index)) {
                        self.pilot.predict(shape, ahead, &buffers.x, transport, &self.faults);
                        self.pilot.send(transport, place);
                    }
                    feed_forward::dense(shape, mlp, buffers);
                }
                weights::Ffn::Moe(moe) => {
                    let reach = Reach {
                        exchange: &mut self.exchange,
                        transport,
                        faults: &mut self.faults,
                        pilot: hinting.then(|| (&mut self.pilot, ahead())),
                    };
                    feed_forward::experts(shape, moe, place, reach, buffers);
                }
            }
        }
    }

    /// Rows of the last step that failed.
    pub fn faults(&self) -> &RowFaults {
        &self.faults
    }

    /// Counts of every worker since the start.
    pub fn worker_stats(&self) -> &[WorkerStats] {
        self.exchange.stats()
    }

    /// Forgets what was known of the worker at a place.
    pub fn forget_worker(&mut self, worker: usize) {
        self.exchange.forget(worker);
    }

    /// How long each layer's round waited for workers.
    pub fn layer_waits(&self) -> &Histogram {
        self.exchange.waits()
    }

    /// What went wrong with workers and was answered.
    pub fn fault_counts(&self) -> &FaultCounts {
        self.exchange.counts()
    }

    /// The rounds of a step that is traced.
    pub fn trace(&mut self) -> &mut StepTrace {
        self.exchange.trace()
    }

    /// How often predictions of the next layer's experts came true, and the hints sent.
    pub fn recall(&self) -> (Recall, u64) {
        (self.pilot.recall(), self.pilot.hints())
    }

    /// Logits of some rows of the last step, `[rows][vocab]`. At most as many rows as the buffers were made for.
    pub fn logits(&mut self, rows: &[usize]) -> &[f32] {
        let Self { shape, weights, buffers, .. } = self;
        let hidden = shape.config.hidden_size;
        let logits = &mut buffers.logits[..rows.len() * shape.config.vocab_size];
        buffers.h.resize(rows.len() * hidden, 0.0);
        for (&row, out) in rows.iter().zip(buffers.h.chunks_exact_mut(hidden)) {
            shape.kernels.rms_norm(
                &buffers.x[row * hidden..][..hidden],
                weights.norm,
                shape.config.rms_norm_eps,
                out,
            );
        }
        let format = shape.class.head_activations();
        buffers.activations.set(&shape.kernels, format, &buffers.h, rows.len(), hidden);
        shape.kernels.matmul(&weights.head, &buffers.activations, logits);
        logits
    }
}
