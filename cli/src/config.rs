//! Settings: TOML file, then environment, then flags, through one type per role.
//!
//! Each role's type (`ServeSettings`, `WorkerSettings`, `GenerateSettings`, `PlanSettings`) is at once the schema of its file, of its
//! `SHIMMER_` variables and of its flags: every field is optional, a key is the flag without its dashes, and an unknown
//! key or variable is an error. Defaults stand in the type with their reason; `--print-config` shows the effective
//! result. `validate()` then builds the run-time configuration, whose fields are parsed and cannot be wrong.

mod address;
mod cluster;
mod environment;
mod etcd;
mod generate;
mod isa;
mod plan;
mod print;
mod security;
mod serve;
mod tiers;
mod units;
mod worker;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use serde::{Serialize, de::DeserializeOwned};

pub use address::{ApiAddress, HostPort};
pub use cluster::{ClusterConfig, host_name, incarnation};
pub use environment::{EnvironmentError, check_environment};
pub use etcd::EtcdArgs;
pub use generate::{
    Endpoints, GenerateConfig, GenerateSettings, InProcess, SamplingConfig, Target,
};
pub use isa::IsaName;
pub use plan::{PlanConfig, PlanSettings};
pub use print::render;
pub use security::Access;
pub(crate) use security::{fetch_token, member_files};
pub use serve::{ServeConfig, ServeSettings};
pub use shimmer_worker::tier_options::{ByteSize, ParseByteSizeError};
pub use tiers::{ParseSwitchError, Switch};
pub use units::{ParsePeriodError, Period, Seed};
pub(crate) use worker::threads_or_all;
pub use worker::{WorkerConfig, WorkerSettings};

/// One key of a role's settings.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Name of the field, which is also the id of the flag.
    pub field: &'static str,
    /// Why the default is what it is, or what happens without a value.
    pub reason: &'static str,
}

/// The settings of one role: a struct of optional fields.
pub trait Settings: Sized + Clone + Default + Serialize + DeserializeOwned {
    /// Every key in the order of the documentation.
    const KEYS: &'static [Key];

    /// The defaults; a field without one is absent.
    fn defaults() -> Self;

    /// Takes `other`'s value where `self` has none.
    #[must_use]
    fn or(self, other: Self) -> Self;
}

/// Declares a role's settings: the struct, its defaults and their reasons.
macro_rules! settings {
    ($(#[$meta:meta])* pub struct $name:ident {
        $( $(#[$field_meta:meta])* $field:ident: $type:ty $(= $default:expr)?, because $reason:literal; )*
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct $name {
            $( $(#[$field_meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>, )*
        }

        impl $crate::config::Settings for $name {
            const KEYS: &'static [$crate::config::Key] =
                &[ $( $crate::config::Key { field: stringify!($field), reason: $reason } ),* ];

            fn defaults() -> Self {
                #[allow(clippy::needless_update, reason = "all fields of a role may have defaults")]
                Self { $( $( $field: Some($default), )? )* ..Self::default() }
            }

            fn or(self, other: Self) -> Self {
                Self { $( $field: self.$field.or(other.$field), )* }
            }
        }
    };
}
pub(crate) use settings;

/// Where an effective value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Absent,
    Default,
    File,
    Environment,
    Flag,
}

/// Settings after all layers, with the origin of each key in the order of [`Settings::KEYS`].
#[derive(Debug, Clone)]
pub struct Resolved<S> {
    pub settings: S,
    pub origins: Vec<Origin>,
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the config file {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("config file {path}{line}: {message}")]
    Parse { path: PathBuf, line: String, message: String },
    #[error("{key} is missing: give --{key}, {variable} or `{key} = ...` in the config file")]
    Missing { key: String, variable: String },
    #[error("a count is above 9223372036854775807")]
    TooLarge(#[source] toml::ser::Error),
    #[error("{key}: {message}")]
    Invalid { key: String, message: String },
}

impl ConfigError {
    /// A value that parses but cannot be used.
    pub fn invalid(key: &str, message: impl Into<String>) -> Self {
        Self::Invalid { key: key.to_owned(), message: message.into() }
    }

    fn missing(key: &str) -> Self {
        let variable = format!("SHIMMER_{}", key.replace('-', "_").to_uppercase());
        Self::Missing { key: key.to_owned(), variable }
    }
}

/// Joins the layers: `given` (flags and environment, as clap parsed them) over the file over the defaults.
///
/// # Errors
/// The file cannot be read or has an unknown key or a value of the wrong type.
pub fn resolve<S: Settings>(
    given: &S,
    source: impl Fn(&str) -> Option<ValueSource>,
    file: Option<&Path>,
) -> Result<Resolved<S>, ConfigError> {
    let from_file = match file {
        Some(path) => read_file::<S>(path)?,
        None => S::default(),
    };
    let (given_keys, file_keys, default_keys) =
        (present(given)?, present(&from_file)?, present(&S::defaults())?);
    let origins = S::KEYS
        .iter()
        .map(|key| {
            let name = key.field.replace('_', "-");
            match source(key.field) {
                Some(ValueSource::EnvVariable) if given_keys.contains_key(&name) => {
                    Origin::Environment
                }
                _ if given_keys.contains_key(&name) => Origin::Flag,
                _ if file_keys.contains_key(&name) => Origin::File,
                _ if default_keys.contains_key(&name) => Origin::Default,
                _ => Origin::Absent,
            }
        })
        .collect();
    Ok(Resolved { settings: given.clone().or(from_file).or(S::defaults()), origins })
}

fn read_file<S: Settings>(path: &Path) -> Result<S, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    parse(&text, path)
}

fn parse<S: Settings>(text: &str, path: &Path) -> Result<S, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let line = error
            .span()
            .and_then(|span| text.get(..span.start))
            .map_or_else(String::new, |before| {
                format!(", line {}", before.matches('\n').count() + 1)
            });
        ConfigError::Parse {
            path: path.to_owned(),
            line,
            message: error.message().replace('\n', " "),
        }
    })
}

/// The keys that have a value, as TOML, whose integers end at 2^63 - 1.
fn present<S: Serialize>(settings: &S) -> Result<toml::Table, ConfigError> {
    toml::Table::try_from(settings).map_err(ConfigError::TooLarge)
}
