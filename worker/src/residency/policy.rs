//! Which expert goes when room is needed.

pub use crate::tier_options::Policy;

/// Works of a layer after which all heats are halved: a few minutes of decoding. Old favourites must not outlive their use.
pub(super) const DECAY_WORKS: u64 = 4096;

/// A lead that a newcomer must have over a victim, beside a quarter of the victim's score: four uses.
const LEAD: u64 = 4 << 8;

/// Uses below which nothing is protected from prefetch.
const WARM: u32 = 2;

/// Settings of a layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Order of eviction on demand.
    pub policy: Policy,
    /// Whether prefetch spares experts that are clearly hotter than what it would load.
    pub guard: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { policy: Policy::Lru, guard: true }
    }
}

/// An exchange of a pinned expert against an unpinned one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RePin {
    /// Pinned from now on.
    pub pinned: u32,
    /// No longer pinned.
    pub released: u32,
}

/// Frequency above recency: uses in units of 256, and up to 255 for how recent the last one is.
pub(super) fn score(heat: u32, age: u64) -> u64 {
    u64::from(heat) << 8 | 255_u64.saturating_sub(age)
}

/// Whether a newcomer may not take the place of a victim: the victim is warm and would have to lose by a clear margin.
pub(super) fn protected(victim_heat: u32, victim: u64, newcomer: u64) -> bool {
    victim_heat >= WARM && !clearly_hotter(newcomer, victim)
}

/// Whether one score leads another by a quarter and four uses, so that neighbours do not swap for ever.
pub(super) fn clearly_hotter(hot: u64, cold: u64) -> bool {
    hot >= cold + cold / 4 + LEAD
}
