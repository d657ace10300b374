//! Directories with copies of the container.

use std::{fmt, path::PathBuf, str::FromStr};

/// Largest weight of a mirror.
const WEIGHT_MAX: u32 = 1000;

/// A directory with a copy of the container: `DIR`, or `DIR=WEIGHT`. The container itself weighs 1, so `=2` gives a mirror
/// twice the reads of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror {
    /// The directory.
    pub dir: PathBuf,
    /// Its share of the reads, relative to the others.
    pub weight: u32,
}

/// Why a text is not a [`Mirror`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no mirror; write DIR or DIR=WEIGHT with a weight of 1 to {WEIGHT_MAX} (a directory whose name has a = \
     needs a weight)"
)]
pub struct ParseMirrorError(String);

impl FromStr for Mirror {
    type Err = ParseMirrorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseMirrorError(text.to_owned());
        let (dir, weight) = match text.rsplit_once('=') {
            None => (text, 1),
            Some((dir, weight)) => (dir, weight.parse().map_err(|_| refuse())?),
        };
        if dir.is_empty() || !(1..=WEIGHT_MAX).contains(&weight) {
            return Err(refuse());
        }
        Ok(Self { dir: PathBuf::from(dir), weight })
    }
}

impl fmt::Display for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dir = self.dir.display();
        if self.weight == 1 && !self.dir.as_os_str().as_encoded_bytes().contains(&b'=') {
            write!(f, "{dir}")
        } else {
            write!(f, "{dir}={}", self.weight)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<(&str, u32)>) {
        let found = text.parse::<Mirror>();
        match expected {
            Some((dir, weight)) => {
                assert_eq!(found, Ok(Mirror { dir: PathBuf::from(dir), weight }));
                assert_eq!(found.unwrap().to_string(), text);
            }
            None => assert!(found.unwrap_err().to_string().contains("write DIR or DIR=WEIGHT")),
        }
    }

    #[test]
    fn mirrors_are_directories_with_weights() {
        check("/mnt/a", Some(("/mnt/a", 1)));
        check("/mnt/a=3", Some(("/mnt/a", 3)));
        check("/mnt/a=b=1", Some(("/mnt/a=b", 1)));
        for text in ["", "=2", "/mnt/a=", "/mnt/a=0", "/mnt/a=1001", "/mnt/a=-1", "/mnt/a=b"] {
            check(text, None);
        }
    }
}
