//! What must hold when a layer ends.

use shimmer_coordinator::gating::RowFault;
use shimmer_proto::expert::v1::{ExpertResult, ExpertWork, Fence, expert_result::Payload};

use super::{
    super::arithmetic::{self, HIDDEN},
    ModelCoordinator, Step,
};

impl Step {
    /// The row of the batch behind each row of work.
    pub(super) fn places(&self, work: &ExpertWork) -> Vec<Option<usize>> {
        let numbers = work.rows.as_chunks::<4>().0.chunks(HIDDEN).map(|row| row[0]);
        let place = |number: [u8; 4]| {
            self.rows.chunks(HIDDEN).position(|row| row[0].to_le_bytes() == number)
        };
        numbers.map(place).collect()
    }

    /// What was sent to a worker under a fence: its place.
    fn sent_as(&self, worker: usize, fence: &Fence) -> Option<usize> {
        self.sent.iter().position(|(to, work)| *to == worker && work.fence.as_ref() == Some(fence))
    }

    /// The other half of a pair that a part of a worker belongs to, whichever attempt it is.
    fn twin(&self, worker: usize, part: u32) -> Option<(usize, u32)> {
        let of = |place: usize| {
            let (worker, work) = &self.sent[place];
            (*worker, work.fence.map_or(0, |fence| fence.part))
        };
        self.compared.iter().find_map(|&[one, two]| match (worker, part) {
            half if half == of(one) => Some(of(two)),
            half if half == of(two) => Some(of(one)),
            _ => None,
        })
    }

    /// A result came: with it a pair may be complete. One of which anything was sent to somebody else before, because a half
    /// was late or lost, is not compared any more.
    pub(super) fn complete_pair(&mut self, worker: usize, fence: &Fence) {
        let Some((other, part)) = self.twin(worker, fence.part) else { return };
        let came = self.answered.iter().any(|(of, f, _)| (*of, f.part) == (other, part));
        let Some(half) = self.sent_as(worker, fence).filter(|_| came) else { return };
        let overlaps = |(_, later): &(usize, ExpertWork)| {
            let half = &self.sent[half].1;
            let rows = self.places(later);
            later.fence.is_some_and(|fence| fence.attempt == 0)
                && later.experts.iter().any(|expert| half.experts.contains(expert))
                && self.places(half).iter().any(|row| rows.contains(row))
        };
        if !self.sent[self.begun_with..].iter().any(overlaps) {
            self.whole.extend([(worker, fence.part), (other, part)]);
        }
    }

    /// Whether a worker's result was compared with another one.
    fn was_compared(&self, worker: usize, fence: &Fence) -> bool {
        self.whole.contains(&(worker, fence.part))
    }

    /// Rows into which bytes of a liar may have come, because nobody compared them.
    fn unchecked(&self) -> Vec<bool> {
        let mut unchecked = vec![false; self.failed.len()];
        for (worker, fence, _) in self.answered.iter().filter(|(.., lies)| *lies) {
            if self.was_compared(*worker, fence) {
                continue;
            }
            let Some(sent) = self.sent_as(*worker, fence) else { continue };
            self.places(&self.sent[sent].1).into_iter().flatten().for_each(|p| unchecked[p] = true);
        }
        unchecked
    }

    /// Rows of refusals: those that are named, of liars alone or of anybody; or all that came with them.
    fn refused(&self, of_liars: bool, named: bool) -> Vec<bool> {
        let mut refused = vec![false; self.failed.len()];
        for (worker, fence, lies, rows) in &self.refused {
            if of_liars && !lies {
                continue;
            }
            let Some(sent) = self.sent_as(*worker, fence) else { continue };
            for (row, place) in (0..).zip(self.places(&self.sent[sent].1)) {
                if let Some(place) = place.filter(|_| !named || rows.contains(&row)) {
                    refused[place] = true;
                }
            }
        }
        refused
    }

    /// Whether a row has failed because somebody was away.
    pub(super) fn is_unavailable(&self, row: usize) -> bool {
        let fault = self.faults.first_in(row..row + 1);
        matches!(fault, Some((_, RowFault::Unavailable { .. })))
    }

