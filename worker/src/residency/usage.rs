//! How often experts were used, over the runs of a worker: what decides which ones are pinned.

/// Works after which what was counted before weighs half.
const HALF_LIFE: u64 = 100_000;

/// Uses of the experts of every layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    layers: Vec<Vec<u64>>,
}

impl Usage {
    /// Counts by layer and expert; layers without experts are empty.
    pub fn new(layers: Vec<Vec<u64>>) -> Self {
        Self { layers }
    }

    /// Counts by layer and expert.
    pub fn layers(&self) -> &[Vec<u64>] {
        &self.layers
    }

    /// Uses of an expert; 0 for one that was never seen.
    pub fn of(&self, layer: u32, expert: u32) -> u64 {
        let layer = self.layers.get(layer as usize);
        layer.and_then(|experts| experts.get(expert as usize)).copied().unwrap_or(0)
    }

    /// Whether nothing was ever counted.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().flatten().all(|count| *count == 0)
    }

    /// Adds what a layer saw in `works` works; what was there before fades accordingly.
    pub fn add(&mut self, layer: u32, works: u64, uses: &[u64]) {
        let layer = layer as usize;
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Vec::new());
        }
        let counts = &mut self.layers[layer];
        if counts.len() < uses.len() {
            counts.resize(uses.len(), 0);
        }
        for (count, uses) in counts.iter_mut().zip(uses) {
            let faded = u128::from(*count) * u128::from(HALF_LIFE)
                / (u128::from(HALF_LIFE) + u128::from(works));
            *count = u64::try_from(faded).unwrap_or(u64::MAX).saturating_add(*uses);
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
        assert_eq!(usage.layers()[1], [2, 4, 9]);
        assert_eq!(usage.of(7, 7), 0);
        assert!(!usage.is_empty());
    }

    #[test]
    fn counts_do_not_overflow() {
        let mut usage = Usage::new(vec![vec![u64::MAX]]);
        usage.add(0, 0, &[u64::MAX]);
        assert_eq!(usage.of(0, 0), u64::MAX);
    }
}
