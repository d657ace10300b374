//! Settings of `shimmer generate`: where to generate, and the sampling parameters.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
};

use shimmer_kernels::Isa;
use shimmer_proto::v1::SamplingParams;
use shimmer_worker::TierOptions;

use super::{
    Access, ApiAddress, ByteSize, ConfigError, IsaName, Period, Seed, Settings,
    tiers::settings_with_tiers,
    worker::{check_weight, threads_or_all},
};

settings_with_tiers! {
    /// Keys of a generation's config file, its variables and its flags.
    pub struct GenerateSettings {
        /// Coordinators as host:port, or https://host:port where they speak TLS. Of several, those with one --journal directory go
        /// on with each other's answers
        #[arg(long, env = "SHIMMER_ENDPOINT", value_name = "ADDRESS,...", value_delimiter = ',', help_heading = "Where")]
        endpoint: Vec<ApiAddress>, because "without it localhost:50051, unless in-process is asked for";

        /// Time to look for a coordinator that goes on with an answer that broke off
        #[arg(long, env = "SHIMMER_RESUME_TIMEOUT", value_name = "TIME", help_heading = "Where")]
        resume_timeout: Period = Period::seconds(60), because "a coordinator that was restarted reads its trunk first";

        /// File with the API key, as `key` or `name:key` in its first line; the variable SHIMMER_API_KEY can hold the key itself
        #[arg(long, env = "SHIMMER_API_KEY_FILE", value_name = "FILE", help_heading = "Where")]
        api_key_file: PathBuf, because "without it, and without the variable, no key is shown";

        /// Certificates of the authorities that may have signed the server's, for https:// endpoints
        #[arg(long, env = "SHIMMER_CA", value_name = "FILE", help_heading = "Where")]
        ca: PathBuf, because "an https:// endpoint needs it: no authority is built in";

        /// Runs coordinator and workers inside this process, without sockets; needs --container
        #[arg(long, env = "SHIMMER_IN_PROCESS", value_name = "BOOL", num_args = 0..=1, require_equals = true,
            default_missing_value = "true", help_heading = "Where")]
        in_process: bool = false, because "a server keeps the model in memory between calls";

        /// Container directory, for --in-process
        #[arg(long, env = "SHIMMER_CONTAINER", value_name = "DIR", help_heading = "Where")]
        container: PathBuf, because "needed in-process only";

        /// Workers inside this process
        #[arg(long, env = "SHIMMER_IN_PROCESS_WORKERS", value_name = "COUNT", allow_negative_numbers = true, help_heading = "Where")]
        workers: NonZeroUsize, because "without it one; more change nothing but the placement: the bytes are equal";

        /// Relative capacities of the in-process workers, for example 1,1,3
        #[arg(long, env = "SHIMMER_WORKER_WEIGHTS", value_name = "NUMBER,...", allow_negative_numbers = true, value_delimiter = ',',
            help_heading = "Where")]
        worker_weights: Vec<f64>, because "without them all are equal";

        /// CPU threads, in-process
        #[arg(long, env = "SHIMMER_THREADS", value_name = "COUNT", allow_negative_numbers = true, help_heading = "Where")]
        threads: NonZeroUsize, because "without it one per CPU that this process may use; per core if there are several memory nodes";

        /// Instruction set, in-process: scalar, avx2 or avx512; the bytes are the same
        #[arg(long, env = "SHIMMER_ISA", value_name = "ISA", help_heading = "Where")]
        isa: IsaName, because "without it the best one of this CPU";

        /// Longest sequence, prompt and answer together, tokens; in-process
        #[arg(long, env = "SHIMMER_CONTEXT", value_name = "TOKENS", allow_negative_numbers = true, help_heading = "Where")]
        context: NonZeroU32, because "without it what the model was made for, as far as kv-budget holds it";

        /// RAM for KV caches, in-process
        #[arg(long, env = "SHIMMER_KV_BUDGET", value_name = "SIZE", help_heading = "Where")]
        kv_budget: ByteSize = ByteSize(1 << 30), because "1 GiB: thousands of tokens of a small model";

        /// Prompt tokens computed in one step, in-process
        #[arg(long, env = "SHIMMER_PREFILL_CHUNK", value_name = "TOKENS", allow_negative_numbers = true, help_heading = "Where")]
        prefill_chunk: NonZeroUsize = NonZeroUsize::new(256).expect("not zero"),
            because "large enough for full speed; the bytes are equal for any size";

        /// Shows after the answer where time and bytes went, in-process; under `profile` with --json
        #[arg(long, env = "SHIMMER_PROFILE", value_name = "BOOL", num_args = 0..=1, require_equals = true,
            default_missing_value = "true", help_heading = "Experts")]
        profile: bool = false, because "the answer is the result; counting goes on either way and changes no byte";

        /// Time to connect to the coordinator
        #[arg(long, env = "SHIMMER_CONNECT_TIMEOUT", value_name = "TIME", help_heading = "Where")]
        connect_timeout: Period = Period::seconds(5), because "a live host answers in milliseconds";

        /// Tokens to generate at most
        #[arg(long, env = "SHIMMER_MAX_TOKENS", value_name = "TOKENS", allow_negative_numbers = true, help_heading = "Sampling")]
        max_tokens: NonZeroU32, because "without it what the context leaves";

        /// 0 always takes the most likely token; [0, 100]
        #[arg(long, env = "SHIMMER_TEMPERATURE", value_name = "NUMBER", allow_negative_numbers = true, help_heading = "Sampling")]
        temperature: f64, because "without it 1: the model's own distribution";

        /// Keeps this many most likely tokens; 0 keeps all
        #[arg(long, env = "SHIMMER_TOP_K", value_name = "COUNT", allow_negative_numbers = true, help_heading = "Sampling")]
        top_k: u32, because "without it 0: no cut";

        /// Keeps the most likely tokens that hold this share of the probability; (0, 1]
        #[arg(long, env = "SHIMMER_TOP_P", value_name = "SHARE", allow_negative_numbers = true, help_heading = "Sampling")]
        top_p: f64, because "without it 1: no cut";

        /// Drops tokens less likely than this share of the most likely one; [0, 1]
        #[arg(long, env = "SHIMMER_MIN_P", value_name = "SHARE", allow_negative_numbers = true, help_heading = "Sampling")]
        min_p: f64, because "without it 0: no cut";

        /// Above 1 makes tokens of prompt and answer less likely; (0, 2]
        #[arg(long, env = "SHIMMER_REPETITION_PENALTY", value_name = "FACTOR", allow_negative_numbers = true, help_heading = "Sampling")]
        repetition_penalty: f64, because "without it 1: none";

        /// Taken off the logit of every token of the answer; [-2, 2]
        #[arg(long, env = "SHIMMER_PRESENCE_PENALTY", value_name = "NUMBER", allow_negative_numbers = true,
            help_heading = "Sampling")]
        presence_penalty: f64, because "without it 0: none";

        /// Taken off the logit of a token once per occurrence in the answer; [-2, 2]
        #[arg(long, env = "SHIMMER_FREQUENCY_PENALTY", value_name = "NUMBER", allow_negative_numbers = true,
            help_heading = "Sampling")]
        frequency_penalty: f64, because "without it 0: none";

        /// Number of the random stream; the same seed gives the same bytes
        #[arg(long, env = "SHIMMER_SEED", value_name = "NUMBER", allow_negative_numbers = true, help_heading = "Sampling")]
        seed: Seed, because "without it drawn by the coordinator and shown by --json";

        /// Generates through the model's end tokens
        #[arg(long, env = "SHIMMER_IGNORE_EOS", value_name = "BOOL", num_args = 0..=1, require_equals = true,
            default_missing_value = "true", help_heading = "Sampling")]
        ignore_eos: bool, because "without it false: an answer ends where the model ends it";
    }
}

