//! Several hosts on one machine, and what can happen to them.
//!
//! A host is a network namespace; a bridge joins them, and this process stands outside as one more host, where clients
//! and proxies live. Everything vanishes with the values that made it, also when a test panics; what a killed test left
//! behind, the next one removes. Start reading at [`deployment::Deployment`].

pub mod cell;
pub mod deployment;
pub mod echo;
pub mod etcd_cell;
pub mod fault;
pub mod memory;
pub mod network;
pub mod slow;
pub mod stream;
pub mod wire;
