//! Which of a worker's experts live where: VRAM first, then memory that is never given up, then a bounded cache with the
//! drive behind it. Decides only; start at [`plan`] for the rules of the settings and at [`place`] for the order of tiers.

mod error;
mod rules;
mod tiers;

pub use error::PlanError;
pub use rules::{LayerPlan, OwnedLayer, TierPlan, plan};
pub use tiers::{Candidate, ExpertId, Gpu, Placed, place};
