//! The process itself, for the pages of workers and coordinators: which build it is, what it takes, how long its
//! certificates are good.

use std::{fmt, fs, time::SystemTime};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeGaugeValue, MetricEncoder, NoLabelSet},
    metrics::MetricType,
};
use shimmer_kernels::MATH_ID;
use shimmer_proto::tls::ServerTls;

/// Ticks of a second in `/proc`: what Linux tells programs, whatever it counts in itself.
const TICKS: f64 = 100.0;

/// Reads the end of a certificate's time, in seconds since 1970.
type NotAfter = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Encodes how the process stands whenever it is asked for.
pub(crate) struct ProcessCollector {
    role: &'static str,
    started: f64,
    certificates: Vec<(&'static str, NotAfter)>,
}

impl ProcessCollector {
    /// For a process that has started just now.
    pub(crate) fn new(role: &'static str) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let started = now.unwrap_or_default().as_secs_f64();
        Self { role, started, certificates: Vec::new() }
    }

    /// Also tells how long the certificate of a port is good, if it has one.
    #[must_use]
    pub(crate) fn with_certificate(self, of: &'static str, tls: Option<ServerTls>) -> Self {
        match tls {
            Some(tls) => self.with_end(of, Box::new(move || tls.not_after())),
            None => self,
        }
    }

    pub(super) fn with_end(mut self, of: &'static str, not_after: NotAfter) -> Self {
        self.certificates.push((of, not_after));
        self
    }
}

impl fmt::Debug for ProcessCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessCollector").field("role", &self.role).finish_non_exhaustive()
    }
}

/// What Linux says of this process. Another system says nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Usage {
    cpu_seconds: Option<f64>,
    resident_bytes: Option<u64>,
    open_files: Option<u64>,
    open_files_limit: Option<u64>,
}

impl Usage {
    fn now() -> Self {
        let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).ok();
        let open_files = fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as u64);
        Self { open_files, ..Self::of(read("stat"), read("status"), read("limits")) }
    }

    fn of(stat: Option<String>, status: Option<String>, limits: Option<String>) -> Self {
        let stat = stat.unwrap_or_default();
        // The name of the program is in parentheses and may hold anything, blanks included.
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let ticks: Option<f64> = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|field| field.parse::<f64>().ok())
            .sum::<Option<f64>>()
            .filter(|_| !fields.is_empty());
        let line = |text: &Option<String>, name: &str, word: usize| {
            let line = text.as_deref()?.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().nth(word)?.parse::<u64>().ok()
        };
        Self {
            cpu_seconds: ticks.map(|ticks| ticks / TICKS),
            resident_bytes: line(&status, "VmRSS:", 0).map(|kib| kib * 1024),
            open_files: None,
            open_files_limit: line(&limits, "Max open files", 0),
        }
    }
}

fn family<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    name: &'a str,
    help: &'a str,
) -> Result<MetricEncoder<'a>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: Option<impl EncodeGaugeValue>,
) -> fmt::Result {
    match value {
        Some(value) => family(encoder, name, help)?.encode_gauge(&value),
        None => Ok(()),
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let labels =
            [("role", self.role), ("version", env!("CARGO_PKG_VERSION")), ("math_id", MATH_ID)];
        family(&mut encoder, "shimmer_build_info", "The build that runs; always 1.")?
            .encode_family(&labels)?
            .encode_gauge(&1_u64)?;
        if !self.certificates.is_empty() {
            let mut metric = family(
                &mut encoder,
                "shimmer_certificate_not_after_timestamp_seconds",
                "End of the time of the certificate that is shown now: to members, to clients of the API.",
            )?;
            for (of, not_after) in &self.certificates {
                if let Some(end) = not_after() {
                    metric.encode_family(&[("certificate", *of)])?.encode_gauge(&end)?;
                }
            }
        }
        let usage = Usage::now();
        if let Some(seconds) = usage.cpu_seconds {
            encoder
                .encode_descriptor(
                    "process_cpu_seconds",
                    "Processor time of all threads.",
                    None,
                    MetricType::Counter,
                )?
                .encode_counter::<NoLabelSet, _, u64>(&seconds, None)?;
        }
        let encoder = &mut encoder;
        gauge(
            encoder,
            "process_resident_memory_bytes",
            "Memory that the process has now, pages of files included.",
            usage.resident_bytes,
        )?;
        gauge(encoder, "process_open_fds", "Files and connections open.", usage.open_files)?;
        gauge(encoder, "process_max_fds", "Those that may be open.", usage.open_files_limit)?;
        gauge(
            encoder,
            "process_start_time_seconds",
            "When the process started, in seconds since 1970.",
            Some(self.started),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_from_what_linux_shows() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 10 0 0 0 250 50 0 0 20 0 4 0 100 0 0";
        let status = "Name:\tx\nVmRSS:\t    2048 kB\n";
        let limits = "Max open files            1024                 4096                 files\n";
        let some = |text: &str| Some(text.to_owned());
        let usage = Usage::of(some(stat), some(status), some(limits));
        assert_eq!(usage.cpu_seconds, Some(3.0));
        assert_eq!(usage.resident_bytes, Some(2 << 20));
        assert_eq!(usage.open_files_limit, Some(1024));
        assert_eq!(Usage::of(None, None, None), Usage::default());
        let now = Usage::now();
        assert!(now.cpu_seconds.is_some() && now.resident_bytes > Some(1 << 20), "{now:?}");
    }
}
