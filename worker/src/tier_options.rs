//! Settings of the expert tiers: how much memory, which experts stay in it, and how the others are read.
//!
//! Every type has one textual form, the same in flags, variables and files.

mod byte_size;
mod mirror;

use std::{fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

pub use byte_size::{ByteSize, ParseByteSizeError, scaled};
pub use mirror::{Mirror, ParseMirrorError};

/// Most prefetchers of one worker.
pub const PILOT_WORKERS_MAX: u8 = 16;

/// Most reads that io_uring has under way at a time; far above what any number of drives needs.
pub const IO_DEPTH_MAX: u32 = 1024;

/// How a worker holds its experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierOptions {
    /// Memory for experts.
    pub ram: RamSetting,
    /// Cache slots of each layer; absent takes what memory allows.
    pub cap: Option<u32>,
    /// Memory for experts that are never evicted.
    pub pin: PinSetting,
    /// Who goes when the demand path needs a slot.
    pub policy: Policy,
    /// Threads that read ahead; 0 switches prefetching off.
    pub pilot_workers: u8,
    /// Whether a prefetch spares victims that are used more than what it brings.
    pub evict_guard: bool,
    /// How slabs are read.
    pub io: IoBackend,
    /// Threads that read for the demand path; with io_uring they only compare slabs with their digest.
    pub io_threads: usize,
    /// Reads that io_uring has under way at a time, at most [`IO_DEPTH_MAX`].
    pub io_depth: u32,
    /// Directories with copies of the container.
    pub mirrors: Vec<Mirror>,
    /// Where use is remembered between runs.
    pub usage: Option<UsageFile>,
    /// Where memory and threads are placed on a machine with several nodes.
    pub numa: NumaSetting,
    /// Whether expert memory is locked, so that it is never swapped out.
    pub mlock: bool,
    /// Whether reads run beside each other and beside arithmetic. Off only serves comparison: misses are then read one
    /// after another, and nothing is computed before the last one has come.
    pub pipeline: bool,
}

impl Default for TierOptions {
    fn default() -> Self {
        Self {
            ram: RamSetting::Auto,
            cap: None,
            pin: PinSetting::Auto,
            policy: Policy::Lru,
            // More need idle bandwidth that a loaded drive does not have.
            pilot_workers: 1,
            evict_guard: true,
            io: IoBackend::Pread,
            // One NVMe drive is near its bandwidth with four slabs of several MiB under way.
            io_threads: 4,
            // They cost no threads, and a drive of today needs 8 to 32 slabs to be at its best.
            io_depth: 64,
            mirrors: Vec::new(),
            usage: None,
            numa: NumaSetting::Auto,
            // The usual limit of locked memory is 8 MiB, and hosts of this kind rarely swap.
            mlock: false,
            pipeline: true,
        }
    }
}

/// Declares a setting with a fixed set of values and their names.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident, $what:literal { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text,)* })
            }
        }

        impl FromStr for $name {
            type Err = ParseChoiceError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($text => Ok(Self::$variant),)*
                    _ => Err(ParseChoiceError { what: $what, text: text.to_owned(), known: &[$($text),*] }),
                }
            }
        }
    };
}

/// Why a text names no value of a setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no {what}; write {}", .known.join(" or "))]
pub struct ParseChoiceError {
    what: &'static str,
    text: String,
    known: &'static [&'static str],
}

choice! {
    /// Who goes when the demand path needs a slot.
    Policy, "eviction policy" {
        /// Who was used longest ago.
        Lru = "lru",
        /// Who was used least often of late, and longest ago among those.
        Lfru = "lfru",
    }
}

choice! {
    /// How slabs are read.
    IoBackend, "way to read" {
        /// Threads that read past the page cache.
        Pread = "pread",
        /// One thread that submits to io_uring, past the page cache.
        Uring = "uring",
        /// Threads that read through the page cache.
        Buffered = "buffered",
    }
}

choice! {
    /// Placement on the nodes of a machine.
    NumaSetting, "placement" {
        /// Over all allowed nodes, if there are several.
        Auto = "auto",
        /// The system decides.
        Off = "off",
    }
}

/// Declares a setting of memory: `auto`, `all` or a size.
macro_rules! amount {
    ($(#[$meta:meta])* $name:ident { $(#[$auto:meta])* Auto, $(#[$bytes:meta])* Bytes, $(#[$all:meta])* All, }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $(#[$auto])* Auto,
            $(#[$bytes])* Bytes(u64),
            $(#[$all])* All,
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    Self::Auto => f.write_str("auto"),
                    Self::Bytes(bytes) => ByteSize(bytes).fmt(f),
                    Self::All => f.write_str("all"),
                }
            }
        }

        impl FromStr for $name {
            type Err = ParseAmountError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    "auto" => Ok(Self::Auto),
                    "all" => Ok(Self::All),
                    size => Ok(Self::Bytes(size.parse::<ByteSize>()?.0)),
                }
            }
        }
    };
}

/// Why a text is no amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}; or auto, or all")]
pub struct ParseAmountError(#[from] ParseByteSizeError);

amount! {
    /// Memory for experts.
    RamSetting {
        /// What the host and the control group have left.
        Auto,
        /// This much.
        Bytes,
        /// What all owned experts take; refused if that does not fit.
        All,
    }
}

amount! {
    /// Memory for experts that are never evicted, beside the cache.
    PinSetting {
        /// Everything if it fits; else half of the memory if use is remembered, and nothing if not.
        Auto,
        /// This much.
        Bytes,
        /// All that memory holds beside one cache slot in each layer.
        All,
    }
}

/// Where use is remembered: `FILE`, or `FILE:ro` to read it and never write it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageFile {
    /// The file.
    pub path: PathBuf,
    /// Whether it is left as it is.
    pub read_only: bool,
}

impl fmt::Display for UsageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.path.display(), if self.read_only { ":ro" } else { "" })
    }
}

impl FromStr for UsageFile {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (path, read_only) = text.strip_suffix(":ro").map_or((text, false), |path| (path, true));
        if path.is_empty() {
            return Err("a usage history needs the name of a file");
        }
        Ok(Self { path: PathBuf::from(path), read_only })
    }
}

macro_rules! text_form {
    ($($name:ident),*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}

text_form!(ByteSize, Mirror, Policy, IoBackend, NumaSetting, RamSetting, PinSetting, UsageFile);

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: FromStr<Err: fmt::Display> + fmt::Display>(text: &str, refusal: Option<&str>) {
        match (text.parse::<T>(), refusal) {
            (Ok(value), None) => assert_eq!(value.to_string(), text),
            (Err(error), Some(expected)) => assert_eq!(error.to_string(), expected),
            (Ok(_), Some(_)) => panic!("{text} was taken"),
            (Err(error), None) => panic!("{error}"),
        }
    }

    #[test]
    fn each_setting_has_one_textual_form() {
        check::<Policy>("lfru", None);
        check::<Policy>("mru", Some(r#""mru" is no eviction policy; write lru or lfru"#));
        check::<IoBackend>("pread", None);
        check::<IoBackend>("", Some(r#""" is no way to read; write pread or uring or buffered"#));
        check::<NumaSetting>("off", None);
        check::<RamSetting>("auto", None);
        check::<RamSetting>("3GiB", None);
        check::<PinSetting>("all", None);
        assert!("half".parse::<PinSetting>().unwrap_err().to_string().ends_with("or auto, or all"));
        check::<UsageFile>("a/b.use", None);
        check::<UsageFile>("a/b.use:ro", None);
        assert!("x:ro".parse::<UsageFile>().unwrap().read_only);
    }
}
