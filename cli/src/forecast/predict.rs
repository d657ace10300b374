//! Adds up the time of steps. The formulas stand in docs/PLANNING.md.

use super::{Costs, Curve, Hosts, PlacedWorker, Replayed, replay::LayerLoad};

/// Rows that go to an expert up to which reading its weights takes longer than multiplying by them.
const FEW_ROWS: u32 = 4;
/// Rows from which arithmetic takes longer than reading the weights, where nothing was measured.
const RIDGE_ROWS: u32 = 16;
/// Cost of a layer's round on loopback where nothing was measured, and of each further worker: docs/perf has the
/// measurement.
const MESSAGE_S: f64 = 150e-6;
const MESSAGE_MORE_S: f64 = 50e-6;

/// Where the time goes, seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Parts {
    /// Attention, norms, shared experts, head.
    pub(crate) trunk: f64,
    /// Experts with many rows each.
    pub(crate) compute: f64,
    /// Experts with few rows each: their weights go through memory.
    pub(crate) memory: f64,
    /// Messages between coordinator and workers.
    pub(crate) network: f64,
    /// Experts that are read.
    pub(crate) drive: f64,
}

impl Parts {
    pub(crate) fn total(&self) -> f64 {
        self.named().iter().map(|(_, seconds)| seconds).sum()
    }

    /// By name.
    pub(crate) fn named(&self) -> [(&'static str, f64); 5] {
        [
            ("trunk", self.trunk),
            ("compute", self.compute),
            ("memory bandwidth", self.memory),
            ("network", self.network),
            ("drive", self.drive),
        ]
    }

    /// The largest.
    pub(crate) fn binding(&self) -> &'static str {
        let named = self.named();
        named.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("nothing", |part| part.0)
    }

    fn add(&mut self, other: &Self) {
        self.trunk += other.trunk;
        self.compute += other.compute;
        self.memory += other.memory;
        self.network += other.network;
        self.drive += other.drive;
    }

    fn times(mut self, factor: f64) -> Self {
        self.trunk *= factor;
        self.compute *= factor;
        self.memory *= factor;
        self.network *= factor;
        self.drive *= factor;
        self
    }
}

/// Sizes of the model that times follow from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Load {
    /// Weights of the trunk that a token reads, bytes.
    pub(crate) trunk_bytes: u64,
    /// Keys and values of a position, all layers, bytes.
    pub(crate) position_bytes: u64,
    /// A row of a layer on its way to a worker and back, bytes.
    pub(crate) row_bytes: u64,
    /// Bytes of an expert, by layer.
    pub(crate) slabs: Vec<(u32, u64)>,
    /// Prompt tokens; steps before them are prompt steps.
    pub(crate) prompt: u32,
    /// Rows of a prompt step.
    pub(crate) chunk: u32,
}

impl Load {
    fn slab(&self, layer: u32) -> u64 {
        self.slabs.iter().find(|(known, _)| *known == layer).map_or(0, |(_, bytes)| *bytes)
    }
}

/// What is to be expected.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prediction {
    /// All prompt steps together: time to first token.
    pub(crate) prefill: Parts,
    /// A decode step, as the mean; none without one.
    pub(crate) decode: Option<Parts>,
    /// Tokens of all sequences together.
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) decode_steps: u32,
    /// Experts that are read in a decode step, and over the whole prompt.
    pub(crate) decode_misses: f64,
    pub(crate) prefill_misses: u64,
}

/// Costs of one host.
#[derive(Debug, Clone)]
struct HostCosts {
    expert: Curve,
    /// Seconds of an expert on a GPU per byte, by worker.
    gpu: Vec<f64>,
    /// Seconds of a read expert by the rows of the step; by worker.
    read: Vec<Option<Curve>>,
    /// Whether the trunk is on it.
    near: bool,
}

