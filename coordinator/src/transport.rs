//! Workers behind sockets.
//!
//! Each worker that the membership store names has a seat and a `link` that connects, greets, assigns, tests, and then
//! carries bytes; it reconnects for ever. `control` lets the cores of [`membership`](crate::membership) decide and has
//! placements loaded. The `board` is what all of them agree on. [`RemoteWorkers`] is the step thread's end: it takes a new
//! placement between two steps, never waits without a deadline and lets only awaited replies through.

mod assignments;
mod board;
mod control;
mod counters;
mod handle;
mod heat;
mod lane;
mod latency;
mod link;
mod own;
mod pace;
mod peer;
mod plans;
mod probe;
mod remote;
mod session;
mod stage;
mod status;

use std::time::Duration;

use shimmer_kernels::{ActivationRows, MATH_ID};
use shimmer_model::Container;
use shimmer_proto::{
    PROTOCOL_VERSION, expert::v1::Identity, membership::records::CoordinatorRecord, tls::Dialer,
};

use crate::membership::leader::Timings;

pub use counters::{RemoteCounters, RemoteObserver};
pub use handle::ClusterHandle;
pub use own::OwnExperts;
pub use remote::RemoteWorkers;
pub use stage::{SimulatedHost, Stage, Task};
pub use status::{ClusterStatus, LinkState};

/// Settings of the links to workers.
#[derive(Debug, Clone)]
pub struct RemoteConfig {
    /// Opens the connections: with mutual TLS, or without.
    pub dialer: Dialer,
    /// Name of this coordinator in the cluster and in the workers' logs.
    pub coordinator_id: String,
    /// What others are told about this coordinator; nothing if it is none of theirs.
    pub announced: Option<CoordinatorRecord>,
    /// Version and commit of the binary.
    pub build: String,
    /// Longest wait for a connection, name resolution included.
    pub connect_timeout: Duration,
    /// Longest wait for a hello, and for the answer to a self-test.
    pub hello_timeout: Duration,
    /// A load that tells no progress for this long is given up. Not a limit of the whole load: that takes what the disk
    /// takes.
    pub load_stall_timeout: Duration,
    /// No layer deadline is shorter, however fast the worker was.
    pub layer_floor: Duration,
    /// No layer deadline is longer; also the deadline while nothing has been measured.
    pub layer_ceiling: Duration,
    /// A worker that owes an answer for so long is asked whether it is alive.
    pub probe_after: Duration,
    /// Longest wait for the answer; two in a row that do not come end the session.
    pub probe_timeout: Duration,
    /// Time from one such question to the next.
    pub probe_interval: Duration,
    /// A worker that is alive but owes an answer for so long, whether it is still awaited or not, gets a new session.
    pub suspect_patience: Duration,
    /// Copies of an expert in all, on different hosts as far as there are some.
    pub replicas: usize,
    /// When placements follow what happens to the workers.
    pub timings: Timings,
    /// A new placement does not wait longer for those of its workers that are away.
    pub switch_patience: Duration,
    /// First wait before another attempt; it doubles with each failure.
    pub backoff_min: Duration,
    /// Longest wait between attempts.
    pub backoff_max: Duration,
    /// Wait before a worker that was refused is tried again: it will not change by itself.
    pub refused_retry: Duration,
    /// Threads that carry bytes; the workers are shared out over them.
    pub io_threads: usize,
    /// Where the links run, and by which clock.
    pub stage: Stage,
}

impl RemoteConfig {
    /// How long an answer to a probe is believed: until the next one is overdue.
    fn alive_for(&self) -> Duration {
        self.probe_interval + self.probe_timeout * 2
    }
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            dialer: Dialer::plaintext(),
            coordinator_id: "coordinator".to_owned(),
            announced: None,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            connect_timeout: Duration::from_secs(5),
            hello_timeout: Duration::from_secs(10),
            load_stall_timeout: Duration::from_secs(120),
            // A busy host stops a process for hundreds of milliseconds; a worker is not lost for that.
            layer_floor: Duration::from_secs(2),
            layer_ceiling: Duration::from_secs(10),
            // Both together find a dead worker within the two seconds that a request may be held up.
            probe_after: Duration::from_millis(500),
            probe_timeout: Duration::from_millis(500),
            probe_interval: Duration::from_millis(500),
            suspect_patience: Duration::from_secs(60),
            replicas: 1,
            timings: Timings::default(),
            switch_patience: Duration::from_secs(5),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            refused_retry: Duration::from_secs(5),
            // One moves more than a 10 Gbit/s network brings; more threads only fight for cores with the compute.
            io_threads: 1,
            stage: Stage::Threads,
        }
    }
}

/// What the links must know about the model.
#[derive(Debug, Clone)]
pub struct ClusterModel {
    identity: Identity,
    /// Bytes of one activation row in a work message.
    row_bytes: usize,
    hidden: usize,
    /// Layers with routed experts, ascending.
    layers: Vec<ClusterLayer>,
}

#[derive(Debug, Clone)]
struct ClusterLayer {
    layer: u32,
    slab_bytes: u64,
    /// Self-test digest of every expert.
    self_tests: Vec<[u8; 16]>,
}

/// Links that cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The container has a self-test digest that is none.
    #[error("the self-test of expert {expert} in layer {layer} is not 16 bytes of hex")]
    SelfTest {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
    },
    /// A thread could not be started.
    #[error("starting the thread of a link")]
    Thread(#[from] std::io::Error),
    /// The container could not be read.
    #[error(transparent)]
    Model(Box<shimmer_model::Error>),
}

impl From<shimmer_model::Error> for RemoteError {
    fn from(error: shimmer_model::Error) -> Self {
        Self::Model(Box::new(error))
    }
}

impl ClusterModel {
    /// Collects identity, sizes and self-tests of a container. `build` is told to workers and not compared.
    pub fn from_container(container: &Container, build: &str) -> Result<Self, RemoteError> {
        let manifest = container.manifest();
        let config = container.config();
        let mut layers = Vec::new();
        for (layer, experts) in config.moe_layers() {
            let self_tests = (0..experts)
                .map(|expert| {
                    let text = &container.expert_entry(layer, expert)?.self_test;
                    let mut digest = [0; 16];
                    hex::decode_to_slice(text, &mut digest)
                        .map_err(|_| RemoteError::SelfTest { layer, expert })?;
                    Ok(digest)
                })
                .collect::<Result<Vec<_>, RemoteError>>()?;
            let slab_bytes = container.expert_layout(layer)?.slab_bytes() as u64;
            layers.push(ClusterLayer { layer, slab_bytes, self_tests });
        }
        let format = manifest.numeric_class.expert_activations();
        Ok(Self {
            identity: Identity {
                protocol_version: PROTOCOL_VERSION,
                build: build.to_owned(),
                math_id: MATH_ID.to_owned(),
                container_digest: container.digest().to_owned(),
                numeric_class: manifest.numeric_class.to_string(),
            },
            row_bytes: ActivationRows::wire_bytes(format, 1, config.hidden_size)
                .unwrap_or(usize::MAX),
            hidden: config.hidden_size,
            layers,
        })
    }

    fn layer(&self, layer: u32) -> Option<&ClusterLayer> {
        self.layers.iter().find(|l| l.layer == layer)
    }
}
