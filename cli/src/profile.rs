//! Where the time and the bytes of a run went: the difference of two moments of counters that are kept in any case. What
//! was not measured is unknown, not zero.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};
use shimmer_coordinator::{engine::EngineStats, prediction::Overlap};
use shimmer_worker::{
    ExpertCore, TierSnapshot, metrics::is_gauge, tier_counters::ReadClassSnapshot,
};

/// Counters at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Moment {
    /// None in a worker by itself.
    engine: Option<EngineStats>,
    tiers: Vec<TierSnapshot>,
}

impl Moment {
    /// Reads the counters of the workers, and of the engine where there is one.
    pub(crate) fn now(engine: Option<EngineStats>, cores: &[Arc<ExpertCore>]) -> Self {
        Self { engine, tiers: cores.iter().map(|core| core.tier_snapshot()).collect() }
    }
}

/// What happened between two moments, over all workers of the process.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    engine: Option<EngineStats>,
    /// By the name of the counter.
    tiers: BTreeMap<&'static str, u64>,
    cold: ReadClassSnapshot,
    warm: ReadClassSnapshot,
}

impl Profile {
    pub(crate) fn between(before: &Moment, after: &Moment) -> Self {
        let engine = after.engine.as_ref().map(|engine| match &before.engine {
            Some(earlier) => engine.since(earlier),
            None => engine.clone(),
        });
        let none = TierSnapshot::default();
        let mut tiers = BTreeMap::new();
        let (mut cold, mut warm) = <(ReadClassSnapshot, ReadClassSnapshot)>::default();
        for (index, now) in after.tiers.iter().enumerate() {
            let earlier = before.tiers.get(index).unwrap_or(&none);
            for ((name, now), (_, earlier)) in now.entries().zip(earlier.entries()) {
                *tiers.entry(name).or_default() +=
                    if is_gauge(name) { now } else { now.saturating_sub(earlier) };
            }
            add_reads(&mut cold, &now.demand_cold, &earlier.demand_cold);
            add_reads(&mut warm, &now.demand_warm, &earlier.demand_warm);
        }
        Self { engine, tiers, cold, warm }
    }

    fn count(&self, name: &str) -> u64 {
        self.tiers.get(name).copied().unwrap_or_default()
    }

    fn seconds(&self, name: &str) -> f64 {
        number(self.count(name)) / 1e6
    }

    fn wanted(&self) -> u64 {
        self.count("hits_pinned") + self.count("hits_cache") + self.count("misses")
    }

    fn share(&self, name: &str) -> Option<f64> {
        ratio(number(self.count(name)), number(self.wanted()))
    }

    /// Wanted experts that were in memory, as a share of the wanted ones.
    pub(crate) fn hit_rate(&self) -> Option<f64> {
        Some(self.share("hits_pinned")? + self.share("hits_cache")?)
    }

    /// Million bytes read for experts per generated token.
    pub(crate) fn mb_per_token(&self) -> Option<f64> {
        let tokens = self.engine.as_ref()?.generated_tokens;
        ratio(number(self.count("read_bytes")) / 1e6, number(tokens))
    }

    /// Seconds that compute stood still for experts.
    pub(crate) fn felt_wait(&self) -> f64 {
        self.seconds("felt_wait_us")
    }

    /// Seconds of the steps of decode rows alone.
    pub(crate) fn decode_wall(&self) -> Option<f64> {
        let engine = self.engine.as_ref()?;
        (engine.decode_steps > 0).then_some(engine.decode_step.sum.as_secs_f64())
    }