/// Predicts the steps of a replayed trace.
///
/// # Errors
/// The name of what is not known of a host and was not measured either.
pub(crate) fn predict(
    steps: &[Replayed],
    hosts: &Hosts,
    workers: &[PlacedWorker],
    load: &Load,
    measured: Option<&Costs>,
) -> Result<Prediction, String> {
    let trunk_host = &hosts.host[hosts.trunk_host()];
    let bandwidth = trunk_host.memory_bandwidth_gb_per_s.map(|rate| rate * 1e9);
    let trunk = match (bandwidth, measured) {
        (_, Some(costs)) => costs.trunk.clone(),
        (Some(bandwidth), None) => by_bytes(load.trunk_bytes, bandwidth),
        (None, None) => {
            return Err(format!(
                "host {}: how fast is its trunk? Give memory-bandwidth-gb-per-s, or --calibration FILE",
                trunk_host.name
            ));
        }
    };
    let position = bandwidth.map_or(0.0, |bandwidth| number(load.position_bytes) / bandwidth);
    let (attention_decode, attention_prefill) = measured
        .map_or((position, position / f64::from(RIDGE_ROWS)), |costs| {
            (costs.attention_decode_s, costs.attention_prefill_s)
        });
    let costs = host_costs(hosts, workers, load, measured)?;
    let mut prediction = Prediction {
        prefill: Parts::default(),
        decode: None,
        tokens_per_s: None,
        decode_steps: 0,
        decode_misses: 0.0,
        prefill_misses: 0,
    };
    let (mut decode, mut rows_decoded, mut misses) = (Parts::default(), 0_u64, 0_u64);
    let mut position = 0;
    for step in steps {
        let is_prompt = position < load.prompt;
        let (rows, before) = (f64::from(step.rows), f64::from(position));
        let attention = if is_prompt { attention_prefill } else { attention_decode };
        let mut parts =
            Parts { trunk: trunk.at(rows) + attention * rows * before, ..Parts::default() };
        for layer in &step.layers {
            parts.add(&layer_parts(layer, step.rows, hosts, workers, &costs, load, measured)?);
        }
        let read: u64 = step
            .layers
            .iter()
            .flat_map(|layer| &layer.shares)
            .map(|share| u64::from(share.misses))
            .sum();
        if is_prompt {
            prediction.prefill.add(&parts);
            prediction.prefill_misses += read;
            position += step.rows;
        } else {
            decode.add(&parts);
            rows_decoded += u64::from(step.rows);
            misses += read;
            prediction.decode_steps += 1;
            position += 1;
        }
    }
    if prediction.decode_steps > 0 {
        let each = 1.0 / f64::from(prediction.decode_steps);
        prediction.tokens_per_s = Some(number(rows_decoded) / decode.total());
        prediction.decode = Some(decode.times(each));
        prediction.decode_misses = number(misses) * each;
    }
    Ok(prediction)
}

/// The time of one layer's experts: messages to all workers, then the slowest host.
fn layer_parts(
    layer: &LayerLoad,
    step_rows: u32,
    hosts: &Hosts,
    workers: &[PlacedWorker],
    costs: &[HostCosts],
    load: &Load,
    measured: Option<&Costs>,
) -> Result<Parts, String> {
    let slab = number(load.slab(layer.layer));
    let mut of_hosts = vec![Parts::default(); hosts.host.len()];
    let mut messages = Vec::with_capacity(workers.len());
    for (index, (share, worker)) in layer.shares.iter().zip(workers).enumerate() {
        // A row goes to a worker once, however many of its experts are there.
        let uses: u32 = share.rows.iter().chain(&share.gpu_rows).sum();
        if uses == 0 {
            continue;
        }
        let sent = uses.min(step_rows);
        messages.push(f64::from(sent));
        let (host, costs) = (&mut of_hosts[worker.host], &costs[worker.host]);
        for &rows in &share.rows {
            let seconds = costs.expert.at(f64::from(rows));
            if rows <= FEW_ROWS { host.memory += seconds } else { host.compute += seconds }
        }
        for &rows in &share.gpu_rows {
            let ridge = (f64::from(rows) / f64::from(RIDGE_ROWS)).max(1.0);
            host.memory += costs.gpu[index] * slab * ridge;
        }
        if share.misses > 0 {
            let Some(read) = &costs.read[index] else {
                return Err(format!(
                    "worker {}: its experts do not fit into memory, and how fast it reads is not known; give read-gb-per-s, or --calibration FILE",
                    worker.id
                ));
            };
            host.drive += f64::from(share.misses) * read.at(f64::from(step_rows));
        }
        if !costs.near {
            let bytes = u64::from(sent) * load.row_bytes;
            // The round trip of all of a host's workers is one: they are asked side by side.
            if host.network == 0.0 {
                host.network = hosts.network.round_trip_ms / 1e3;
            }
            host.network += number(bytes) / (hosts.network.bandwidth_gb_per_s * 1e9);
        }
    }
    let slowest = of_hosts.into_iter().max_by(|a, b| a.total().total_cmp(&b.total()));
    let mut parts = slowest.unwrap_or_default();
    // The largest message is the first: what the others cost more is measured beside one of all rows.
    messages.sort_by(|a, b| f64::total_cmp(b, a));
    if let Some((first, more)) = messages.split_first() {
        let assumed = || (Curve::always(MESSAGE_S), Curve::always(MESSAGE_MORE_S));
        let (message, message_more) = measured
            .map_or_else(assumed, |costs| (costs.message.clone(), costs.message_more.clone()));
        parts.network += message.at(*first);
        parts.network += more.iter().map(|rows| message_more.at(*rows)).sum::<f64>();
    }
    Ok(parts)
}

