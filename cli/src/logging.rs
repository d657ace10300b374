//! Logs to standard error; standard output belongs to the command's result.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use tracing_subscriber::EnvFilter;

/// Which events are logged, for example `info` or `warn,shimmer_coordinator=debug`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFilter(String);

impl Default for LogFilter {
    fn default() -> Self {
        Self("info".to_owned())
    }
}

impl LogFilter {
    /// For commands whose standard error is read by a person.
    pub fn quiet() -> Self {
        Self("warn".to_owned())
    }
}

/// Why a text is not a [`LogFilter`].
#[derive(Debug, thiserror::Error)]
#[error("not a log filter; write for example info, or warn,shimmer_coordinator=debug")]
pub struct ParseLogFilterError(#[from] tracing_subscriber::filter::ParseError);

impl FromStr for LogFilter {
    type Err = ParseLogFilterError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        EnvFilter::builder().parse(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for LogFilter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for LogFilter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object per line
    Json,
}

/// Log flags of the commands that are not daemons.
#[derive(Debug, Clone, clap::Args)]
pub struct LogArgs {
    /// What to log to standard error, in the syntax of tracing's filters; warnings when not given
    #[arg(long, env = "SHIMMER_LOG", value_name = "FILTER", help_heading = "Diagnostics")]
    pub log: Option<LogFilter>,

    /// Form of log lines; text when not given
    #[arg(long, env = "SHIMMER_LOG_FORMAT", value_name = "FORMAT", help_heading = "Diagnostics")]
    pub log_format: Option<LogFormat>,
}

impl LogArgs {
    /// Starts logging with these flags.
    pub fn start(&self) {
        start(
            &self.log.clone().unwrap_or_else(LogFilter::quiet),
            self.log_format.unwrap_or(LogFormat::Text),
        );
    }
}

/// Starts logging. A second call in one process changes nothing.
pub fn start(filter: &LogFilter, format: LogFormat) {
    let filter = EnvFilter::builder().parse_lossy(&filter.0);
    // Lines that standard error does not take are lost. Told of that, the library would say so on standard error by
    // `eprintln!`, which panics there: a full disk would end the process.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    // Colours only where a person looks.
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let started = match format {
        LogFormat::Text => builder.with_ansi(colours).try_init(),
        LogFormat::Json => builder.json().with_span_list(false).try_init(),
    };
    drop(started);
}