/// Far more workers in one process than any comparison needs.
const WORKERS_MAX: usize = 256;

/// One weight for each worker.
pub(super) fn weights(
    workers: Option<NonZeroUsize>,
    weights: Option<Vec<f64>>,
) -> Result<Vec<f64>, ConfigError> {
    let given = weights.as_ref().map(Vec::len);
    let workers = workers.map(NonZeroUsize::get).or(given).unwrap_or(1);
    if workers > WORKERS_MAX {
        let message = format!("{workers} workers in one process; at most {WORKERS_MAX}");
        return Err(ConfigError::invalid("workers", message));
    }
    let weights = weights.unwrap_or_else(|| vec![1.0; workers]);
    if weights.len() != workers {
        let message = format!("{} weights for workers = {workers}; give one each", weights.len());
        return Err(ConfigError::invalid("worker-weights", message));
    }
    for &weight in &weights {
        check_weight("worker-weights", weight)?;
    }
    Ok(weights)
}

/// The wire has single precision; a value between two of them becomes the nearest.
#[expect(clippy::cast_possible_truncation, reason = "rounding to the wire's precision is meant")]
fn single(value: Option<f64>) -> Option<f32> {
    value.map(|value| value as f32)
}

/// Where to generate.
#[derive(Debug, Clone)]
pub enum Target {
    /// Running coordinators.
    Endpoint(Endpoints),
    /// Coordinator and workers in this process.
    InProcess(InProcess),
}

/// Coordinators that serve the same model, and how they are reached.
#[derive(Debug, Clone)]
pub struct Endpoints {
    /// At least one.
    pub addresses: Vec<ApiAddress>,
    pub access: Access,
    pub connect_timeout: Period,
    /// How long the rest of an answer is looked for.
    pub resume_timeout: Period,
}

