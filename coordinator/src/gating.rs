//! HOT PATH. Which experts every row of a step goes to, and which rows have failed on the way.

use shimmer_kernels::gating::{GatingError, GatingRule, GatingScratch, Selected, select};

/// Why the sequence of a row cannot go on. The other rows of the step are not touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowFault {
    /// A NaN, an infinity or an overflow of this row's own arithmetic.
    Arithmetic {
        /// Where.
        layer: u32,
        /// What left the range of numbers.
        what: String,
    },
    /// One of its experts has no live owner, or the worker was lost with the row's work.
    Unavailable {
        /// Which, and what happened.
        detail: String,
    },
}

/// The first fault of every row of a step.
#[derive(Debug, Default)]
pub struct RowFaults {
    rows: Vec<Option<RowFault>>,
}

impl RowFaults {
    /// Starts a step without faults.
    pub fn reset(&mut self, rows: usize) {
        self.rows.clear();
        self.rows.resize(rows, None);
    }

    /// Takes over the faults of another step's first rows.
    pub fn copy(&mut self, other: &Self, rows: usize) {
        self.rows.clear();
        self.rows.extend_from_slice(&other.rows[..rows]);
    }

    /// Notes a fault; the first one of a row stays.
    pub fn fail(&mut self, row: usize, fault: RowFault) {
        self.rows[row].get_or_insert(fault);
    }

    /// The row takes part no longer.
    pub fn has(&self, row: usize) -> bool {
        self.rows[row].is_some()
    }

    /// The first fault of some rows, with its row.
    pub fn first_in(&self, rows: std::ops::Range<usize>) -> Option<(usize, &RowFault)> {
        let begin = rows.start;
        self.rows[rows]
            .iter()
            .enumerate()
            .find_map(|(at, fault)| fault.as_ref().map(|fault| (begin + at, fault)))
    }
}

/// The experts of every row of one layer, in rank order.
#[derive(Debug, Default)]
pub struct Choices {
    top_k: usize,
    selected: Vec<Selected>,
    row: Vec<Selected>,
    scratch: GatingScratch,
}

impl Choices {
    /// Chooses for `faults`' rows from `logits`, `[rows][experts]`. A row whose scores are not finite fails.
    pub fn choose(
        &mut self,
        rule: &GatingRule,
        logits: &[f32],
        experts: usize,
        bias: Option<&[f32]>,
        layer: u32,
        faults: &mut RowFaults,
    ) {
        self.top_k = rule.top_k;
        self.selected.clear();
        for (row, scores) in logits.chunks_exact(experts).enumerate() {
            let chosen = if faults.has(row) {
                Ok(())
            } else {
                select(rule, scores, bias, &mut self.scratch, &mut self.row)
            };
            if let Err(error) = chosen {
                faults.fail(row, RowFault::Arithmetic { layer, what: describe(&error) });
            }
            if faults.has(row) {
                // Keeps the places of later rows; a failed row is never dispatched.
                self.row.clear();
                self.row.resize(rule.top_k, Selected { expert: 0, weight: 0.0 });
            }
            self.selected.extend_from_slice(&self.row);
        }
    }

    /// The experts of a row.
    pub fn of(&self, row: usize) -> &[Selected] {
        &self.selected[row * self.top_k..(row + 1) * self.top_k]
    }

    /// Experts per row.
    pub fn top_k(&self) -> usize {
        self.top_k
    }
}

fn describe(error: &GatingError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use shimmer_kernels::gating::Score;

    use super::*;

    #[test]
    fn a_row_that_is_not_finite_fails_alone() {
        let rule = GatingRule {
            score: Score::Softmax,
            top_k: 2,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            normalise_eps: 0.0,
            scale: 1.0,
        };
        let mut faults = RowFaults::default();
        faults.reset(3);
        let mut choices = Choices::default();
        let logits = [0.0, 2.0, 1.0, f32::NAN, 0.0, 0.0, 5.0, 0.0, 1.0];
        choices.choose(&rule, &logits, 3, None, 7, &mut faults);
        let experts = |row| choices.of(row).iter().map(|s| s.expert).collect::<Vec<_>>();
        assert_eq!((experts(0), experts(2)), (vec![1, 2], vec![0, 2]));
        let (row, fault) = faults.first_in(0..3).unwrap();
        let RowFault::Arithmetic { layer: 7, what } = fault else { panic!("{fault:?}") };
        assert_eq!((row, what.as_str()), (1, "router score of expert 0 is not finite"));
        assert_eq!(faults.first_in(2..3), None);
    }
}
