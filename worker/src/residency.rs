//! Which expert of a layer lies in which slot. A plain data structure: it owns the slots' memory but never looks into it,
//! and knows no lock, file, thread or clock.
//!
//! A slot goes `Free -> Reserved -> Resident -> Free`, and its memory goes with the state: a free slot holds it, a reserved
//! one has given it to whoever loads, a resident one shares it with the leases. Memory that is read can therefore not be
//! written, and a slot that is loaded can be seen by every lookup but not computed on. Start reading at [`LayerResidency`].

mod layer;
mod policy;
mod slot;
mod usage;

pub use layer::{Demand, Grant, LayerResidency, Load, Skip, SlotCounts};
pub use policy::{Policy, RePin, Rules};
pub use slot::{Origin, Ticket};
pub use usage::{LayerUsage, Usage};
