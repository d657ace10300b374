//! Where spans go and how many requests are traced.

use serde::{Deserialize, Serialize};

use crate::config::ConfigError;

/// How spans are sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtlpProtocol {
    /// OTLP over gRPC, usually port 4317
    #[default]
    Grpc,
    /// OTLP over HTTP with protobuf, usually port 4318
    Http,
}

/// Where spans go.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceConfig {
    pub endpoint: String,
    pub protocol: OtlpProtocol,
    /// Of the requests that bring no decision along, percent.
    pub sample: f64,
}

impl TraceConfig {
    /// The usual path where the endpoint has none.
    pub(super) fn http_endpoint(&self) -> String {
        let after_scheme = self.endpoint.split_once("://").map_or("", |(_, rest)| rest);
        match after_scheme.split_once('/') {
            None | Some((_, "")) => format!("{}/v1/traces", self.endpoint.trim_end_matches('/')),
            Some(_) => self.endpoint.clone(),
        }
    }
}

/// Trace flags of the commands that are not daemons.
#[derive(Debug, Clone, clap::Args)]
pub struct TraceArgs {
    /// Collector that takes spans over OTLP, for example <http://localhost:4317>; no traces without it
    #[arg(long, env = "SHIMMER_OTLP_ENDPOINT", value_name = "URL", help_heading = "Diagnostics")]
    pub otlp_endpoint: Option<String>,

    /// How spans are sent: grpc or http; grpc when not given
    #[arg(
        long,
        env = "SHIMMER_OTLP_PROTOCOL",
        value_name = "PROTOCOL",
        help_heading = "Diagnostics"
    )]
    pub otlp_protocol: Option<OtlpProtocol>,

    /// Share of the requests that are traced, percent; 1 when not given
    #[arg(
        long,
        env = "SHIMMER_TRACE_SAMPLE",
        value_name = "PERCENT",
        allow_negative_numbers = true,
        help_heading = "Diagnostics"
    )]
    pub trace_sample: Option<f64>,
}

impl TraceArgs {
    /// Checks the flags; none without an endpoint.
    ///
    /// # Errors
    /// A value cannot be used.
    pub fn config(&self) -> Result<Option<TraceConfig>, ConfigError> {
        let (protocol, sample) = (self.otlp_protocol, self.trace_sample);
        trace_config(
            self.otlp_endpoint.clone(),
            protocol.unwrap_or_default(),
            sample.unwrap_or(1.0),
        )
    }
}

/// Checks the settings; none without an endpoint.
///
/// # Errors
/// A value cannot be used.
pub fn trace_config(
    endpoint: Option<String>,
    protocol: OtlpProtocol,
    sample: f64,
) -> Result<Option<TraceConfig>, ConfigError> {
    if !(0.0..=100.0).contains(&sample) {
        let message = format!("{sample} is no share in percent; give 0 to 100");
        return Err(ConfigError::invalid("trace-sample", message));
    }
    let Some(endpoint) = endpoint else { return Ok(None) };
    if endpoint.starts_with("https://") {
        return Err(ConfigError::invalid(
            "otlp-endpoint",
            "spans are sent without TLS; give the http:// address of a collector on this host or in this cluster",
        ));
    }
    let host = endpoint.strip_prefix("http://").unwrap_or_default();
    if host.is_empty() || host.starts_with(['/', ':']) || endpoint.contains(char::is_whitespace) {
        return Err(ConfigError::invalid(
            "otlp-endpoint",
            format!("{endpoint:?} is no address of a collector; write http://host:4317"),
        ));
    }
    Ok(Some(TraceConfig { endpoint, protocol, sample }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_honoured_is_taken() {
        let check = |endpoint: &str, sample: f64| {
            let endpoint = Some(endpoint.to_owned());
            trace_config(endpoint, OtlpProtocol::Http, sample).map_err(|error| error.to_string())
        };
        let path = |endpoint| check(endpoint, 1.0).unwrap().unwrap().http_endpoint();
        assert_eq!(path("http://c:4318"), "http://c:4318/v1/traces");
        assert_eq!(path("http://[::1]:4318/"), "http://[::1]:4318/v1/traces");
        assert_eq!(path("http://c:4318/own"), "http://c:4318/own");
        for (endpoint, sample, key) in [
            ("https://c:4317", 1.0, "otlp-endpoint"),
            ("c:4317", 1.0, "otlp-endpoint"),
            ("http://", 1.0, "otlp-endpoint"),
            ("http://c:4317", -1.0, "trace-sample"),
            ("http://c:4317", f64::NAN, "trace-sample"),
            ("http://c:4317", 101.0, "trace-sample"),
        ] {
            let error = check(endpoint, sample).unwrap_err();
            assert!(error.starts_with(key), "{error}");
        }
        assert_eq!(trace_config(None, OtlpProtocol::Grpc, 1.0).unwrap(), None);
    }
}
