//! What things cost on one machine, as `shimmer bench --calibrate` measured them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ForecastError;

/// Seconds by number of rows, straight between the measured points, and beyond the last two as between them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Curve {
    /// Ascending.
    pub(crate) rows: Vec<f64>,
    pub(crate) seconds: Vec<f64>,
}

impl Curve {
    /// Seconds for so many rows.
    pub(crate) fn at(&self, rows: f64) -> f64 {
        let points: Vec<(f64, f64)> =
            self.rows.iter().copied().zip(self.seconds.iter().copied()).collect();
        let (first, last) = match points.as_slice() {
            [] => return 0.0,
            // One point: in proportion.
            [(at, seconds)] => return seconds * rows / at,
            [first, .., last] => (*first, *last),
        };
        if rows <= first.0 {
            return first.1;
        }
        let upper = points.iter().position(|point| point.0 >= rows).unwrap_or(points.len() - 1);
        let (low, high) = (points[upper - 1], points[upper]);
        let slope = (high.1 - low.1) / (high.0 - low.0);
        if rows > last.0 {
            // What grows with rows does not shrink beyond the last of them.
            return last.1 + slope.max(0.0) * (rows - last.0);
        }
        low.1 + slope * (rows - low.0)
    }

    /// The same for any number of rows.
    pub(crate) fn always(seconds: f64) -> Self {
        Self { rows: vec![1.0, 2.0], seconds: vec![seconds, seconds] }
    }

    /// A curve through points that were measured: one row first, and every further one beyond those before it.
    pub(crate) fn through(points: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut curve = Self::default();
        for (rows, seconds) in points {
            if rows.is_finite() && curve.rows.last().is_none_or(|last| rows > *last + 0.5) {
                curve.rows.push(rows.max(1.0));
                curve.seconds.push(seconds.max(0.0));
            }
        }
        curve
    }

    fn check(&self, name: &str) -> Result<(), String> {
        let ascending = self.rows.windows(2).all(|pair| pair[0] < pair[1]);
        let counts = self.rows.len() == self.seconds.len() && !self.rows.is_empty();
        let from_one = self.rows.iter().all(|rows| rows.is_finite() && *rows >= 1.0);
        if !ascending || !counts || !from_one {
            return Err(format!("{name}: rows ascend from 1, with as many seconds"));
        }
        match self.seconds.iter().find(|s| !(s.is_finite() && **s >= 0.0)) {
            Some(bad) => Err(format!("{name}: {bad} is no time in seconds")),
            None => Ok(()),
        }
    }

    /// Every value times a factor.
    #[must_use]
    pub(crate) fn times(&self, factor: f64) -> Self {
        let seconds = self.seconds.iter().map(|seconds| seconds * factor).collect();
        Self { rows: self.rows.clone(), seconds }
    }
}

/// Times of one machine. All are medians of rounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Costs {
    /// Digest of the container that was measured; others have other sizes.
    pub(crate) container: String,
    /// Threads for arithmetic.
    pub(crate) threads: usize,
    /// Attention to one earlier position, all layers, of a decode row and of a prompt row.
    pub(crate) attention_decode_s: f64,
    pub(crate) attention_prefill_s: f64,
    /// A step of the trunk over all layers, by rows, at the start of a sequence.
    pub(crate) trunk: Curve,
    /// One expert, by the rows that go to it.
    pub(crate) expert: Curve,
    /// Sending a layer's work to one worker on the same host and hearing of it, beside its arithmetic, by the rows of the
    /// message.
    pub(crate) message: Curve,
    /// Each further worker of the same layer, by the rows of its message.
    pub(crate) message_more: Curve,
    /// What an expert that is not in memory adds to a step, by the rows of the step: the more arithmetic a step has, the
    /// more of its reads hide behind it.
    pub(crate) read: Curve,
}

impl Costs {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It cannot be read, has an unknown key, or is not a calibration.
    pub(crate) fn read(path: &Path) -> Result<Self, ForecastError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ForecastError::Read { path: name.clone(), source })?;
        let parse = |message| ForecastError::Parse { path: name.clone(), message };
        let costs: Self =
            toml::from_str(&text).map_err(|error| parse(error.message().trim().to_owned()))?;
        costs.check().map_err(parse)?;
        Ok(costs)
    }

    fn check(&self) -> Result<(), String> {
        let times = [
            ("attention-decode-s", self.attention_decode_s),
            ("attention-prefill-s", self.attention_prefill_s),
        ];
        if let Some((name, bad)) = times.iter().find(|(_, s)| !(s.is_finite() && *s >= 0.0)) {
            return Err(format!("{name}: {bad} is no time in seconds"));
        }
        let curves = [
            ("trunk", &self.trunk),
            ("expert", &self.expert),
            ("message", &self.message),
            ("message-more", &self.message_more),
            ("read", &self.read),
        ];
        curves.into_iter().try_for_each(|(name, curve)| curve.check(name))
    }

    /// The file.
    pub(crate) fn to_toml(&self) -> String {
        toml::to_string(self).expect("numbers and lists of them are TOML")
    }
}
