//! What an assignment stands for, and how it is loaded.

use std::sync::Arc;

use shimmer_proto::expert::v1::{ErrorCode, LayerExperts, Ready, WorkerError};

use crate::{
    check::refusal,
    expert_core::{ExpertCore, FirstLoad},
    generations::Stamp,
    store::{Claim, LoadProgress, WantedLayer},
};

/// Experts that a coordinator may ask for under one stamp.
#[derive(Debug)]
pub(super) struct Assignment {
    stamp: Stamp,
    /// By layer and expert.
    owned: Vec<Vec<bool>>,
    /// What was assigned, without what was adopted.
    experts: u64,
    bytes: u64,
    /// Of what was assigned, then of what was adopted.
    claims: Vec<Box<dyn Claim>>,
}

impl Assignment {
    pub(super) fn owned(&self) -> &[Vec<bool>] {
        &self.owned
    }

    pub(super) fn is_empty(&self) -> bool {
        self.experts == 0
    }

    pub(super) fn owns(&self, layer: u32, expert: u32) -> bool {
        let of_layer = self.owned.get(layer as usize);
        of_layer.and_then(|owned| owned.get(expert as usize)).is_some_and(|&owned| owned)
    }

    /// What is told when it has been loaded, and when hints become worth sending or are no more.
    pub(super) fn ready(&self, wants_hints: bool) -> Ready {
        let Self { stamp: Stamp { epoch, generation }, experts, bytes, .. } = *self;
        Ready { epoch, generation, experts, bytes, wants_hints }
    }

    /// Adds experts that it does not own yet, as far as the store has them and room for them.
    pub(super) fn adopt(&mut self, core: &ExpertCore, wanted: &[WantedLayer]) -> Adopted {
        let mut adopted = Adopted { experts: 0, complete: true };
        for WantedLayer { layer, experts } in wanted {
            let new: Vec<u32> =
                experts.iter().copied().filter(|&expert| !self.owns(*layer, expert)).collect();
            if new.is_empty() {
                continue;
            }
            let wanted = WantedLayer { layer: *layer, experts: new };
            match core.store().adopt(&wanted) {
                Ok(claim) => {
                    adopted.experts += wanted.experts.len() as u64;
                    self.claims.push(claim);
                    own(core, &mut self.owned, &wanted);
                }
                // The work that wants them is refused, and says so to the coordinator.
                Err(error) => {
                    adopted.complete = false;
                    tracing::warn!(layer, %error, "experts of another worker cannot be had here");
                }
            }
        }
        adopted
    }
}

/// What became of experts to adopt.
#[derive(Debug, Clone, Copy)]
pub(super) struct Adopted {
    pub(super) experts: u64,
    /// Nothing was left out.
    pub(super) complete: bool,
}

/// Marks experts that the store has claimed.
fn own(core: &ExpertCore, owned: &mut [Vec<bool>], WantedLayer { layer, experts }: &WantedLayer) {
    let shape = core.layer(*layer).expect("a claimed layer has experts");
    let flags = &mut owned[*layer as usize];
    flags.resize(shape.experts as usize, false);
    experts.iter().for_each(|&expert| flags[expert as usize] = true);
}

/// An assignment that is to be loaded. It belongs to no thread, so that work goes on in its session meanwhile.
#[derive(Debug)]
pub struct Loading {
    pub(super) core: Arc<ExpertCore>,
    pub(super) number: u64,
    pub(super) stamp: Stamp,
    pub(super) wanted: Vec<WantedLayer>,
    /// Shown by the probes until the load has ended.
    pub(super) _first: Option<FirstLoad>,
}

/// The end of a load, for [`ExpertSession::loaded`](super::ExpertSession::loaded).
#[derive(Debug)]
pub struct Loaded {
    pub(super) number: u64,
    pub(super) outcome: Result<Assignment, WorkerError>,
}

impl Loading {
    /// Names the assignment in its session.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Experts that are assigned.
    pub fn experts(&self) -> u64 {
        self.wanted.iter().map(|layer| layer.experts.len() as u64).sum()
    }

    /// Loads what is to stay in memory. Takes as long as the disk takes.
    pub fn run(self, progress: &dyn LoadProgress) -> Loaded {
        let number = self.number;
        Loaded { number, outcome: self.load(progress) }
    }

    fn load(self, progress: &dyn LoadProgress) -> Result<Assignment, WorkerError> {
        let Self { core, stamp, wanted, .. } = self;
        let claim = core.store().claim(&wanted, progress).map_err(|error| {
            let detail = format!("worker {}: {error}", core.id());
            WorkerError { expert: error.expert(), ..refusal(ErrorCode::Load, None, detail) }
        })?;
        let mut owned = vec![Vec::new(); core.layer_count()];
        let (mut experts, mut bytes) = (0, 0);
        for of_layer in &wanted {
            own(&core, &mut owned, of_layer);
            let shape = core.layer(of_layer.layer).expect("a claimed layer has experts");
            let count = of_layer.experts.len() as u64;
            experts += count;
            bytes += count * shape.layout.slab_bytes() as u64;
        }
        Ok(Assignment { stamp, owned, experts, bytes, claims: vec![claim] })
    }
}

/// Checks the experts of a message: layers and experts that exist, each once.
pub(super) fn wanted(
    core: &ExpertCore,
    layers: &[LayerExperts],
) -> Result<Vec<WantedLayer>, WorkerError> {
    let malformed = |detail: String| refusal(ErrorCode::Malformed, None, detail);
    let mut wanted: Vec<WantedLayer> = Vec::with_capacity(layers.len().min(core.layer_count()));
    for LayerExperts { layer, experts } in layers {
        let layer = *layer;
        let shape = core.layer(layer);
        let shape =
            shape.ok_or_else(|| malformed(format!("layer {layer} has no routed experts")))?;
        if wanted.last().is_some_and(|last| last.layer >= layer) {
            return Err(malformed("the layers of an assignment are not ascending".to_owned()));
        }
        if !experts.is_sorted_by(|a, b| a < b) {
            return Err(malformed(format!("the experts of layer {layer} are not ascending")));
        }
        if let Some(&last) = experts.last().filter(|&&last| last >= shape.experts) {
            return Err(malformed(format!(
                "expert {last} of layer {layer}, which has {}",
                shape.experts
            )));
        }
        wanted.push(WantedLayer { layer, experts: experts.clone() });
    }
    Ok(wanted)
}
