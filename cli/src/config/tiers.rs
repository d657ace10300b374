//! Settings of the expert tiers, which several commands share.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use shimmer_worker::{
    TierOptions,
    tier_options::{IO_DEPTH_MAX, PILOT_WORKERS_MAX, PinSetting, RamSetting},
};

use super::ConfigError;

/// `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switch(pub bool);

/// Why a text is not a [`Switch`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither on nor off")]
pub struct ParseSwitchError(String);

impl FromStr for Switch {
    type Err = ParseSwitchError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "on" => Ok(Self(true)),
            "off" => Ok(Self(false)),
            _ => Err(ParseSwitchError(text.to_owned())),
        }
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { "on" } else { "off" })
    }
}

impl Serialize for Switch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Declares a role's settings like `settings!`, with the keys of the expert tiers behind its own.
macro_rules! settings_with_tiers {
    ($(#[$meta:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $crate::config::settings! {
            $(#[$meta])*
            pub struct $name {
                $($own)*

                /// RAM for expert weights: auto, a size like 8GiB, or all. What does not fit is read from the drive when
                /// it is needed; all refuses to start unless every expert fits
                #[arg(long, env = "SHIMMER_RAM", value_name = "SIZE", help_heading = "Experts")]
                ram: shimmer_worker::tier_options::RamSetting = shimmer_worker::tier_options::RamSetting::Auto,
                    because "auto takes what host and control group have left beside everything else; `shimmer plan` shows it";

                /// Cache slots of each layer; an expert that is read takes the place of another one of its layer
                #[arg(long, env = "SHIMMER_CAP", value_name = "COUNT", allow_negative_numbers = true, help_heading = "Experts")]
                cap: std::num::NonZeroU32, because "without it as many as the RAM holds, the same number in each layer";

                /// RAM for experts that are never evicted, most used first: auto, a size, or all that leaves the cache its
                /// slots. They come on top of --cap
                #[arg(long, env = "SHIMMER_PIN", value_name = "SIZE", help_heading = "Experts")]
                pin: shimmer_worker::tier_options::PinSetting = shimmer_worker::tier_options::PinSetting::Auto,
                    because "auto pins everything if it fits; if not, half of the RAM when a usage file knows what is hot";

                /// Who makes room for an expert that is read: lru, the one used longest ago, or lfru, the one used least
                /// often of late
                #[arg(long, env = "SHIMMER_POLICY", value_name = "POLICY", help_heading = "Experts")]
                policy: shimmer_worker::tier_options::Policy = shimmer_worker::tier_options::Policy::Lru,
                    because "lru wins with 16 slots per layer and more, lfru with 8 and fewer";

                /// Threads that read experts ahead, as predicted for the next layer; 0 to 16, 0 reads nothing ahead
                #[arg(long, env = "SHIMMER_PILOT_WORKERS", value_name = "COUNT", allow_negative_numbers = true,
                    help_heading = "Experts")]
                pilot_workers: u8 = 1, because "more only help a drive that idles between layers";

                /// Whether reading ahead spares experts that are clearly hotter than what it brings: on or off
                #[arg(long, env = "SHIMMER_EVICT_GUARD", value_name = "SWITCH", help_heading = "Experts")]
                evict_guard: $crate::config::Switch = $crate::config::Switch(true),
                    because "a wrong guess then costs a read and no hit; with very few slots off may hit more";

                /// How experts are read: pread or uring past the page cache, buffered through it
                #[arg(long, env = "SHIMMER_IO", value_name = "WAY", help_heading = "Experts")]
                io: shimmer_worker::tier_options::IoBackend = shimmer_worker::tier_options::IoBackend::Pread,
                    because "works everywhere; containers often forbid io_uring";

                /// Threads that read with pread and buffered, one slab each at a time; with uring they only compare first reads
                /// with their digest
                #[arg(long, env = "SHIMMER_IO_THREADS", value_name = "COUNT", allow_negative_numbers = true,
                    help_heading = "Experts")]
                io_threads: std::num::NonZeroUsize = std::num::NonZeroUsize::new(4).expect("not zero"),
                    because "four slabs of several MiB keep one NVMe drive busy; more for several drives";

                /// Reads under way at the same time with uring; 1 to 1024
                #[arg(long, env = "SHIMMER_IO_DEPTH", value_name = "COUNT", allow_negative_numbers = true,
                    help_heading = "Experts")]
                io_depth: std::num::NonZeroU32 = std::num::NonZeroU32::new(64).expect("not zero"),
                    because "they cost no threads; a drive of today needs 8 to 32 slabs to be at its best";

                /// Copy of the container on another drive, DIR or DIR=WEIGHT; may be repeated. Reads are spread by weight,
                /// and a read that fails is tried on another copy
                #[arg(long, env = "SHIMMER_MIRROR", value_name = "DIR", value_delimiter = ',', help_heading = "Experts")]
                mirror: Vec<shimmer_worker::tier_options::Mirror>,
                    because "without it everything is read from the container's own directory";

                /// File that remembers how often each expert was used, for --pin auto; FILE:ro reads it and never writes it
                #[arg(long, env = "SHIMMER_USAGE", value_name = "FILE", help_heading = "Experts")]
                usage: shimmer_worker::tier_options::UsageFile,
                    because "without it nothing is remembered between runs";

                /// Memory and threads on a machine with several nodes: auto spreads over all that are allowed, off leaves
                /// it to the system
                #[arg(long, env = "SHIMMER_NUMA", value_name = "WAY", help_heading = "Experts")]
                numa: shimmer_worker::tier_options::NumaSetting = shimmer_worker::tier_options::NumaSetting::Auto,
                    because "one node's memory feeds a part of the cores only; with one node nothing is done";

                /// Whether expert memory is locked, so that it is never swapped out: on or off. Where the limit of locked memory
                /// is too low, that is said and nothing else changes
                #[arg(long, env = "SHIMMER_MLOCK", value_name = "SWITCH", help_heading = "Experts")]
                mlock: $crate::config::Switch = $crate::config::Switch(false),
                    because "only hosts with swap need it, and it needs a raised limit";

                /// Whether experts are computed while others are still read: on or off
                #[arg(long, env = "SHIMMER_PIPELINE", value_name = "SWITCH", help_heading = "Experts")]
                pipeline: $crate::config::Switch = $crate::config::Switch(true),
                    because "off is there to measure what it brings; the bytes are equal";
            }
        }

        impl $name {
            /// Parses the keys of the expert tiers.
            fn tiers(&self) -> Result<shimmer_worker::TierOptions, $crate::config::ConfigError> {
                let default = shimmer_worker::TierOptions::default();
                let switch = |given: Option<$crate::config::Switch>, default| given.map_or(default, |given| given.0);
                $crate::config::tiers::check(shimmer_worker::TierOptions {
                    ram: self.ram.unwrap_or(default.ram),
                    cap: self.cap.map(std::num::NonZeroU32::get),
                    pin: self.pin.unwrap_or(default.pin),
                    policy: self.policy.unwrap_or(default.policy),
                    pilot_workers: self.pilot_workers.unwrap_or(default.pilot_workers),
                    evict_guard: switch(self.evict_guard, default.evict_guard),
                    io: self.io.unwrap_or(default.io),
                    io_threads: self.io_threads.map_or(default.io_threads, std::num::NonZeroUsize::get),
                    io_depth: self.io_depth.map_or(default.io_depth, std::num::NonZeroU32::get),
                    mirrors: self.mirror.clone().unwrap_or_default(),
                    usage: self.usage.clone(),
                    numa: self.numa.unwrap_or(default.numa),
                    mlock: switch(self.mlock, default.mlock),
                    pipeline: switch(self.pipeline, default.pipeline),
                })
            }
        }
    };
}
pub(super) use settings_with_tiers;