fn host_costs(
    hosts: &Hosts,
    workers: &[PlacedWorker],
    load: &Load,
    measured: Option<&Costs>,
) -> Result<Vec<HostCosts>, String> {
    let slab = load.slabs.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let trunk_host = hosts.trunk_host();
    let of_host = |(number_of, host): (usize, &super::Host)| {
        let expert = match (host.expert_rate, host.memory_bandwidth_gb_per_s, measured) {
            (Some(rate), _, Some(costs)) => costs.expert.times(1.0 / (rate * costs.expert.at(1.0))),
            (Some(rate), _, None) => flat(1.0 / rate),
            (None, Some(bandwidth), _) => by_bytes(slab, bandwidth * 1e9),
            (None, None, Some(costs)) => costs.expert.clone(),
            (None, None, None) if host.worker.is_empty() => Curve::default(),
            (None, None, None) => {
                return Err(format!(
                    "host {}: how fast are its experts? Give memory-bandwidth-gb-per-s or expert-rate, or --calibration FILE",
                    host.name
                ));
            }
        };
        let mut own = hosts.workers().zip(workers).map(|((_, worker), _)| worker);
        let each: Vec<&super::Worker> = own.by_ref().collect();
        #[expect(clippy::cast_precision_loss, reason = "a handful of GPUs")]
        let gpus = |worker: &super::Worker| worker.vram.len() as f64;
        let gpu = each.iter().map(|worker| {
            worker.vram_bandwidth_gb_per_s.map_or(0.0, |rate| 1.0 / (rate * 1e9 * gpus(worker)))
        });
        let read = each.iter().map(|worker| match (worker.read_gb_per_s, measured) {
            (Some(rate), _) => Some(Curve::always(number(slab) / (rate * 1e9))),
            (None, Some(costs)) => Some(costs.read.clone()),
            (None, None) => None,
        });
        Ok(HostCosts {
            expert,
            gpu: gpu.collect(),
            read: read.collect(),
            near: number_of == trunk_host,
        })
    };
    hosts.host.iter().enumerate().map(of_host).collect()
}

/// Weights that are read once for up to [`RIDGE_ROWS`] rows, and arithmetic in proportion above.
fn by_bytes(bytes: u64, bandwidth: f64) -> Curve {
    flat(number(bytes) / bandwidth)
}

fn flat(seconds: f64) -> Curve {
    Curve {
        rows: vec![1.0, f64::from(RIDGE_ROWS), 2.0 * f64::from(RIDGE_ROWS)],
        seconds: vec![seconds, seconds, 2.0 * seconds],
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes and counts as figures")]
fn number(count: u64) -> f64 {
    count as f64
}
