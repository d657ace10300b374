//! Settings of `shimmer serve`.

use std::{
    net::SocketAddr,
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use shimmer_coordinator::journal::JournalOptions;
use shimmer_kernels::Isa;
use shimmer_proto::{
    limits::{MAX_COPIES, MAX_WORKERS},
    membership::{MembershipStore, fixed::FixedStore},
    tls::TlsFiles,
};

use super::{
    ByteSize, ClusterConfig, ConfigError, HostPort, IsaName, Period, Settings,
    cluster::settings_with_cluster,
    security::{member_files, server_files},
    settings,
    worker::{check_name, threads_or_all},
};
use crate::{
    error::Error,
    logging::{LogFilter, LogFormat},
    traces::{OtlpProtocol, TraceConfig, trace_config},
};

/// An hour: whoever has not come back by then has given up.
const JOURNAL_KEEP: Period = Period::seconds(3600);
/// 1 GiB: four bytes a token.
const JOURNAL_LIMIT: ByteSize = ByteSize(1 << 30);
/// Busy hosts stop a process for as long; a worker is not lost for that.
const LAYER_DEADLINE_MIN: Duration = Duration::from_millis(100);

settings_with_cluster! {
    settings:
    /// Keys of a coordinator's config file, its variables and its flags.
    pub struct ServeSettings {
        /// Container directory, as made by `shimmer convert`
        #[arg(long, env = "SHIMMER_CONTAINER", value_name = "DIR")]
        container: PathBuf, because "required; the coordinator reads trunk, tokenizer and chat template from here";

        /// Workers as host:port, separated by commas; IPv6 literals in brackets
        #[arg(long, env = "SHIMMER_WORKERS", value_name = "ADDRESS,...", value_delimiter = ',')]
        workers: Vec<HostPort>, because "required without etcd, where the members are known; either --workers or --etcd";

        /// Address to listen on for clients; IPv6 literals in brackets, port 0 takes a free one
        #[arg(long, env = "SHIMMER_LISTEN", value_name = "ADDRESS")]
        listen: SocketAddr = "[::]:50051".parse().expect("a literal address"),
            because "every IPv6 and IPv4 address of the host, so that pods of either kind can be reached";

        /// Name of the model in answers
        #[arg(long, env = "SHIMMER_MODEL_NAME", value_name = "NAME")]
        model_name: String, because "without it the name that the conversion gave it";

        /// Name of this coordinator in the workers' logs
        #[arg(long, env = "SHIMMER_ID", value_name = "NAME")]
        id: String = ServeConfig::DEFAULT_ID.to_owned(),
            because "one coordinator needs no better name; with a cluster, host name and port are added";

        /// CPU threads for arithmetic
        #[arg(long, env = "SHIMMER_THREADS", value_name = "COUNT", allow_negative_numbers = true)]
        threads: NonZeroUsize, because "without it one per CPU that this process may use; per core if there are several memory nodes";

        /// Instruction set of the kernels: scalar, avx2 or avx512; the bytes are the same
        #[arg(long, env = "SHIMMER_ISA", value_name = "ISA")]
        isa: IsaName, because "without it the best one of this CPU";

        /// Longest sequence, prompt and answer together, tokens
        #[arg(long, env = "SHIMMER_CONTEXT", value_name = "TOKENS", allow_negative_numbers = true)]
        context: NonZeroU32, because "without it what the model was made for, as far as kv-budget holds it";

        /// RAM for KV caches, for example 4GiB
        #[arg(long, env = "SHIMMER_KV_BUDGET", value_name = "SIZE")]
        kv_budget: ByteSize = ByteSize(1 << 30),
            because "1 GiB: thousands of tokens of a small model; a request that can never fit is refused";

        /// Sequences computed together in one step
        #[arg(long, env = "SHIMMER_MAX_SEQUENCES", value_name = "COUNT", allow_negative_numbers = true)]
        max_sequences: NonZeroUsize = NonZeroUsize::new(64).expect("not zero"),
            because "batches share each expert's weights; beyond that a CPU is bound by arithmetic";

        /// Rows of one step, of all sequences together
        #[arg(long, env = "SHIMMER_STEP_ROWS", value_name = "ROWS", allow_negative_numbers = true)]
        step_rows: NonZeroUsize = NonZeroUsize::new(512).expect("not zero"),
            because "larger steps are no faster and only delay running answers";

        /// Requests that wait for a place in the batch; more are refused with RESOURCE_EXHAUSTED
        #[arg(long, env = "SHIMMER_QUEUE", value_name = "COUNT", allow_negative_numbers = true)]
        queue: NonZeroUsize = NonZeroUsize::new(256).expect("not zero"),
            because "a longer line only hides overload from clients that could go elsewhere";

        /// Prompt tokens of one sequence computed in one step
        #[arg(long, env = "SHIMMER_PREFILL_CHUNK", value_name = "TOKENS", allow_negative_numbers = true)]
        prefill_chunk: NonZeroUsize = NonZeroUsize::new(256).expect("not zero"),
            because "large enough for full speed, small enough not to starve running answers";

        /// Time to connect to a worker
        #[arg(long, env = "SHIMMER_CONNECT_TIMEOUT", value_name = "TIME")]
        connect_timeout: Period = Period::seconds(5), because "a live host answers in milliseconds";

        /// Time without progress after which a worker's load of its experts is given up
        #[arg(long, env = "SHIMMER_LOAD_STALL_TIMEOUT", value_name = "TIME")]
        load_stall_timeout: Period = Period::seconds(120), because "a load takes what the disk takes, but it moves";

        /// Time to wait for a worker's results of one layer before it counts as lost, even if it is alive
        #[arg(long, visible_alias = "layer-timeout", env = "SHIMMER_LAYER_DEADLINE", value_name = "TIME")]
        #[serde(alias = "layer-timeout")]
        layer_deadline: Period = Period::seconds(10),
            because "far above the slowest layer of a full prefill chunk; less than 100ms is refused, as busy hosts pause for longer";

        /// Time to wait for the answer of a worker that owes results and is asked whether it is alive
        #[arg(long, env = "SHIMMER_PROBE_TIMEOUT", value_name = "TIME")]
        probe_timeout: Period = Period(Duration::from_millis(500)),
            because "a live worker answers at once, whatever it computes; two missed answers in a row are a loss";

        /// Copies of each expert in all, on different hosts where there are some; the hottest first, as far as the workers have room
        #[arg(long, env = "SHIMMER_REPLICAS", value_name = "COUNT", allow_negative_numbers = true)]
        replicas: NonZeroUsize = NonZeroUsize::MIN,
            because "any worker stands in for another one from its own drive; copies in memory only make that faster";

        /// Sends work to a second worker when the first takes this many times longer than is usual for it; 0 never does
        #[arg(long, env = "SHIMMER_HEDGE", value_name = "FACTOR", allow_negative_numbers = true)]
        hedge: f64 = 2.0, because "of the slowest of its recent answers: twice that is no noise";

        /// Share of the work that two workers compute and that is compared, in percent
        #[arg(long, env = "SHIMMER_AUDIT", value_name = "PERCENT", allow_negative_numbers = true)]
        audit: f64 = 0.0, because "finds memory that lies at the price of the work; 1 is a good start";

        /// Time for which the experts of a worker that is gone are not placed elsewhere; others stand in meanwhile
        #[arg(long, env = "SHIMMER_REPLACE_AFTER", value_name = "TIME")]
        replace_after: Period = Period::seconds(30), because "a restart takes less, and then nothing has to move";

        /// RAM for a copy of the experts in this process, asked when no worker is left that has one; for example 4GiB
        #[arg(long, env = "SHIMMER_OWN_EXPERTS", value_name = "SIZE")]
        own_experts: ByteSize,
            because "without it there is no such copy, and a request that nobody can serve ends with UNAVAILABLE";

        /// Time that running answers get after SIGTERM
        #[arg(long, env = "SHIMMER_DRAIN_TIMEOUT", value_name = "TIME")]
        drain_timeout: Period = Period::seconds(25), because "Kubernetes kills after 30s";

        /// Time after SIGTERM in which new requests are still taken while readiness is off already; --drain-timeout begins
        /// after it
        #[arg(long, env = "SHIMMER_DRAIN_DELAY", value_name = "TIME")]
        drain_delay: Period = Period::seconds(0),
            because "balancers that are told before SIGTERM, as by a preStop sleep of Kubernetes, send nothing new";

        /// Directory of the journal, by which a broken answer can be resumed, here or at another coordinator with the same
        /// directory; made where there is none
        #[arg(long, env = "SHIMMER_JOURNAL", value_name = "DIR")]
        journal: PathBuf, because "without it an answer is lost with its coordinator";

        /// How long the journal keeps a request after its end
        #[arg(long, env = "SHIMMER_JOURNAL_KEEP", value_name = "TIME")]
        journal_keep: Period = JOURNAL_KEEP,
            because "an hour: whoever has not come back by then has given up";

        /// Bytes of all files of the journal; above it the oldest ended ones go, and then requests are served without
        #[arg(long, env = "SHIMMER_JOURNAL_LIMIT", value_name = "SIZE")]
        journal_limit: ByteSize = JOURNAL_LIMIT,
            because "1 GiB: four bytes a token, so the prompts and answers of hundreds of thousands of requests";

        /// Address for operators: `shimmer status`, `drain` and the other orders; with mutual TLS if there are the three files
        #[arg(long, env = "SHIMMER_ADMIN_LISTEN", value_name = "ADDRESS")]
        admin_listen: SocketAddr, because "without it nobody can ask or order anything; 50053 is the usual port";

        /// Address of the page that Prometheus reads: http://ADDRESS/metrics, and /metrics.json
        #[arg(long, env = "SHIMMER_METRICS_LISTEN", value_name = "ADDRESS")]
        metrics_listen: SocketAddr,
            because "without it there is no page: it tells names and load to whoever can reach it";

        /// File of the keys that clients must show, one a line, as `key` or `name:key`
        #[arg(long, env = "SHIMMER_API_KEYS", value_name = "FILE", help_heading = "Security")]
        api_keys: PathBuf, because "without it every client is served; read again when it changes";

        /// Certificate of the port for clients, which then speaks TLS
        #[arg(long, env = "SHIMMER_API_TLS_CERT", value_name = "FILE", help_heading = "Security")]
        api_tls_cert: PathBuf, because "without it clients speak plaintext, keys included; read again when it changes";

        /// Key of that certificate
        #[arg(long, env = "SHIMMER_API_TLS_KEY", value_name = "FILE", help_heading = "Security")]
        api_tls_key: PathBuf, because "read again when it changes";

        /// Connections of clients at the same time; more are refused with RESOURCE_EXHAUSTED
        #[arg(long, env = "SHIMMER_MAX_CONNECTIONS", value_name = "COUNT", allow_negative_numbers = true, help_heading = "Security")]
        max_connections: NonZeroUsize = NonZeroUsize::new(1024).expect("not zero"),
            because "one carries many calls, so that this is far above what the queue holds";

        /// Collector that takes spans over OTLP, for example <http://localhost:4317>
        #[arg(long, env = "SHIMMER_OTLP_ENDPOINT", value_name = "URL")]
        otlp_endpoint: String, because "without it there are no traces";

        /// How spans are sent: grpc or http
        #[arg(long, env = "SHIMMER_OTLP_PROTOCOL", value_name = "PROTOCOL")]
        otlp_protocol: OtlpProtocol = OtlpProtocol::Grpc, because "what collectors take on port 4317; http is port 4318";

        /// Share of the requests that are traced, percent; a request that brings a decision along is traced as that says
        #[arg(long, env = "SHIMMER_TRACE_SAMPLE", value_name = "PERCENT", allow_negative_numbers = true)]
        trace_sample: f64 = 1.0, because "enough to see where time goes, too few to cost anything";

        /// What to log to standard error, in the syntax of tracing's filters
        #[arg(long, env = "SHIMMER_LOG", value_name = "FILTER")]
        log: LogFilter = LogFilter::default(), because "events of the role's life, nothing per token";

        /// Form of log lines
        #[arg(long, env = "SHIMMER_LOG_FORMAT", value_name = "FORMAT")]
        log_format: LogFormat = LogFormat::Text, because "for people; json is for collectors";
    }
}

/// Longest wait for the journal's drive before a request is served without it: a client waits for its first token as
/// long.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(5);

/// What a coordinator runs with.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    pub container: PathBuf,
    /// Empty with a cluster.
    pub workers: Vec<HostPort>,
    /// Absent: the workers are a list.
    pub cluster: Option<ClusterConfig>,
    pub listen: SocketAddr,
    pub model_name: Option<String>,
    pub id: String,
    pub threads: usize,
    pub isa: Option<Isa>,
    /// Absent: what the model was made for, as far as the KV budget holds it.
    pub context: Option<u32>,
    pub kv_budget: ByteSize,
    pub max_sequences: usize,
    pub step_rows: usize,
    pub queue: usize,
    pub prefill_chunk: usize,
    pub connect_timeout: Period,
    pub load_stall_timeout: Period,
    pub layer_deadline: Period,
    pub probe_timeout: Period,
    pub replicas: usize,
    /// 0: never.
    pub hedge: f64,
    /// Of ten thousand messages.
    pub audit_per_10k: u32,
    pub replace_after: Period,
    /// Absent: no copy.
    pub own_experts: Option<ByteSize>,
    pub drain_delay: Period,
    pub drain_timeout: Period,
    /// Absent: requests are not written down.
    pub journal: Option<JournalOptions>,
    /// Absent: no admin port.
    pub admin_listen: Option<SocketAddr>,
    /// Absent: no page.
    pub metrics_listen: Option<SocketAddr>,
    /// Towards workers; absent: plaintext.
    pub tls: Option<TlsFiles>,
    pub api_keys: Option<PathBuf>,
    /// Certificate and key of the public port.
    pub api_tls: Option<(PathBuf, PathBuf)>,
    pub max_connections: usize,
    /// Absent: no traces.
    pub traces: Option<TraceConfig>,
    pub log: LogFilter,
    pub log_format: LogFormat,
}

