//! What the end-to-end suites share: real `shimmer` processes on loopback, a client, and waiting without sleeping blindly.
//!
//! It starts what it is told to and ends it again, also when a test panics; it knows nothing about arithmetic. Start
//! reading at [`cluster::Cluster`].

pub mod certificates;
pub mod chart;
pub mod client;
pub mod cluster;
pub mod compose;
pub mod control_group;
mod dice;
pub mod engine;
pub mod etcd;
pub mod faults;
pub mod file_server;
pub mod in_process;
pub mod lab;
pub mod mock_api;
pub mod models;
pub mod process;
pub mod prometheus;
pub mod quality;
pub mod random;
pub mod reference;
pub mod resuming;
pub mod simulated_network;
pub mod simulator;
pub mod wait;
pub mod workload;
