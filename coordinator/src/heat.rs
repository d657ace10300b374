//! How often experts are used lately: counted by the step thread, decayed, and summed over coordinators.
//!
//! [`HeatCounter`] counts rows; [`HeatMap`] is what placement reads. A sans-I/O core: time is an argument, in whatever unit
//! the half-life has.

use std::collections::BTreeMap;

use shimmer_proto::membership::records::HeatRecord;

/// Counts rows per expert and forgets them by halves.
#[derive(Debug, Clone)]
pub struct HeatCounter {
    /// By layer, empty for layers without routed experts.
    layers: Vec<LayerHeat>,
    half_life: f64,
}

#[derive(Debug, Clone, Default)]
struct LayerHeat {
    /// Rows since the last fold.
    fresh: Vec<u32>,
    /// Rows of before, decayed.
    past: Vec<f64>,
}

impl HeatCounter {
    /// Nothing counted yet. `experts` has a number of experts for each layer that has some; `half_life` is in the unit that
    /// [`Self::fold`] is told time in, seconds or steps.
    ///
    /// # Panics
    /// The half-life is not a number above 0.
    pub fn new(experts: &[(u32, u32)], half_life: f64) -> Self {
        assert!(half_life > 0.0, "a half-life is above 0");
        let mut layers = Vec::new();
        for &(layer, experts) in experts {
            let (layer, experts) = (layer as usize, experts as usize);
            if layers.len() <= layer {
                layers.resize(layer + 1, LayerHeat::default());
            }
            layers[layer] = LayerHeat { fresh: vec![0; experts], past: vec![0.0; experts] };
        }
        Self { layers, half_life }
    }

    /// Counts one row of one expert. An expert that does not exist is not counted.
    pub fn count(&mut self, layer: u32, expert: u32) {
        self.count_rows(layer, expert, 1);
    }

    /// Counts several rows of one expert.
    pub fn count_rows(&mut self, layer: u32, expert: u32, rows: u32) {
        let of_layer = self.layers.get_mut(layer as usize);
        if let Some(fresh) = of_layer.and_then(|l| l.fresh.get_mut(expert as usize)) {
            *fresh = fresh.saturating_add(rows);
        }
    }

    /// Lets `elapsed` pass: what was counted before decays, what was counted since joins it undecayed.
    pub fn fold(&mut self, elapsed: f64) {
        let kept = if elapsed > 0.0 { libm::exp2(-elapsed / self.half_life) } else { 1.0 };
        for LayerHeat { fresh, past } in &mut self.layers {
            for (past, fresh) in past.iter_mut().zip(fresh) {
                *past = *past * kept + f64::from(std::mem::take(fresh));
            }
        }
    }

    /// What has been folded, for the membership store.
    pub fn record(&self) -> HeatRecord {
        #[expect(clippy::cast_possible_truncation, reason = "the nearest f32 is near enough")]
        let narrow = |past: &Vec<f64>| past.iter().map(|&rows| rows as f32).collect();
        let layers = (0..).zip(&self.layers).filter(|(_, l)| !l.past.is_empty());
        HeatRecord { layers: layers.map(|(layer, l)| (layer, narrow(&l.past))).collect() }
    }
}

/// Heat of every expert over all coordinators; 0 for those that nobody spoke of.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeatMap {
    layers: BTreeMap<u32, Vec<f64>>,
}

impl HeatMap {
    /// Adds what one coordinator counted. Values that are no counts are taken for 0: they decide about speed only.
    pub fn add(&mut self, record: &HeatRecord) {
        for (layer, rows) in &record.layers {
            let sums = self.layers.entry(*layer).or_default();
            if sums.len() < rows.len() {
                sums.resize(rows.len(), 0.0);
            }
            for (sum, rows) in sums.iter_mut().zip(rows) {
                if rows.is_finite() && *rows > 0.0 {
                    *sum += f64::from(*rows);
                }
            }
        }
    }

    /// Rows of one expert lately.
    pub fn of(&self, layer: u32, expert: u32) -> f64 {
        let of_layer = self.layers.get(&layer);
        of_layer.and_then(|rows| rows.get(expert as usize)).copied().unwrap_or(0.0)
    }
}

impl<'a> FromIterator<&'a HeatRecord> for HeatMap {
    fn from_iter<I: IntoIterator<Item = &'a HeatRecord>>(records: I) -> Self {
        let mut map = Self::default();
        records.into_iter().for_each(|record| map.add(record));
        map
    }
}

#[cfg(test)]
mod tests;
