//! When the cache shrinks, by how much, and when it may grow again.

/// Checks without a shortage before the cache grows again: what pressed once may come back.
const CALM_CHECKS: u32 = 16;

/// Steps in which all of the plan comes back; one is never less than a slot.
const GROWTH_STEPS: u64 = 8;

/// What was measured. Absent is what could not be read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// Anonymous bytes of the process.
    pub anonymous: Option<u64>,
    /// Bytes that host and control groups can still give.
    pub headroom: Option<u64>,
}

/// The slots of one store, those of pinned experts included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheBytes {
    /// As planned.
    pub planned: u64,
    /// As allowed now.
    pub now: u64,
    /// What is pinned, and one slot for each layer that needs one: it never gets smaller.
    pub least: u64,
    /// The largest slot.
    pub slot: u64,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Nothing.
    Keep,
    /// Give back at least this much, and allow less from now on.
    Shrink(u64),
    /// Allow at most this much more.
    Grow(u64),
}

/// Compares what is still to come with what is left.
#[derive(Debug)]
pub struct Guard {
    /// Anonymous bytes of the process once everything it plans to hold is in use.
    projected: u64,
    /// Bytes of headroom that the plan left unused.
    kept_free: u64,
    calm: u32,
}

impl Guard {
    /// A guard of a process that will hold `projected` bytes beside experts and leaves `kept_free` unused.
    pub fn new(projected: u64, kept_free: u64) -> Self {
        Self { projected, kept_free, calm: 0 }
    }

    /// Experts take `now` bytes of the projection, where they took `before`.
    pub fn promised(&mut self, before: u64, now: u64) {
        self.projected = self.projected.saturating_sub(before).saturating_add(now);
    }

    /// What a store should do.
    ///
    /// Half of what was kept free may go before anything is evicted, and the cache then shrinks until all of it is free
    /// again, so that a process at the edge does not shrink at every check. Without a figure of what is left, only growth
    /// of the process itself beyond the projection counts.
    pub fn decide(&mut self, reading: Reading, cache: CacheBytes) -> Decision {
        let Reading { anonymous, headroom } = reading;
        let (left, to_come) = match (headroom, anonymous) {
            (Some(headroom), held) => {
                (headroom, self.projected.saturating_sub(held.unwrap_or(self.projected)))
            }
            (None, Some(held)) => (self.projected.saturating_add(self.kept_free), held),
            (None, None) => return Decision::Keep,
        };
        let wanted = to_come.saturating_add(self.kept_free);
        if left < wanted - self.kept_free / 2 {
            self.calm = 0;
            let shortage = wanted - left;
            let bytes = shortage.min(cache.now.saturating_sub(cache.least));
            return if bytes > 0 { Decision::Shrink(bytes) } else { Decision::Keep };
        }
        let missing = cache.planned.saturating_sub(cache.now);
        let step = (cache.planned / GROWTH_STEPS).max(cache.slot);
        let room = left.saturating_sub(wanted).min(missing).min(step);
        if room < cache.slot.max(1) {
            self.calm = 0;
            return Decision::Keep;
        }
        self.calm += 1;
        if self.calm < CALM_CHECKS {
            return Decision::Keep;
        }
        self.calm = 0;
        Decision::Grow(room)
    }
}

#[cfg(test)]
mod tests;
