//! The expert stream between real clients and servers on loopback: what is refused, what is counted, what survives.

mod bench;
mod cluster;
mod drain;
mod faults;
mod frames;
mod generations;
mod hello;
mod meddler;
mod memory;
mod raw;
mod transport;
