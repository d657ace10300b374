//! Settings of `shimmer worker`.

use std::{net::SocketAddr, num::NonZeroUsize, path::PathBuf};

use shimmer_kernels::Isa;
use shimmer_proto::tls::TlsFiles;
use shimmer_worker::{TierOptions, memory::default_threads};

use super::{
    ClusterConfig, ConfigError, IsaName, Period, Settings, cluster::settings_with_cluster,
    security::member_files, tiers::settings_with_tiers,
};
use crate::{
    logging::{LogFilter, LogFormat},
    traces::{OtlpProtocol, TraceConfig, trace_config},
};

settings_with_cluster! {
    settings_with_tiers:
    /// Keys of a worker's config file, its variables and its flags.
    pub struct WorkerSettings {
        /// Container directory, as made by `shimmer convert`
        #[arg(long, env = "SHIMMER_CONTAINER", value_name = "DIR")]
        container: PathBuf, because "required; the worker reads its experts from here";

        /// Address to listen on; IPv6 literals in brackets, port 0 takes a free one
        #[arg(long, env = "SHIMMER_LISTEN", value_name = "ADDRESS")]
        listen: SocketAddr = "[::]:50052".parse().expect("a literal address"),
            because "every IPv6 and IPv4 address of the host, so that pods of either kind can be reached";

        /// Name of this worker in placement, logs and answers
        #[arg(long, env = "SHIMMER_ID", value_name = "NAME")]
        id: String, because "without it the name is made from the host name and the port";

        /// What fails as one with this worker: copies of an expert go to workers with different labels where there are any
        #[arg(long, env = "SHIMMER_HOST_LABEL", value_name = "NAME")]
        host_label: String,
            because "without it the machine's host name: a pod has its own, so name the node, or the rack or zone whose loss is to be survived";

        /// Relative capacity: a worker of weight 3 owns about three times the experts of one of weight 1
        #[arg(long, env = "SHIMMER_WEIGHT", value_name = "NUMBER", allow_negative_numbers = true)]
        weight: f64 = 1.0, because "1 is an ordinary worker; only ratios between workers matter";

        /// CPU threads for arithmetic
        #[arg(long, env = "SHIMMER_THREADS", value_name = "COUNT", allow_negative_numbers = true)]
        threads: NonZeroUsize, because "without it one per CPU that this process may use; per core if there are several memory nodes";

        /// Coordinators that may be connected at the same time; more are refused
        #[arg(long, env = "SHIMMER_MAX_COORDINATORS", value_name = "COUNT", allow_negative_numbers = true)]
        max_coordinators: NonZeroUsize = NonZeroUsize::new(8).expect("not zero"),
            because "memory is kept free for the messages of so many, some MiB each; `shimmer plan` shows it";

        /// Instruction set of the kernels: scalar, avx2 or avx512; the bytes are the same
        #[arg(long, env = "SHIMMER_ISA", value_name = "ISA")]
        isa: IsaName, because "without it the best one of this CPU";

        /// Time that coordinators get after SIGTERM to let this worker go; its work is answered until then
        #[arg(long, env = "SHIMMER_DRAIN_TIMEOUT", value_name = "TIME")]
        drain_timeout: Period = Period::seconds(25), because "coordinators give its experts to others meanwhile, and it ends earlier once they have; Kubernetes kills after 30s";

        /// Shows on standard error when the worker ends where experts were and what bringing them cost
        #[arg(long, env = "SHIMMER_PROFILE", value_name = "BOOL", num_args = 0..=1, require_equals = true,
            default_missing_value = "true")]
        profile: bool = false, because "the metrics page has the same while it runs; counting changes no byte";

        /// Address of the page that Prometheus reads: http://ADDRESS/metrics, and /metrics.json
        #[arg(long, env = "SHIMMER_METRICS_LISTEN", value_name = "ADDRESS")]
        metrics_listen: SocketAddr,
            because "without it there is no page: it tells names and load to whoever can reach it";

        /// Collector that takes spans over OTLP, for example <http://localhost:4317>
        #[arg(long, env = "SHIMMER_OTLP_ENDPOINT", value_name = "URL")]
        otlp_endpoint: String, because "without it there are no traces; which requests are traced is for the coordinator to say";

        /// How spans are sent: grpc or http
        #[arg(long, env = "SHIMMER_OTLP_PROTOCOL", value_name = "PROTOCOL")]
        otlp_protocol: OtlpProtocol = OtlpProtocol::Grpc, because "what collectors take on port 4317; http is port 4318";

        /// What to log to standard error, in the syntax of tracing's filters
        #[arg(long, env = "SHIMMER_LOG", value_name = "FILTER")]
        log: LogFilter = LogFilter::default(), because "events of the role's life, nothing per request";

        /// Form of log lines
        #[arg(long, env = "SHIMMER_LOG_FORMAT", value_name = "FORMAT")]
        log_format: LogFormat = LogFormat::Text, because "for people; json is for collectors";
    }
}

