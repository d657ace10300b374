//! `hosts.toml`: the machines of a cluster, as somebody writes them down.

use std::path::Path;

use serde::Deserialize;
use shimmer_worker::tier_options::ByteSize;

use super::ForecastError;

/// Hosts and workers, and what is between them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Hosts {
    /// Copies of each expert, where there is memory for them.
    #[serde(default = "one")]
    pub(crate) replicas: usize,
    pub(crate) network: Network,
    pub(crate) coordinator: Coordinator,
    pub(crate) host: Vec<Host>,
}

fn one() -> usize {
    1
}

/// What lies between two hosts.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Network {
    pub(crate) round_trip_ms: f64,
    pub(crate) bandwidth_gb_per_s: f64,
}

/// Where the trunk is.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Coordinator {
    /// Name of a host below.
    pub(crate) host: String,
    /// Memory of the process; without it the trunk is not checked against any.
    pub(crate) ram: Option<ByteSize>,
    pub(crate) kv_budget: Option<ByteSize>,
    /// Prompt rows of one step.
    pub(crate) prefill_chunk: Option<u32>,
    /// Most sequences at a time, for the size of the KV cache.
    pub(crate) max_sequences: Option<usize>,
}

/// A machine.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Host {
    pub(crate) name: String,
    /// What all of its processors read from memory together.
    pub(crate) memory_bandwidth_gb_per_s: Option<f64>,
    /// Experts of one row that its workers compute per second together, as measured.
    pub(crate) expert_rate: Option<f64>,
    /// Processors for arithmetic.
    pub(crate) threads: Option<usize>,
    #[serde(default)]
    pub(crate) worker: Vec<Worker>,
}

/// A worker of a machine.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Worker {
    pub(crate) id: String,
    #[serde(default = "weight")]
    pub(crate) weight: f64,
    /// Memory that the process can have.
    pub(crate) ram: ByteSize,
    /// Slots of each layer, as `worker --cap`.
    pub(crate) cap: Option<std::num::NonZeroU32>,
    /// Room for the container.
    pub(crate) nvme: Option<ByteSize>,
    pub(crate) read_gb_per_s: Option<f64>,
    /// Memory of each GPU that is for experts.
    #[serde(default)]
    pub(crate) vram: Vec<ByteSize>,
    pub(crate) vram_bandwidth_gb_per_s: Option<f64>,
}

fn weight() -> f64 {
    1.0
}

impl Hosts {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It cannot be read, has an unknown key, or says what cannot be.
    pub(crate) fn read(path: &Path) -> Result<Self, ForecastError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ForecastError::Read { path: name.clone(), source })?;
        Self::parse(&text).map_err(|message| ForecastError::Parse { path: name, message })
    }

    /// Parses and checks the text of a file. What is wrong is named by its key.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let hosts: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| {
                let before = text.get(..span.start).unwrap_or_default();
                format!("line {}: ", before.matches('\n').count() + 1)
            });
            format!("{}{}", line.unwrap_or_default(), error.message().trim())
        })?;
        hosts.check()?;
        Ok(hosts)
    }

    fn check(&self) -> Result<(), String> {
        not_negative("network.round-trip-ms", self.network.round_trip_ms)?;
        positive("network.bandwidth-gb-per-s", Some(self.network.bandwidth_gb_per_s))?;
        if self.host.is_empty() {
            return Err("no host: write [[host]] with a name and [[host.worker]] below".to_owned());
        }
        if self.coordinator.prefill_chunk == Some(0) {
            return Err("coordinator.prefill-chunk: 0 is no count of tokens".to_owned());
        }
        if self.coordinator.max_sequences == Some(0) {
            return Err("coordinator.max-sequences: 0 is no count of sequences".to_owned());
        }
        for (index, host) in self.host.iter().enumerate() {
            let name = &host.name;
            if name.is_empty() {
                return Err("host.name: empty".to_owned());
            }
            if self.host[..index].iter().any(|other| other.name == *name) {
                return Err(format!("host.name: {name} stands twice"));
            }
            positive(
                &format!("host {name}: memory-bandwidth-gb-per-s"),
                host.memory_bandwidth_gb_per_s,
            )?;
            positive(&format!("host {name}: expert-rate"), host.expert_rate)?;
            if host.threads == Some(0) {
                return Err(format!("host {name}: threads: 0 computes nothing"));
            }
            if host.expert_rate.is_some() && host.memory_bandwidth_gb_per_s.is_some() {
                return Err(format!(
                    "host {name}: expert-rate and memory-bandwidth-gb-per-s both say how fast it computes; keep the measured one, expert-rate"
                ));
            }
            for worker in &host.worker {
                let id = &worker.id;
                if id.is_empty() {
                    return Err(format!("host {name}: worker.id: empty"));
                }
                positive(&format!("worker {id}: weight"), Some(worker.weight))?;
                positive(&format!("worker {id}: read-gb-per-s"), worker.read_gb_per_s)?;
                positive(
                    &format!("worker {id}: vram-bandwidth-gb-per-s"),
                    worker.vram_bandwidth_gb_per_s,
                )?;
                if worker.vram.is_empty() != worker.vram_bandwidth_gb_per_s.is_none() {
                    return Err(format!(
                        "worker {id}: vram and vram-bandwidth-gb-per-s come together or not at all"
                    ));
                }
            }
        }
        let ids: Vec<&str> = self.workers().map(|(_, worker)| worker.id.as_str()).collect();
        if ids.is_empty() {
            return Err("no worker: write [[host.worker]] below a [[host]]".to_owned());
        }
        for (index, id) in ids.iter().enumerate() {
            if ids[..index].contains(id) {
                return Err(format!("worker.id: {id} stands twice"));
            }
        }
        if !self.host.iter().any(|host| host.name == self.coordinator.host) {
            return Err(format!("coordinator.host: no host is called {}", self.coordinator.host));
        }
        Ok(())
    }

    /// Every worker with the number of its host, in the order of the file.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (usize, &Worker)> {
        self.host
            .iter()
            .enumerate()
            .flat_map(|(index, host)| host.worker.iter().map(move |worker| (index, worker)))
    }

    /// The host of the trunk.
    pub(crate) fn trunk_host(&self) -> usize {
        let found = self.host.iter().position(|host| host.name == self.coordinator.host);
        found.expect("the name was checked")
    }
}

fn positive(key: &str, value: Option<f64>) -> Result<(), String> {
    match value {
        Some(value) if !(value.is_finite() && value > 0.0) => {
            Err(format!("{key}: {value} is not a number above 0"))
        }
        _ => Ok(()),
    }
}

fn not_negative(key: &str, value: f64) -> Result<(), String> {
    if value.is_finite() && value >= 0.0 {
        Ok(())
    } else {
        Err(format!("{key}: {value} is not a number of 0 or more"))
    }
}
