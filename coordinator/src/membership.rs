//! Who belongs to the cluster, who decides where experts lie, and how a coordinator changes from one placement to the next.
//!
//! Cores that decide without a socket, a task or a clock: [`view`] makes members of what the store and the links know,
//! [`leader`] turns members into writes of the store, [`decided`] reads the placement that was written, [`followed`] remembers which was taken up, and [`switch`] takes
//! one coordinator from its generation to that one. The shell around them carries out what they say and tells them what became of it.

pub mod decided;
pub mod followed;
pub mod leader;
pub mod switch;
pub mod view;
