//! The arms of a comparison: a name and the settings that it changes.

use std::str::FromStr;

use crate::{
    config::{ConfigError, GenerateSettings, InProcess, Settings as _, Target},
    error::Error,
};

/// Keys that an arm may change: those of an in-process cluster. What is generated, and from what, is the same for all.
const KEYS: &[&str] = &[
    "workers",
    "worker-weights",
    "threads",
    "isa",
    "context",
    "kv-budget",
    "prefill-chunk",
    "ram",
    "cap",
    "pin",
    "policy",
    "pilot-workers",
    "evict-guard",
    "io",
    "io-threads",
    "io-depth",
    "mirror",
    "usage",
    "numa",
    "mlock",
    "pipeline",
];

/// An arm as it is written: `NAME:KEY=VALUE,KEY=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArmText {
    name: String,
    pairs: Vec<(String, String)>,
}

/// Why a text is not an [`ArmText`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no arm; write NAME:KEY=VALUE,KEY=VALUE, for example off:pipeline=off,cap=8")]
pub struct ParseArmError(String);

impl FromStr for ArmText {
    type Err = ParseArmError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = || ParseArmError(text.to_owned());
        let (name, keys) = text.split_once(':').unwrap_or((text, ""));
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || !name.chars().all(named) {
            return Err(refused());
        }
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=')?;
            (!key.is_empty()).then(|| (key.to_owned(), value.to_owned()))
        };
        let pairs = keys.split(',').filter(|pair| !pair.is_empty());
        let pairs: Option<Vec<_>> = pairs.map(pair).collect();
        Ok(Self { name: name.to_owned(), pairs: pairs.ok_or_else(refused)? })
    }
}

/// An arm that can run.
#[derive(Debug, Clone)]
pub(super) struct Arm {
    pub(super) name: String,
    /// What it changes, as written.
    pub(super) changes: String,
    pub(super) cluster: InProcess,
}

/// The arms over their common settings.
///
/// # Errors
/// There are fewer than two, a name stands twice, or a key or value cannot be used.
pub(super) fn parse(base: &GenerateSettings, arms: &[ArmText]) -> Result<Vec<Arm>, Error> {
    if arms.len() < 2 {
        return Err(Error::refused("one arm alone has nothing to be compared with")
            .with_hint("give --arm at least twice"));
    }
    for (index, arm) in arms.iter().enumerate() {
        if arms[..index].iter().any(|other| other.name == arm.name) {
            return Err(Error::refused(format!("two arms have the name {}", arm.name)));
        }
    }
    arms.iter().map(|arm| build(base, arm)).collect()
}

fn build(base: &GenerateSettings, arm: &ArmText) -> Result<Arm, Error> {
    let mut settings = GenerateSettings::default();
    for (index, (key, value)) in arm.pairs.iter().enumerate() {
        if arm.pairs[..index].iter().any(|(other, _)| other == key) {
            return Err(Error::refused(format!("arm {}: {key} stands twice", arm.name)));
        }
        settings = one(&arm.name, key, value)?.or(settings);
    }
    let refused = |error: ConfigError| Error::refused(format!("arm {}: {error}", arm.name));
    let config = settings.or(base.clone()).validate().map_err(refused)?;
    let Target::InProcess(mut cluster) = config.target else {
        unreachable!("the common settings ask for an in-process cluster")
    };
    // A run must not teach the next one.
    if let Some(usage) = &mut cluster.tiers.usage {
        usage.read_only = true;
    }
    let changes: Vec<String> =
        arm.pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    Ok(Arm { name: arm.name.clone(), changes: changes.join(","), cluster })
}

/// Settings with this one key, by the rules of a config file: the value as a TOML literal, else as a text, else as a list
/// of one text.
fn one(arm: &str, key: &str, value: &str) -> Result<GenerateSettings, Error> {
    if !KEYS.contains(&key) {
        return Err(Error::refused(format!("arm {arm}: {key} is no key of an arm"))
            .with_hint(format!("the keys are {}", KEYS.join(", "))));
    }
    let with = |value: toml::Value| {
        toml::Table::from_iter([(key.to_owned(), value)]).try_into::<GenerateSettings>()
    };
    let text = || toml::Value::String(value.to_owned());
    let literal = format!("v = {value}").parse::<toml::Table>().ok();
    let literal = literal.and_then(|mut table| with(table.remove("v")?).ok());
    literal.map_or_else(
        || {
            with(text()).or_else(|error| {
                with(toml::Value::Array(vec![text()])).map_err(|_| {
                    let message = error.message().trim();
                    Error::refused(format!("arm {arm}: {key}={value}: {message}"))
                })
            })
        },
        Ok,
    )
}
