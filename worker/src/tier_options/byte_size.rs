//! Sizes as people write them.

use std::{fmt, str::FromStr};

/// A number of bytes: `1048576`, `64KiB`, `1.5GiB`, `2GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Why a text is not a [`ByteSize`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a size; write bytes or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB, for example 8GiB"
)]
pub struct ParseByteSizeError(String);

const BYTE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseByteSizeError(text.to_owned());
        let (number, unit) = BYTE_UNITS
            .iter()
            .find_map(|&(name, unit)| {
                text.strip_suffix(name).map(|number| (number.trim_end(), unit))
            })
            .unwrap_or((text, 1));
        scaled(number, unit).map(ByteSize).ok_or_else(refuse)
    }
}

/// `number * unit` in exact decimal arithmetic, rounded down; none if `number` is no decimal number or the product is too large.
pub fn scaled(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| {
        !text.is_empty() && text.len() <= 19 && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !digits(whole) || !digits(fraction) {
        return None;
    }
    let whole = whole.parse::<u128>().ok()?.checked_mul(u128::from(unit))?;
    let places = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let part = fraction.parse::<u128>().ok()?.checked_mul(u128::from(unit))? / places;
    u64::try_from(whole.checked_add(part)?).ok()
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, unit) = BYTE_UNITS[..4]
            .iter()
            .find(|&&(_, unit)| self.0 != 0 && self.0.is_multiple_of(unit))
            .copied()
            .unwrap_or(("B", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}
