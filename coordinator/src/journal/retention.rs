//! Which files of a journal are given up. A plain decision over facts.

use std::time::Duration;

/// A file of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fact {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Since it was last written or touched; whoever has it open touches it.
    pub(super) age: Duration,
    /// Open in this process.
    pub(super) open: bool,
}

/// What may stay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// How long after its last sign of life a file stays.
    pub(super) keep: Duration,
    /// Bytes of all files together.
    pub(super) limit_bytes: u64,
    /// Files younger than this may be open in another process.
    pub(super) fresh: Duration,
}

/// Names of files to remove, so that what is too old is gone and `needed_bytes` more fit: the oldest first, and none that
/// anybody writes.
pub(super) fn given_up(facts: &[Fact], rules: Rules, needed_bytes: u64) -> Vec<String> {
    let mut idle: Vec<&Fact> = facts.iter().filter(|fact| !fact.open).collect();
    // The name makes the order one that every coordinator finds.
    idle.sort_by(|a, b| b.age.cmp(&a.age).then_with(|| a.name.cmp(&b.name)));
    let mut bytes = facts.iter().map(|fact| fact.bytes).fold(needed_bytes, u64::saturating_add);
    let mut names = Vec::new();
    for fact in idle {
        let pressed = bytes > rules.limit_bytes && fact.age >= rules.fresh;
        if fact.age >= rules.keep || pressed {
            bytes = bytes.saturating_sub(fact.bytes);
            names.push(fact.name.clone());
        }
    }
    names
}

#[cfg(test)]
mod tests;
