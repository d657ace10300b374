//! The element types of weights, activations and cache entries.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that is no format of the asked kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} format {name:?}, expected one of {expected}")]
pub struct UnknownFormat {
    /// What was being parsed: "weight", "activation" or "kv".
    pub kind: &'static str,
    /// The name that was given.
    pub name: String,
    /// The names that exist.
    pub expected: &'static str,
}

macro_rules! named_format {
    ($type:ident, $kind:literal, $($variant:ident = $name:literal),+) => {
        impl $type {
            /// Every format of this kind.
            pub const ALL: &'static [$type] = &[$($type::$variant),+];

            /// The name used in manifests, in messages and on the command line.
            pub const fn name(self) -> &'static str {
                match self { $($type::$variant => $name),+ }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $type {
            type Err = UnknownFormat;

            fn from_str(name: &str) -> Result<Self, UnknownFormat> {
                match name {
                    $($name => Ok($type::$variant),)+
                    _ => Err(UnknownFormat {
                        kind: $kind,
                        name: name.to_owned(),
                        expected: concat!($($name, " "),+).trim_ascii_end(),
                    }),
                }
            }
        }
    };
}

/// How the elements of a weight matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightFormat {
    /// Signed 8-bit integers in -127..=127, one f16 scale per row and group of 64 columns: 8.25 bits a weight.
    Q8G64,
    /// Signed 4-bit integers in -8..=7, one f16 scale per row and group of 64 columns: 4.25 bits a weight.
    Q4G64,
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

named_format!(
    WeightFormat,
    "weight",
    Q8G64 = "q8g64",
    Q4G64 = "q4g64",
    Bf16 = "bf16",
    F16 = "f16",
    F32 = "f32"
);

impl WeightFormat {
    /// Whether products are integer dot products over groups; such matrices take integer activations.
    pub const fn is_integer(self) -> bool {
        matches!(self, Self::Q8G64 | Self::Q4G64)
    }

    /// Bytes of 64 columns of one row for integer formats, of one element for float formats.
    pub(crate) const fn unit_bytes(self) -> usize {
        match self {
            Self::Q8G64 => 64,
            Self::Q4G64 => 32,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Whether a matrix of this format can be multiplied with rows of `activations`.
    pub const fn accepts(self, activations: ActivationFormat) -> bool {
        self.is_integer() == activations.is_integer()
    }
}

/// How the rows that a matrix is applied to are represented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationFormat {
    /// As they are; for float weights.
    F32,
    /// One signed byte per element and one f32 scale per group of 64.
    A8G64,
    /// Integers in -16319..=16319, kept as two signed bytes per element (128 * hi + lo), and one f32 scale per group.
    A16G64,
}

named_format!(ActivationFormat, "activation", F32 = "f32", A8G64 = "a8g64", A16G64 = "a16g64");

impl ActivationFormat {
    /// Whether rows are integers with a scale per group.
    pub const fn is_integer(self) -> bool {
        !matches!(self, Self::F32)
    }

    /// Signed bytes per element; 0 for f32.
    pub(crate) const fn planes(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::A8G64 => 1,
            Self::A16G64 => 2,
        }
    }

    /// The largest magnitude of a quantised element.
    pub(crate) const fn limit(self) -> f32 {
        match self {
            Self::F32 => 0.0,
            Self::A8G64 => 127.0,
            Self::A16G64 => 16319.0,
        }
    }
}

/// How keys and values are kept in the cache. Part of the numeric class: entries are rounded once, when they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32, rounded half to even.
    Bf16,
}

named_format!(KvFormat, "kv", F32 = "f32", F16 = "f16", Bf16 = "bf16");

impl KvFormat {
    /// Bytes of one element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for &format in WeightFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        for &format in ActivationFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        for &format in KvFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
    }

    #[test]
    fn unknown_name_is_refused_by_name() {
        let error = "q5".parse::<WeightFormat>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown weight format \"q5\", expected one of q8g64 q4g64 bf16 f16 f32"
        );
    }
}
