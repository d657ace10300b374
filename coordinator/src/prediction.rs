//! HOT PATH. Predicted experts: how they are ranked, and how often they come true. A sans-I/O core.

use serde::Serialize;
use shimmer_kernels::AttentionSpan;

use crate::gating::{Choices, RowFaults};

/// Two sets of experts side by side, summed over many comparisons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Overlap {
    /// Experts that were predicted.
    pub predicted: u64,
    /// Experts that were chosen.
    pub chosen: u64,
    /// Experts that were both.
    pub hits: u64,
}

impl Overlap {
    fn add(&mut self, predicted: u64, chosen: u64, hits: u64) {
        self.predicted += predicted;
        self.chosen += chosen;
        self.hits += hits;
    }

    /// What was compared after an earlier moment of the same sums.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            predicted: self.predicted - earlier.predicted,
            chosen: self.chosen - earlier.chosen,
            hits: self.hits - earlier.hits,
        }
    }

    /// Share of the chosen experts that had been predicted; none before anything was compared.
    #[expect(clippy::cast_precision_loss, reason = "a share for people")]
    pub fn recall(&self) -> Option<f64> {
        (self.chosen > 0).then(|| self.hits as f64 / self.chosen as f64)
    }
}

/// How often predictions came true since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Recall {
    /// Row by row: its predicted experts against those it chose.
    pub rows: Overlap,
    /// Step by step: the experts of the hint, after its cap, against those of all rows.
    pub steps: Overlap,
    /// Row by row, for comparison: the experts of the token before against those it chose.
    pub previous: Overlap,
}

impl Recall {
    /// What was compared after an earlier moment of the same sums.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            rows: self.rows.since(&earlier.rows),
            steps: self.steps.since(&earlier.steps),
            previous: self.previous.since(&earlier.previous),
        }
    }
}

/// The union of many rows' experts, most likely first.
#[derive(Debug, Default)]
pub struct Ranking {
    experts: Vec<u32>,
    has: Vec<bool>,
}

impl Ranking {
    /// Takes every row's best expert, then every row's second best, each expert once, until there are `most`.
    pub fn rank(
        &mut self,
        choices: &Choices,
        rows: usize,
        skipped: &RowFaults,
        experts: usize,
        most: usize,
    ) {
        self.experts.clear();
        self.has.clear();
        self.has.resize(experts, false);
        for rank in 0..choices.top_k() {
            for row in (0..rows).filter(|&row| !skipped.has(row)) {
                if self.experts.len() == most {
                    return;
                }
                let expert = choices.of(row)[rank].expert;
                if !std::mem::replace(&mut self.has[expert as usize], true) {
                    self.experts.push(expert);
                }
            }
        }
    }

    /// In order.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }
}

/// A prediction that waits for the truth.
#[derive(Clone, Copy, Debug)]
pub struct Predicted<'a> {
    /// Experts of the first rows.
    pub choices: &'a Choices,
    /// How many rows those are.
    pub rows: usize,
    /// Rows without a prediction.
    pub skipped: &'a RowFaults,
    /// What was told to the workers.
    pub ranking: &'a Ranking,
}

/// Compares predictions with what was chosen.
#[derive(Debug, Default)]
pub struct RecallMeter {
    recall: Recall,
    /// The last token of every sequence of the step before, and of this one.
    before: Vec<LastToken>,
    now: Vec<LastToken>,
    spans: Vec<SpanRows>,
    chosen: Vec<bool>,
}

/// What the last token of a sequence chose.
#[derive(Debug, Default)]
struct LastToken {
    /// The sequence, for as long as it runs: no other has its first page.
    page: u32,
    position: usize,
    /// By layer.
    experts: Vec<Vec<u32>>,
}

#[derive(Clone, Copy, Debug)]
struct SpanRows {
    rows: usize,
    /// Place of its last token in `before`.
    before: Option<usize>,
}

impl RecallMeter {
    /// What has been counted so far.
    pub fn recall(&self) -> Recall {
        self.recall
    }

    /// Starts a step.
    pub fn begin(&mut self, spans: &[AttentionSpan<'_>], layers: usize) {
        std::mem::swap(&mut self.before, &mut self.now);
        self.now.resize_with(spans.len(), LastToken::default);
        self.spans.clear();
        for (span, last) in spans.iter().zip(&mut self.now) {
            let page = span.pages.first().copied().unwrap_or_default();
            let follows =
                |last: &LastToken| (last.page, last.position + 1) == (page, span.first_position);
            let before = self.before.iter().position(follows);
            self.spans.push(SpanRows { rows: span.rows, before });
            (last.page, last.position) = (page, span.first_position + span.rows - 1);
            last.experts.resize_with(layers, Vec::new);
            last.experts.iter_mut().for_each(Vec::clear);
        }
    }

    /// Compares the choice of one layer with its prediction, if there is one, and remembers it for the next token.
    pub fn measure(
        &mut self,
        layer: usize,
        chosen: &Choices,
        faults: &RowFaults,
        predicted: Option<Predicted<'_>>,
    ) {
        if let Some(predicted) = predicted {
            self.compare(layer, chosen, faults, predicted);
        }
        let mut row = 0;
        for (span, last) in self.spans.iter().zip(&mut self.now) {
            row += span.rows;
            last.experts[layer].extend(chosen.of(row - 1).iter().map(|selected| selected.expert));
        }
    }

    fn compare(
        &mut self,
        layer: usize,
        chosen: &Choices,
        faults: &RowFaults,
        predicted: Predicted<'_>,
    ) {
        let Predicted { choices, rows, skipped, ranking } = predicted;
        let top_k = chosen.top_k() as u64;
        let Self { recall, before, spans, chosen: union, .. } = self;
        union.clear();
        union.resize(ranking.has.len(), false);
        let (mut row, mut all, mut hinted) = (0, 0, 0);
        for span in spans {
            for place in 0..span.rows {
                let at = row;
                row += 1;
                if faults.has(at) {
                    continue;
                }
                for selected in chosen.of(at) {
                    let expert = selected.expert as usize;
                    if !std::mem::replace(&mut union[expert], true) {
                        all += 1;
                        hinted += u64::from(ranking.has[expert]);
                    }
                }
                if at >= rows || skipped.has(at) {
                    continue;
                }
                let both = |has: &dyn Fn(u32) -> bool| {
                    chosen.of(at).iter().filter(|selected| has(selected.expert)).count() as u64
                };
                let guess = choices.of(at);
                recall.rows.add(top_k, top_k, both(&|e| guess.iter().any(|g| g.expert == e)));
                let last = span.before.map(|index| &before[index].experts[layer]);
                if place > 0 {
                    let last = chosen.of(at - 1);
                    recall.previous.add(
                        top_k,
                        top_k,
                        both(&|e| last.iter().any(|l| l.expert == e)),
                    );
                } else if let Some(last) = last.filter(|last| !last.is_empty()) {
                    recall.previous.add(top_k, top_k, both(&|e| last.contains(&e)));
                }
            }
        }
        recall.steps.add(ranking.experts.len() as u64, all, hinted);
    }
}

#[cfg(test)]
mod tests;