/// Far above what any number of drives needs.
const IO_THREADS_MAX: usize = 256;

/// Refuses what cannot be meant.
pub(super) fn check(tiers: TierOptions) -> Result<TierOptions, ConfigError> {
    let refuse = |key, message: String| Err(ConfigError::invalid(key, message));
    if tiers.ram == RamSetting::Bytes(0) {
        return refuse("ram", "0 bytes hold no expert".to_owned());
    }
    if tiers.ram == RamSetting::All {
        if let Some(cap) = tiers.cap {
            return refuse(
                "cap",
                format!("{cap} slots contradict ram = all, which holds every expert"),
            );
        }
        if let PinSetting::Bytes(_) = tiers.pin {
            return refuse(
                "pin",
                format!("{} contradicts ram = all, which pins every expert", tiers.pin),
            );
        }
    }
    if tiers.pilot_workers > PILOT_WORKERS_MAX {
        let message = format!("{} threads; at most {PILOT_WORKERS_MAX}", tiers.pilot_workers);
        return refuse("pilot-workers", message);
    }
    if tiers.io_threads > IO_THREADS_MAX {
        let message = format!("{} reads at a time; at most {IO_THREADS_MAX}", tiers.io_threads);
        return refuse("io-threads", message);
    }
    if tiers.io_depth > IO_DEPTH_MAX {
        let message = format!("{} reads at a time; at most {IO_DEPTH_MAX}", tiers.io_depth);
        return refuse("io-depth", message);
    }
    Ok(tiers)
}
