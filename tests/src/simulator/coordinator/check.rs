//! What must hold when a layer ends.

use super::{
    super::arithmetic::{self, HIDDEN},
    ModelCoordinator,
};

impl ModelCoordinator {
    /// No stale, doubled or missing term, and no row that failed although its experts could be asked.
    pub(super) fn check_layer(&self) -> Result<(), String> {
        let step = self.step.as_ref().expect("a step is under way");
        let sums = self.exchange.sums();
        let (before, counts) = (&step.counts, self.exchange.counts());
        // Two workers that disagree may leave it open which of them is right; then the rows fail.
        let disputed = step.lied_to && counts.mismatches > before.mismatches;
        // What was not compared may be wrong: where nobody else could compute it, and where it was sent once more.
        let compared = counts.audits_skipped == before.audits_skipped
            && counts.resent == before.resent
            && counts.hedged == before.hedged;
        let trusted = !step.lied_to || compared;
        for (row, values) in step.rows.chunks(HIDDEN).enumerate() {
            if step.failed[row] {
                continue;
            }
            let (layer, chosen) = (step.layer, step.choices.of(row));
            if step.faults.has(row) {
                if disputed {
                    continue;
                }
                let whole = |&worker: &usize| !step.disturbed[worker];
                let copies = |expert| self.transport.placement.copies(layer, expert);
                if chosen.iter().all(|s| copies(s.expert).iter().any(whole)) {
                    let fault = step.faults.first_in(row..row + 1);
                    return Err(format!(
                        "{}: row {row} of step {}, layer {layer}, failed although copies could be reached: {fault:?}",
                        self.id, self.steps
                    ));
                }
                continue;
            }
            let mut expected = [0; HIDDEN];
            for selected in chosen {
                arithmetic::add(&mut expected, values, layer, selected.expert, selected.weight);
            }
            let place = row * HIDDEN..(row + 1) * HIDDEN;
            let found: Vec<i64> =
                sums[place.clone()].iter().zip(&step.extra[place]).map(|(a, b)| a + b).collect();
            if found != expected && trusted {
                return Err(format!(
                    "{}: row {row} of step {}, layer {layer}, has the sums {found:?}, expected {expected:?}",
                    self.id, self.steps
                ));
            }
        }
        Ok(())
    }
}