impl Endpoints {
    /// Under the defaults.
    pub fn new(addresses: Vec<ApiAddress>, access: Access) -> Self {
        let (connect_timeout, resume_timeout) = (Period::seconds(5), Period::seconds(60));
        Self { addresses, access, connect_timeout, resume_timeout }
    }
}

/// Sizes of an in-process cluster.
#[derive(Debug, Clone)]
pub struct InProcess {
    pub container: PathBuf,
    /// One entry per worker.
    pub worker_weights: Vec<f64>,
    pub threads: usize,
    pub isa: Option<Isa>,
    pub context: Option<u32>,
    pub kv_budget: ByteSize,
    pub prefill_chunk: usize,
    pub tiers: TierOptions,
}

/// The part of the request that comes from settings. The server checks the ranges, so that every client hears the
/// same words.
#[derive(Debug, Clone, Default)]
pub struct SamplingConfig {
    pub params: SamplingParams,
    pub max_tokens: Option<u32>,
    pub ignore_eos: Option<bool>,
}

/// What a generation runs with.
#[derive(Debug, Clone)]
pub struct GenerateConfig {
    pub target: Target,
    pub sampling: SamplingConfig,
    /// In-process only.
    pub profile: bool,
}

impl GenerateSettings {
    /// Checks the settings and parses them into the run-time configuration.
    ///
    /// # Errors
    /// A required key is missing or a value cannot be used.
    pub fn validate(self) -> Result<GenerateConfig, ConfigError> {
        let all = self.or(Self::defaults());
        let params = SamplingParams {
            temperature: single(all.temperature),
            top_k: all.top_k,
            top_p: single(all.top_p),
            min_p: single(all.min_p),
            repetition_penalty: single(all.repetition_penalty),
            presence_penalty: single(all.presence_penalty),
            frequency_penalty: single(all.frequency_penalty),
            logit_bias: std::collections::HashMap::new(),
            seed: all.seed.map(|seed| seed.0),
        };
        let sampling = SamplingConfig {
            params,
            max_tokens: all.max_tokens.map(NonZeroU32::get),
            ignore_eos: all.ignore_eos,
        };
        let profile = all.profile == Some(true);
        if profile && all.in_process != Some(true) {
            let message = "is used with --in-process only; a coordinator and its workers show theirs with --metrics-listen";
            return Err(ConfigError::invalid("profile", message));
        }
        Ok(GenerateConfig { target: all.target()?, sampling, profile })
    }

    fn target(self) -> Result<Target, ConfigError> {
        let missing = ConfigError::missing;
        let tiers = self.tiers()?;
        if self.in_process == Some(true) {
            if let Some(endpoint) = &self.endpoint {
                return Err(ConfigError::invalid(
                    "in-process",
                    format!("cannot be combined with endpoint {}", join(endpoint)),
                ));
            }
            return Ok(Target::InProcess(InProcess {
                container: self.container.ok_or_else(|| missing("container"))?,
                worker_weights: weights(self.workers, self.worker_weights)?,
                threads: threads_or_all(self.threads)?,
                isa: self.isa.map(|isa| isa.0),
                context: self.context.map(NonZeroU32::get),
                kv_budget: self.kv_budget.ok_or_else(|| missing("kv-budget"))?,
                prefill_chunk: self.prefill_chunk.ok_or_else(|| missing("prefill-chunk"))?.get(),
                tiers,
            }));
        }
        for (key, given) in [
            ("container", self.container.is_some()),
            ("workers", self.workers.is_some()),
            ("worker-weights", self.worker_weights.is_some()),
            ("ram, cap, pin and the other keys of experts", tiers != TierOptions::default()),
        ] {
            if given {
                return Err(ConfigError::invalid(
                    key,
                    "is used with --in-process only; a coordinator has its own",
                ));
            }
        }
        let addresses = match self.endpoint {
            Some(addresses) if addresses.is_empty() => return Err(missing("endpoint")),
            Some(addresses) => addresses,
            None => vec!["localhost:50051".parse().expect("a literal address")],
        };
        if let Some((index, twice)) = addresses
            .iter()
            .enumerate()
            .find(|(index, address)| addresses[..*index].contains(address))
        {
            let message =
                format!("{twice} stands in the list twice, again as number {}", index + 1);
            return Err(ConfigError::invalid("endpoint", message));
        }
        let access = Access { api_key_file: self.api_key_file, ca: self.ca };
        Ok(Target::Endpoint(Endpoints {
            addresses,
            access,
            connect_timeout: self.connect_timeout.ok_or_else(|| missing("connect-timeout"))?,
            resume_timeout: self.resume_timeout.ok_or_else(|| missing("resume-timeout"))?,
        }))
    }
}

fn join(addresses: &[ApiAddress]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