/// What a worker runs with.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    pub container: PathBuf,
    pub listen: SocketAddr,
    /// Absent: made from the host name and the port.
    pub id: Option<String>,
    /// Absent: the host name.
    pub host_label: Option<String>,
    pub weight: f64,
    pub tiers: TierOptions,
    pub threads: usize,
    pub max_coordinators: usize,
    pub isa: Option<Isa>,
    pub drain_timeout: Period,
    pub profile: bool,
    /// Absent: no page.
    pub metrics_listen: Option<SocketAddr>,
    /// Absent: coordinators know the address of this worker.
    pub cluster: Option<ClusterConfig>,
    /// Absent: plaintext.
    pub tls: Option<TlsFiles>,
    /// Absent: no traces.
    pub traces: Option<TraceConfig>,
    pub log: LogFilter,
    pub log_format: LogFormat,
}

impl WorkerSettings {
    /// Checks the settings and parses them into the run-time configuration.
    ///
    /// # Errors
    /// A required key is missing or a value cannot be used.
    pub fn validate(self) -> Result<WorkerConfig, ConfigError> {
        let all = self.or(Self::defaults());
        let weight = all.weight.ok_or_else(|| ConfigError::missing("weight"))?;
        check_weight("weight", weight)?;
        if let Some(id) = &all.id {
            check_name("id", id)?;
        }
        let (tiers, cluster) = (all.tiers()?, all.cluster()?);
        if let Some(label) = &all.host_label {
            check_name("host-label", label)?;
        }
        Ok(WorkerConfig {
            container: all.container.ok_or_else(|| ConfigError::missing("container"))?,
            listen: all.listen.ok_or_else(|| ConfigError::missing("listen"))?,
            id: all.id,
            host_label: all.host_label,
            weight,
            tiers,
            threads: threads_or_all(all.threads)?,
            max_coordinators: all
                .max_coordinators
                .ok_or_else(|| ConfigError::missing("max-coordinators"))?
                .get(),
            isa: all.isa.map(|isa| isa.0),
            drain_timeout: all
                .drain_timeout
                .ok_or_else(|| ConfigError::missing("drain-timeout"))?,
            profile: all.profile == Some(true),
            metrics_listen: all.metrics_listen,
            cluster,
            tls: member_files(all.tls_ca, all.tls_cert, all.tls_key)?,
            traces: trace_config(all.otlp_endpoint, all.otlp_protocol.unwrap_or_default(), 100.0)?,
            log: all.log.ok_or_else(|| ConfigError::missing("log"))?,
            log_format: all.log_format.ok_or_else(|| ConfigError::missing("log-format"))?,
        })
    }
}

/// More threads than any machine has CPUs only cost memory and minutes.
const THREADS_MAX: usize = 1024;

/// The given number, or what this machine has.
pub(crate) fn threads_or_all(threads: Option<NonZeroUsize>) -> Result<usize, ConfigError> {
    let count = threads.map_or_else(default_threads, NonZeroUsize::get);
    if count > THREADS_MAX {
        return Err(ConfigError::invalid(
            "threads",
            format!("{count} threads; at most {THREADS_MAX}"),
        ));
    }
    Ok(count)
}

/// Refuses weights that placement cannot use.
pub(super) fn check_weight(key: &str, weight: f64) -> Result<(), ConfigError> {
    if weight.is_finite() && (1e-3..=1e6).contains(&weight) {
        return Ok(());
    }
    Err(ConfigError::invalid(key, format!("{weight} is not a capacity in [0.001, 1000000]")))
}

/// Refuses names that would break logs and metrics.
pub(super) fn check_name(key: &str, name: &str) -> Result<(), ConfigError> {
    let usable =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b':');
    if !name.is_empty() && name.len() <= 64 && name.bytes().all(usable) {
        return Ok(());
    }
    Err(ConfigError::invalid(
        key,
        format!("{name:?} is not a name of 1 to 64 letters, digits or . - _ :"),
    ))
}