    /// Every figure; unknown ones are null.
    pub(crate) fn json(&self) -> Value {
        let count = |name| self.count(name);
        let dropped: BTreeMap<&str, u64> = self.dropped().collect();
        let engine = self.engine.as_ref();
        json!({
            "experts": {
                "wanted": self.wanted(),
                "hit_rate": self.hit_rate(),
                "pinned_rate": self.share("hits_pinned"),
                "cache_rate": self.share("hits_cache"),
                "miss_rate": self.share("misses"),
                "resident": count("experts_resident"),
                "pinned": count("experts_pinned"),
                "slots": count("slots"),
                "slot_bytes": count("slot_bytes"),
            },
            "read": {
                "experts": count("reads"),
                "bytes": count("read_bytes"),
                "mb_per_token": self.mb_per_token(),
                "service_s": self.seconds("read_service_us"),
                "felt_wait_s": self.felt_wait(),
                "most_in_flight": count("loads_in_flight_max"),
                "errors": count("read_errors"),
                "mirror_fallbacks": count("mirror_fallbacks"),
                "direct_fallbacks": count("direct_fallbacks"),
            },
            "decode": engine.map(|engine| json!({
                "steps": engine.decode_steps,
                "wall_s": self.decode_wall(),
                "mean_step_ms": self.mean_step_ms(),
                "generated_tokens": engine.generated_tokens,
            })),
            "disk": { "cold": disk(&self.cold), "warm": disk(&self.warm) },
            "prefetch": {
                "issued": count("prefetch_issued"),
                "useful": count("prefetch_useful"),
                "late": count("prefetch_late"),
                "dropped": dropped,
                "hints": engine.map(|engine| engine.hints),
                "recall": engine.map(|engine| json!({
                    "row": engine.recall.rows.recall(),
                    "step": engine.recall.steps.recall(),
                    "previous_token": engine.recall.previous.recall(),
                })),
            },
            "evictions": self.evictions().collect::<BTreeMap<_, _>>(),
            "repins": count("repins"),
            "guard_shrinks": count("guard_shrinks"),
            "mappings": count("mappings"),
            "off_node_pages": count("off_node_pages"),
        })
    }

    fn mean_step_ms(&self) -> Option<f64> {
        ratio(self.decode_wall()? * 1e3, number(self.engine.as_ref()?.decode_steps))
    }

    fn dropped(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.with_prefix("prefetch_dropped_")
    }

    fn evictions(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.with_prefix("evictions_")
    }

    fn with_prefix(&self, prefix: &'static str) -> impl Iterator<Item = (&'static str, u64)> {
        self.tiers
            .iter()
            .filter_map(move |(name, count)| Some((name.strip_prefix(prefix)?, *count)))
    }

    /// A table for people.
    pub(crate) fn text(&self) -> String {
        let count = |name| self.count(name);
        let mut lines = vec![
            format!(
                "experts    {} hits of {} wanted: pinned {}, cache {}; missed {}",
                percent(self.hit_rate()),
                self.wanted(),
                percent(self.share("hits_pinned")),
                percent(self.share("hits_cache")),
                percent(self.share("misses")),
            ),
            format!(
                "memory     {} of {} slots hold an expert, {} pinned; {}; {} mappings, {} off-node pages",
                count("experts_resident"),
                count("slots"),
                count("experts_pinned"),
                megabytes(count("slot_bytes")),
                count("mappings"),
                count("off_node_pages"),
            ),
            format!(
                "read       {} MB per token; {} in {} reads; service {:.3} s, felt wait {:.3} s",
                plain(self.mb_per_token()),
                megabytes(count("read_bytes")),
                count("reads"),
                self.seconds("read_service_us"),
                self.felt_wait(),
            ),
        ];
        if let Some(engine) = &self.engine {
            lines.push(format!(
                "decode     {} steps in {} s, {} ms each; {} tokens",
                engine.decode_steps,
                plain(self.decode_wall()),
                plain(self.mean_step_ms()),
                engine.generated_tokens,
            ));
        }
        for (class, reads) in [("cold", &self.cold), ("warm", &self.warm)] {
            lines.push(format!("disk {class}  {}", disk_text(reads)));
        }
        lines.push(format!(
            "prefetch   {} issued, {} useful, {} late; dropped: {}",
            count("prefetch_issued"),
            count("prefetch_useful"),
            count("prefetch_late"),
            listed(self.dropped()),
        ));
        if let Some(engine) = &self.engine {
            let recall = |overlap: &Overlap| percent(overlap.recall());
            lines.push(format!(
                "recall     by row {}, by step {}; the token before {}; {} hints",
                recall(&engine.recall.rows),
                recall(&engine.recall.steps),
                recall(&engine.recall.previous),
                engine.hints,
            ));
        }
        lines.push(format!("evictions  {}", listed(self.evictions())));
        lines.push(format!(
            "upkeep     {} re-pins, {} guard shrinks, {} read errors, {} mirror and {} direct fallbacks",
            count("repins"),
            count("guard_shrinks"),
            count("read_errors"),
            count("mirror_fallbacks"),
            count("direct_fallbacks"),
        ));
        lines.join("\n")
    }
}

