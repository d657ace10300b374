//! A choice of layers: `3-40`, `3,5,10-12`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Some layers of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers(Vec<RangeInclusive<u32>>);

/// Why a text is not a choice of layers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no choice of layers; write numbers and ranges, for example 3-40 or 3,5,10-12")]
pub struct ParseLayersError(String);

impl Layers {
    /// Whether a layer is among them.
    #[must_use]
    pub fn contains(&self, layer: u32) -> bool {
        self.0.iter().any(|range| range.contains(&layer))
    }

    /// All of them, as they were written.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().cloned().flatten()
    }

    /// Numbers, ascending, as ranges.
    #[must_use]
    pub fn of(numbers: &[u32]) -> Self {
        let mut ranges: Vec<RangeInclusive<u32>> = Vec::new();
        for &number in numbers {
            match ranges.last_mut() {
                Some(last) if last.end().checked_add(1) == Some(number) => {
                    *last = *last.start()..=number;
                }
                _ => ranges.push(number..=number),
            }
        }
        Self(ranges)
    }
}

impl FromStr for Layers {
    type Err = ParseLayersError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (first <= last).then_some(first..=last)
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        ranges.map(Self).ok_or_else(|| ParseLayersError(text.to_owned()))
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, last) => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<&[u32]>) {
        match (text.parse::<Layers>(), expected) {
            (Ok(layers), Some(numbers)) => {
                assert!(layers.iter().eq(numbers.iter().copied()), "{text}");
                assert!(numbers.iter().all(|number| layers.contains(*number)));
                assert!(!layers.contains(99));
                assert_eq!(Layers::of(numbers).to_string(), text);
            }
            (Err(error), None) => assert!(error.to_string().contains("write numbers and ranges")),
            (found, expected) => panic!("{text}: {found:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn layers_are_numbers_and_ranges() {
        check("3", Some(&[3]));
        check("3-5", Some(&[3, 4, 5]));
        check("0,2,5-7", Some(&[0, 2, 5, 6, 7]));
        for text in ["", "a", "3-", "-3", "5-3", "3,,4", "3-4-5"] {
            check(text, None);
        }
    }
}
