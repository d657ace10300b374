//! Settings of `shimmer plan`.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
};

use super::{
    ByteSize, ConfigError, InProcess, Settings, generate::weights, tiers::settings_with_tiers,
    worker::threads_or_all,
};

settings_with_tiers! {
    /// Keys of a plan's config file, its variables and its flags.
    pub struct PlanSettings {
        /// Container directory, as made by `shimmer convert`
        #[arg(long, env = "SHIMMER_CONTAINER", value_name = "DIR")]
        container: PathBuf, because "required; sizes come from its manifest, nothing is loaded";

        /// Plans `shimmer generate --in-process`: the trunk and the KV cache are in the same process
        #[arg(long, env = "SHIMMER_IN_PROCESS", value_name = "BOOL", num_args = 0..=1, require_equals = true,
            default_missing_value = "true")]
        in_process: bool = false, because "a worker of its own is what most machines run";

        /// Workers that the experts are shared out to: in-process all of them in one process, else each on a host like
        /// this one
        #[arg(long, env = "SHIMMER_IN_PROCESS_WORKERS", value_name = "COUNT", allow_negative_numbers = true)]
        workers: NonZeroUsize, because "without it one, which owns every expert";

        /// Relative capacities of the workers, for example 1,1,3
        #[arg(long, env = "SHIMMER_WORKER_WEIGHTS", value_name = "NUMBER,...", allow_negative_numbers = true, value_delimiter = ',')]
        worker_weights: Vec<f64>, because "without them all are equal";

        /// CPU threads for arithmetic
        #[arg(long, env = "SHIMMER_THREADS", value_name = "COUNT", allow_negative_numbers = true)]
        threads: NonZeroUsize, because "without it one per CPU that this process may use";

        /// Coordinators that may be connected at the same time; more are refused
        #[arg(long, env = "SHIMMER_MAX_COORDINATORS", value_name = "COUNT", allow_negative_numbers = true)]
        max_coordinators: NonZeroUsize = NonZeroUsize::new(8).expect("not zero"),
            because "as of worker";

        /// Longest sequence, in-process, tokens
        #[arg(long, env = "SHIMMER_CONTEXT", value_name = "TOKENS", allow_negative_numbers = true)]
        context: NonZeroU32, because "without it what the model was made for, as far as kv-budget holds it";

        /// RAM for KV caches, in-process
        #[arg(long, env = "SHIMMER_KV_BUDGET", value_name = "SIZE")]
        kv_budget: ByteSize = ByteSize(1 << 30), because "as of generate";

        /// Prompt tokens computed in one step, in-process
        #[arg(long, env = "SHIMMER_PREFILL_CHUNK", value_name = "TOKENS", allow_negative_numbers = true)]
        prefill_chunk: NonZeroUsize = NonZeroUsize::new(256).expect("not zero"), because "as of generate";
    }
}

/// What is planned.
#[derive(Debug, Clone)]
pub struct PlanConfig {
    /// One process with everything in it; else a process for each worker.
    pub in_process: bool,
    /// Coordinators of each worker.
    pub max_coordinators: usize,
    pub cluster: InProcess,
}

impl PlanSettings {
    /// Checks the settings and parses them into what is planned.
    ///
    /// # Errors
    /// A required key is missing or a value cannot be used.
    pub fn validate(self) -> Result<PlanConfig, ConfigError> {
        let all = self.or(Self::defaults());
        let missing = ConfigError::missing;
        let tiers = all.tiers()?;
        Ok(PlanConfig {
            in_process: all.in_process == Some(true),
            max_coordinators: all
                .max_coordinators
                .ok_or_else(|| missing("max-coordinators"))?
                .get(),
            cluster: InProcess {
                container: all.container.ok_or_else(|| missing("container"))?,
                worker_weights: weights(all.workers, all.worker_weights)?,
                threads: threads_or_all(all.threads)?,
                isa: None,
                context: all.context.map(NonZeroU32::get),
                kv_budget: all.kv_budget.ok_or_else(|| missing("kv-budget"))?,
                prefill_chunk: all.prefill_chunk.ok_or_else(|| missing("prefill-chunk"))?.get(),
                tiers,
            },
        })
    }
}
