//! How often experts were used, over the runs of a worker: what decides which ones are pinned.

use serde::{Deserialize, Serialize};

/// Works of a layer after which what was counted so far weighs half.
const HALF_LIFE: u64 = 100_000;

/// Uses of the experts of every layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    layers: Vec<LayerUsage>,
}

/// Uses of the experts of one layer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerUsage {
    /// Works since the counts were last halved.
    pub works: u64,
    /// Uses by expert.
    pub uses: Vec<u64>,
}

impl Usage {
    /// Counts by layer; layers without experts are empty.
    pub fn new(layers: Vec<LayerUsage>) -> Self {
        Self { layers }
    }

    /// Counts by layer.
    pub fn layers(&self) -> &[LayerUsage] {
        &self.layers
    }

    /// Uses of an expert; 0 for one that was never seen.
    pub fn of(&self, layer: u32, expert: u32) -> u64 {
        let layer = self.layers.get(layer as usize);
        layer.and_then(|layer| layer.uses.get(expert as usize)).copied().unwrap_or(0)
    }

    /// Whether nothing was ever counted.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().flat_map(|layer| &layer.uses).all(|count| *count == 0)
    }

    /// Adds what a layer saw in `works` works. Whole half-lives only, so that saving often forgets nothing.
    pub fn add(&mut self, layer: u32, works: u64, uses: &[u64]) {
        let layer = layer as usize;
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, LayerUsage::default());
        }
        let counts = &mut self.layers[layer];
        if counts.uses.len() < uses.len() {
            counts.uses.resize(uses.len(), 0);
        }
        let works = counts.works.saturating_add(works);
        let halvings = u32::try_from(works / HALF_LIFE).unwrap_or(u32::MAX);
        counts.works = works % HALF_LIFE;
        for count in &mut counts.uses {
            *count = count.checked_shr(halvings).unwrap_or(0);
        }
        for (count, uses) in counts.uses.iter_mut().zip(uses) {
            *count = count.saturating_add(*uses);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_counts_fade() {
        let mut usage = Usage::default();
        usage.add(1, 0, &[5, 9, 5]);
        usage.add(1, HALF_LIFE, &[0, 0, 7]);
        assert_eq!(usage.layers()[1].uses, [2, 4, 9]);
        assert_eq!(usage.of(7, 7), 0);
        assert!(!usage.is_empty());
    }

    #[test]
    fn adding_often_forgets_nothing_and_fades_alike() {
        let (mut often, mut once) = (Usage::default(), Usage::default());
        often.add(0, 0, &[1000]);
        once.add(0, 0, &[1000]);
        for _ in 0..HALF_LIFE - 1 {
            often.add(0, 1, &[0]);
        }
        assert_eq!(often.of(0, 0), 1000);
        often.add(0, 1, &[0]);
        once.add(0, HALF_LIFE, &[0]);
        assert_eq!((often.of(0, 0), &often), (500, &once));
        once.add(0, 64 * HALF_LIFE, &[3]);
        assert_eq!(once.of(0, 0), 3);
    }

    #[test]
    fn counts_do_not_overflow() {
        let mut usage = Usage::new(vec![LayerUsage { works: 0, uses: vec![u64::MAX] }]);
        usage.add(0, 0, &[u64::MAX]);
        assert_eq!(usage.of(0, 0), u64::MAX);
    }
}