fn add_reads(sum: &mut ReadClassSnapshot, now: &ReadClassSnapshot, earlier: &ReadClassSnapshot) {
    sum.reads += now.reads.saturating_sub(earlier.reads);
    sum.direct += now.direct.saturating_sub(earlier.direct);
    sum.bytes += now.bytes.saturating_sub(earlier.bytes);
    sum.service_us += now.service_us.saturating_sub(earlier.service_us);
    sum.wall_us += now.wall_us.saturating_sub(earlier.wall_us);
}

/// Bytes per microsecond are megabytes per second; a thousand of them are a gigabyte.
fn gb_per_s(bytes: u64, us: u64) -> Option<f64> {
    ratio(number(bytes) / 1e3, number(us))
}

fn concurrency(reads: &ReadClassSnapshot) -> Option<f64> {
    ratio(number(reads.service_us), number(reads.wall_us))
}

fn direct_share(reads: &ReadClassSnapshot) -> Option<f64> {
    ratio(number(reads.direct), number(reads.reads))
}

fn disk(reads: &ReadClassSnapshot) -> Value {
    json!({
        "experts": reads.reads,
        "bytes": reads.bytes,
        "gb_per_s_thread": gb_per_s(reads.bytes, reads.service_us),
        "gb_per_s_wall": gb_per_s(reads.bytes, reads.wall_us),
        "concurrency": concurrency(reads),
        "direct_share": direct_share(reads),
    })
}

fn disk_text(reads: &ReadClassSnapshot) -> String {
    format!(
        "{} in {} reads: {} GB/s per thread, {} GB/s per wall, {} at a time, {} direct",
        megabytes(reads.bytes),
        reads.reads,
        plain(gb_per_s(reads.bytes, reads.service_us)),
        plain(gb_per_s(reads.bytes, reads.wall_us)),
        plain(concurrency(reads)),
        percent(direct_share(reads)),
    )
}

fn listed(counts: impl Iterator<Item = (&'static str, u64)>) -> String {
    let text: Vec<String> =
        counts.map(|(name, count)| format!("{} {count}", name.replace('_', " "))).collect();
    text.join(", ")
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn number(count: u64) -> f64 {
    count as f64
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

fn plain(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", number(bytes) / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_unknown() {
        let profile = Profile::between(&Moment::default(), &Moment::default());
        let json = profile.json();
        assert_eq!(json["experts"]["hit_rate"], Value::Null);
        assert_eq!(json["read"]["mb_per_token"], Value::Null);
        assert_eq!(json["disk"]["cold"]["gb_per_s_wall"], Value::Null);
        assert_eq!(json["decode"], Value::Null);
        assert_eq!(json["prefetch"]["recall"], Value::Null);
        assert!(profile.text().starts_with("experts    - hits of 0 wanted"), "{}", profile.text());
    }

    #[test]
    fn figures_are_those_between_the_moments() {
        let tiers = |hits_cache, misses, slots| TierSnapshot {
            hits_cache,
            misses,
            slots,
            read_bytes: misses * 1_000_000,
            demand_cold: ReadClassSnapshot {
                reads: misses,
                direct: misses,
                bytes: misses * 1_000_000,
                service_us: misses * 500,
                wall_us: misses * 250,
            },
            ..TierSnapshot::default()
        };
        let engine =
            |generated_tokens| Some(EngineStats { generated_tokens, ..EngineStats::default() });
        let before = Moment { engine: engine(1), tiers: vec![tiers(5, 1, 8), tiers(0, 1, 8)] };
        let after = Moment { engine: engine(5), tiers: vec![tiers(11, 2, 8), tiers(0, 2, 8)] };
        let json = Profile::between(&before, &after).json();
        assert_eq!(json["experts"]["hit_rate"], 0.75);
        assert_eq!(json["experts"]["slots"], 16, "how things stand is not a difference");
        assert_eq!(json["read"]["mb_per_token"], 0.5);
        assert_eq!(json["disk"]["cold"]["gb_per_s_thread"], 2.0);
        assert_eq!(json["disk"]["cold"]["gb_per_s_wall"], 4.0);
        assert_eq!(json["disk"]["cold"]["concurrency"], 2.0);
        assert_eq!(json["disk"]["warm"]["concurrency"], Value::Null);
    }
}
