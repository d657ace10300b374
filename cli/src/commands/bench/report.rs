//! What the runs of a comparison gave.

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};

use super::{Arm, CacheState};
use crate::{error::Error, profile::Profile};

/// One run of one arm.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) profile: Profile,
    pub(super) prefill_tokens_per_s: Option<f64>,
    /// Over the digests of all prompts.
    pub(super) sha256: String,
    /// Share of the files' pages in the page cache before it.
    pub(super) cached: Option<f64>,
}

impl Run {
    /// A line for who waits.
    pub(super) fn summary(&self) -> String {
        format!(
            "decode {} s, felt wait {:.3} s, hits {}, page cache held {}",
            shown(self.profile.decode_wall(), 3),
            self.profile.felt_wait(),
            percent(self.profile.hit_rate()),
            percent(self.cached),
        )
    }

    fn json(&self) -> Value {
        json!({
            "sha256": self.sha256,
            "page_cache_share": self.cached,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "profile": self.profile.json(),
        })
    }
}

/// All runs, by arm.
#[derive(Debug)]
pub(super) struct Results {
    cache: CacheState,
    arms: Vec<ArmRuns>,
}

#[derive(Debug)]
struct ArmRuns {
    name: String,
    changes: String,
    runs: Vec<Run>,
}

/// A figure over the runs of an arm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) least: f64,
    pub(super) median: f64,
    pub(super) most: f64,
}

impl Spread {
    /// None unless every run has the figure.
    pub(super) fn of(values: impl Iterator<Item = Option<f64>>) -> Option<Self> {
        let mut values: Vec<f64> = values.collect::<Option<_>>()?;
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], values[middle])
        } else {
            values[middle]
        };
        Some(Self { least, median, most })
    }

    fn json(self) -> Value {
        let Self { least, median, most } = self;
        json!({ "min": least, "median": median, "max": most })
    }
}

impl ArmRuns {
    fn spread(&self, of: impl Fn(&Run) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs.iter().map(of))
    }

    fn decode_wall(&self) -> Option<Spread> {
        self.spread(|run| run.profile.decode_wall())
    }

    fn json(&self, first: &Self) -> Value {
        let spread = |of: &dyn Fn(&Run) -> Option<f64>| self.spread(of).map(Spread::json);
        json!({
            "name": self.name,
            "changes": self.changes,
            "hit_rate": spread(&|run| run.profile.hit_rate()),
            "mb_per_token": spread(&|run| run.profile.mb_per_token()),
            "felt_wait_s": spread(&|run| Some(run.profile.felt_wait())),
            "decode_wall_s": spread(&|run| run.profile.decode_wall()),
            "decode_speed_against_first": self.speed(first),
            "prefill_tokens_per_s": spread(&|run| run.prefill_tokens_per_s),
            "runs": self.runs.iter().map(Run::json).collect::<Vec<_>>(),
        })
    }

    /// How many times faster than another arm it decodes, by medians.
    fn speed(&self, other: &Self) -> Option<f64> {
        let (ours, theirs) = (self.decode_wall()?.median, other.decode_wall()?.median);
        (ours > 0.0).then(|| theirs / ours)
    }
}

impl Results {
    pub(super) fn new(arms: &[Arm], cache: CacheState) -> Self {
        let arms = arms.iter().map(|arm| ArmRuns {
            name: arm.name.clone(),
            changes: arm.changes.clone(),
            runs: Vec::new(),
        });
        Self { cache, arms: arms.collect() }
    }

    pub(super) fn add(&mut self, arm: usize, run: Run) {
        self.arms[arm].runs.push(run);
    }

    pub(super) fn json(&self) -> Value {
        let first = &self.arms[0];
        json!({
            "page_cache": self.cache.name(),
            "same_bytes": self.check().is_ok(),
            "arms": self.arms.iter().map(|arm| arm.json(first)).collect::<Vec<_>>(),
        })
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY).set_header([
            "arm",
            "hit rate",
            "MB/token",
            "felt wait s",
            "decode s (min to max)",
            "speed",
            "prefill tokens/s",
            "sha256",
        ]);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for arm in &self.arms {
            let median = |of: &dyn Fn(&Run) -> Option<f64>| arm.spread(of).map(|s| s.median);
            let decode = arm.decode_wall().map_or_else(
                || "-".to_owned(),
                |Spread { least, median, most }| format!("{median:.3} ({least:.3} to {most:.3})"),
            );
            table.add_row([
                arm.name.clone(),
                percent(median(&|run| run.profile.hit_rate())),
                shown(median(&|run| run.profile.mb_per_token()), 2),
                shown(median(&|run| Some(run.profile.felt_wait())), 3),
                decode,
                arm.speed(&self.arms[0]).map_or_else(|| "-".to_owned(), |s| format!("{s:.2}x")),
                shown(median(&|run| run.prefill_tokens_per_s), 1),
                arm.runs.first().map_or("", |run| &run.sha256[..12]).to_owned(),
            ]);
        }
        let cached = self.arms.iter().flat_map(|arm| &arm.runs).map(|run| run.cached);
        let cached = Spread::of(cached).map_or_else(
            || "which this file system does not show".to_owned(),
            |s| {
                format!(
                    "which held {} to {} of the files",
                    percent(Some(s.least)),
                    percent(Some(s.most))
                )
            },
        );
        format!(
            "{table}\nmedians of {} runs each, in turn and in reverse turn; page cache {} before each run, {cached}",
            self.arms[0].runs.len(),
            self.cache.name(),
        )
    }

    /// Fails unless all runs gave the same bytes.
    pub(super) fn check(&self) -> Result<(), Error> {
        let runs = || self.arms.iter().flat_map(|arm| arm.runs.iter().map(move |run| (arm, run)));
        let Some((_, first)) = runs().next() else { return Ok(()) };
        match runs().find(|(_, run)| run.sha256 != first.sha256) {
            None => Ok(()),
            Some((arm, run)) => Err(Error::failed(
                "the arms give different bytes",
                format!(
                    "sha256 {} of arm {}, {} of arm {}",
                    first.sha256, self.arms[0].name, run.sha256, arm.name
                ),
            )),
        }
    }
}

fn shown(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}