    /// The planted bug: a result becomes what a liar made of the same work.
    pub(super) fn repeat_lie(&self, worker: usize, fence: &Fence, result: &mut ExpertResult) {
        let twin = self.twin(worker, fence.part).map(|(other, _)| other);
        let lied = twin.is_some() && twin == self.liar;
        if let Some(Payload::Accumulators(bytes)) = &mut result.payload
            && lied
        {
            let flipped = bytes.as_chunks::<8>().0.iter();
            let flipped = flipped.map(|sum| arithmetic::flip(i64::from_le_bytes(*sum)));
            *bytes = flipped.flat_map(i64::to_le_bytes).collect::<Vec<u8>>().into();
        }
    }
}

impl ModelCoordinator {
    /// No stale, doubled or missing term, and no row that failed although its experts could be asked.
    pub(super) fn check_layer(&mut self) -> Result<(), String> {
        self.check_share()?;
        let step = self.step.as_ref().expect("a step is under way");
        let sums = self.exchange.sums();
        let (before, counts) = (&step.counts, self.exchange.counts());
        // Two workers that disagree may leave it open which of them is right; then the rows fail.
        let disputed = step.liar.is_some() && counts.mismatches > before.mismatches;
        let unchecked = step.unchecked();
        let (refused, accused) = (step.refused(false, false), step.refused(true, true));
        let mut seen = [0; 3];
        for (row, values) in step.rows.chunks(HIDDEN).enumerate() {
            if step.failed[row] {
                continue;
            }
            let (layer, chosen) = (step.layer, step.choices.of(row));
            let place = || format!("row {row} of step {}, layer {layer}", self.steps);
            let overflows = chosen.iter().any(|s| arithmetic::overflows(values, s.expert));
            let fault = step.faults.first_in(row..row + 1).map(|(_, fault)| fault);
            match fault {
                Some(RowFault::Arithmetic { .. }) if overflows || accused[row] => {
                    seen[0] += u64::from(overflows);
                    continue;
                }
                Some(RowFault::Unavailable { .. }) if disputed => continue,
                Some(fault) => {
                    let whole = |&worker: &usize| !step.disturbed[worker];
                    let copies = |expert| self.transport.placement.copies(layer, expert);
                    // Whoever says that a row overflows is not asked again when the one that is to confirm it is lost.
                    let somebody = step.disturbed.iter().any(|&disturbed| disturbed);
                    let unconfirmed = refused[row] && somebody;
                    if !unconfirmed && chosen.iter().all(|s| copies(s.expert).iter().any(whole)) {
                        return Err(format!(
                            "{}: {}, failed although copies could be reached: {fault:?}",
                            self.id,
                            place()
                        ));
                    }
                    continue;
                }
                None if overflows => {
                    return Err(format!(
                        "{}: {}, has sums, though its arithmetic overflows",
                        self.id,
                        place()
                    ));
                }
                None => {}
            }
            let mut expected = [0; HIDDEN];
            for selected in chosen {
                arithmetic::add(&mut expected, values, layer, selected.expert, selected.weight);
            }
            let range = row * HIDDEN..(row + 1) * HIDDEN;
            let found: Vec<i64> =
                sums[range.clone()].iter().zip(&step.extra[range]).map(|(a, b)| a + b).collect();
            if unchecked[row] {
                seen[1] += 1;
            } else if found != expected {
                return Err(format!(
                    "{}: {}, has the sums {found:?}, expected {expected:?}",
                    self.id,
                    place()
                ));
            } else {
                seen[2] += u64::from(step.liar.is_some());
            }
        }
        let caught = step
            .answered
            .iter()
            .filter(|(worker, fence, lies)| *lies && step.was_compared(*worker, fence));
        let caught = caught.count() as u64;
        for (what, times) in [
            ("rows that overflow", seen[0]),
            ("rows that a liar reached unchecked", seen[1]),
            ("rows checked beside a liar", seen[2]),
            ("layers with a lie that was compared", u64::from(caught > 0)),
        ] {
            self.tally.count(what, times);
        }
        Ok(())
    }

    /// Where everything is to be computed by two workers, it is sent to two, as far as there are two.
    fn check_share(&self) -> Result<(), String> {
        let step = self.step.as_ref().expect("a step is under way");
        if step.alone == 0 {
            return Ok(());
        }
        Err(format!(
            "{}: {} messages of step {}, layer {}, went to one worker alone, though all are to be compared",
            self.id, step.alone, self.steps, step.layer
        ))
    }
}