impl ServeSettings {
    /// Checks the settings and parses them into the run-time configuration.
    ///
    /// # Errors
    /// A required key is missing or a value cannot be used.
    pub fn validate(self) -> Result<ServeConfig, ConfigError> {
        let all = self.or(Self::defaults());
        let missing = ConfigError::missing;
        let cluster = all.cluster()?;
        let workers = all.workers.unwrap_or_default();
        match (workers.is_empty(), cluster.is_some()) {
            (false, false) | (true, true) => {}
            (true, false) => {
                return Err(ConfigError::invalid(
                    "workers",
                    "where are the workers? give --workers host:port,... or --cluster NAME --etcd URL,...",
                ));
            }
            (false, true) => {
                return Err(ConfigError::invalid(
                    "workers",
                    "contradicts --etcd, where the workers stand: give one of them",
                ));
            }
        }
        if workers.len() > MAX_WORKERS {
            let count = workers.len();
            return Err(ConfigError::invalid(
                "workers",
                format!(
                    "{count} addresses; a coordinator works with at most {MAX_WORKERS} workers"
                ),
            ));
        }
        for (index, worker) in workers.iter().enumerate() {
            if workers[..index].contains(worker) {
                return Err(ConfigError::invalid(
                    "workers",
                    format!("{worker} stands in the list twice"),
                ));
            }
        }
        if all.max_sequences > all.step_rows {
            return Err(ConfigError::invalid(
                "max-sequences",
                "is above step-rows, so some would never get a row",
            ));
        }
        let id = all.id.ok_or_else(|| missing("id"))?;
        check_name("id", &id)?;
        for (key, period) in [
            ("connect-timeout", all.connect_timeout),
            ("load-stall-timeout", all.load_stall_timeout),
            ("layer-deadline", all.layer_deadline),
            ("probe-timeout", all.probe_timeout),
        ] {
            if period.is_some_and(|period| period.0.is_zero()) {
                return Err(ConfigError::invalid(key, "0 leaves no time to answer"));
            }
        }
        if let Some(given) = all.layer_deadline.filter(|given| given.0 < LAYER_DEADLINE_MIN) {
            let least = LAYER_DEADLINE_MIN.as_millis();
            return Err(ConfigError::invalid(
                "layer-deadline",
                format!("{given} is below {least}ms: every worker would soon count as lost"),
            ));
        }
        let replicas = all.replicas.ok_or_else(|| missing("replicas"))?.get();
        if replicas > MAX_COPIES {
            return Err(ConfigError::invalid(
                "replicas",
                format!("is above {MAX_COPIES}, the most copies that an expert can have"),
            ));
        }
        let hedge = all.hedge.ok_or_else(|| missing("hedge"))?;
        if hedge != 0.0 && !(1.0..=1000.0).contains(&hedge) {
            return Err(ConfigError::invalid(
                "hedge",
                "must be from 1 to 1000 times what is usual, or 0 for never",
            ));
        }
        let audit_per_10k = audit_per_10k(all.audit.ok_or_else(|| missing("audit"))?)?;
        let keep = all.journal_keep.ok_or_else(|| missing("journal-keep"))?.0;
        if keep.is_zero() {
            let message = "0 would remove what a client is about to ask for";
            return Err(ConfigError::invalid("journal-keep", message));
        }
        let limit_bytes = all.journal_limit.ok_or_else(|| missing("journal-limit"))?.0;
        if all.journal.is_none() {
            let given = [
                ("journal-keep", keep != JOURNAL_KEEP.0),
                ("journal-limit", limit_bytes != JOURNAL_LIMIT.0),
            ];
            if let Some((key, _)) = given.into_iter().find(|(_, given)| *given) {
                return Err(ConfigError::invalid(key, "means nothing without --journal DIR"));
            }
        }
        let journal = all.journal.map(|directory| JournalOptions {
            directory,
            keep,
            limit_bytes,
            timeout: JOURNAL_TIMEOUT,
        });
        Ok(ServeConfig {
            container: all.container.ok_or_else(|| missing("container"))?,
            workers,
            cluster,
            listen: all.listen.ok_or_else(|| missing("listen"))?,
            model_name: all.model_name,
            id,
            threads: threads_or_all(all.threads)?,
            isa: all.isa.map(|isa| isa.0),
            context: all.context.map(NonZeroU32::get),
            kv_budget: all.kv_budget.ok_or_else(|| missing("kv-budget"))?,
            max_sequences: all.max_sequences.ok_or_else(|| missing("max-sequences"))?.get(),
            step_rows: all.step_rows.ok_or_else(|| missing("step-rows"))?.get(),
            queue: all.queue.ok_or_else(|| missing("queue"))?.get(),
            prefill_chunk: all.prefill_chunk.ok_or_else(|| missing("prefill-chunk"))?.get(),
            connect_timeout: all.connect_timeout.ok_or_else(|| missing("connect-timeout"))?,
            load_stall_timeout: all
                .load_stall_timeout
                .ok_or_else(|| missing("load-stall-timeout"))?,
            layer_deadline: all.layer_deadline.ok_or_else(|| missing("layer-deadline"))?,
            probe_timeout: all.probe_timeout.ok_or_else(|| missing("probe-timeout"))?,
            replicas,
            hedge,
            audit_per_10k,
            replace_after: all.replace_after.ok_or_else(|| missing("replace-after"))?,
            own_experts: all.own_experts,
            drain_delay: all.drain_delay.ok_or_else(|| missing("drain-delay"))?,
            drain_timeout: all.drain_timeout.ok_or_else(|| missing("drain-timeout"))?,
            journal,
            admin_listen: all.admin_listen,
            metrics_listen: all.metrics_listen,
            tls: member_files(all.tls_ca, all.tls_cert, all.tls_key)?,
            api_keys: all.api_keys,
            api_tls: server_files(all.api_tls_cert, all.api_tls_key)?,
            max_connections: all.max_connections.ok_or_else(|| missing("max-connections"))?.get(),
            traces: trace_config(
                all.otlp_endpoint,
                all.otlp_protocol.unwrap_or_default(),
                all.trace_sample.unwrap_or_default(),
            )?,
            log: all.log.ok_or_else(|| missing("log"))?,
            log_format: all.log_format.ok_or_else(|| missing("log-format"))?,
        })
    }
}

impl ServeConfig {
    /// The id of a coordinator that is given none.
    pub const DEFAULT_ID: &'static str = "coordinator";

    /// Where this coordinator finds its workers: the etcd, or the list that was given.
    ///
    /// # Errors
    /// The thread that follows etcd cannot be started.
    pub fn store(&self) -> Result<Arc<dyn MembershipStore>, Error> {
        match &self.cluster {
            Some(cluster) => cluster.connect(&self.id),
            None => Ok(Arc::new(FixedStore::of_workers(self.workers.iter().map(|w| &w.0)))),
        }
    }
}

/// A share in percent as messages of ten thousand. A share that is not 0 is never rounded to 0.
fn audit_per_10k(percent: f64) -> Result<u32, ConfigError> {
    if !(0.0..=100.0).contains(&percent) {
        return Err(ConfigError::invalid("audit", "must be from 0 to 100 percent"));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 0 to 10000 by the check above"
    )]
    let share = (percent * 100.0).ceil() as u32;
    Ok(share)
}
