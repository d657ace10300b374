//! HOT PATH. Hints of one layer: which experts the next one will probably need, by owner.

use shimmer_proto::expert::v1::{Fence, PrefetchHint};

use super::ExpertTransport;

/// Predicted experts of one layer. Buffers keep their size from layer to layer.
#[derive(Debug, Default)]
pub struct Hints {
    layer: u32,
    /// By worker, most likely first.
    experts: Vec<Vec<u32>>,
    made: u64,
}

impl Hints {
    /// Splits ranked experts of a layer over those of their owners that want hints.
    pub fn split(&mut self, transport: &dyn ExpertTransport, layer: u32, ranked: &[u32]) {
        self.layer = layer;
        self.experts.resize_with(transport.workers().len(), Vec::new);
        self.experts.iter_mut().for_each(Vec::clear);
        for &expert in ranked {
            if let Some(worker) = transport.owner(layer, expert)
                && transport.wants_hints(worker)
            {
                self.experts[worker].push(expert);
            }
        }
        self.made += self.experts.iter().filter(|experts| !experts.is_empty()).count() as u64;
    }

    /// Sends one worker its share ahead of the work at `fence`.
    pub fn send(&self, transport: &mut dyn ExpertTransport, worker: usize, fence: Fence) {
        let experts = &self.experts[worker];
        if !experts.is_empty() {
            let hint = PrefetchHint {
                fence: Some(fence),
                layer: self.layer,
                experts: experts.clone(),
                checksum: 0,
            };
            transport.hint(worker, hint);
        }
    }

    /// Sends every worker its share ahead of everything at `fence`.
    pub fn send_all(&self, transport: &mut dyn ExpertTransport, fence: Fence) {
        (0..self.experts.len()).for_each(|worker| self.send(transport, worker, fence));
    }

    /// Messages made so far.
    pub fn made(&self) -> u64 {
        self.made
    }
}
