//! Coordinators that die, stop or lose their clients: what was accepted is finished, here or elsewhere, byte for byte.

mod bench;
mod command;
mod coordinators;
mod drive;
mod stopping;
