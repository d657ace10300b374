//! HOT PATH. What is done about parts whose worker is lost, late or refuses.
//!
//! A part that will not be answered is cut again for others, its children, and these are cut again if they fail, too, each
//! time without the workers that were asked before; so it ends. A part that is late gets children while it is still out;
//! whichever is complete first counts, and the rest is dropped.

use shimmer_proto::expert::v1::{ErrorCode, Fence};

use super::{Exchange, Reach};
use crate::dispatch::plan::{Entry, State};
use crate::dispatch::recipients::{Except, Recipient};
use crate::dispatch::{Pace, Standing, TransportError};
use crate::gating::RowFault;

impl Exchange {
    /// Sends a part to its recipient.
    pub(super) fn send(&mut self, reach: &mut Reach<'_>, part: usize) {
        let number = u32::try_from(part).expect("parts of a layer are few");
        let attempt = self.plan.parts[part].attempt;
        let fence = Fence { attempt, part: number, ..self.fence };
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(reach.now));
        let left = left.unwrap_or(reach.round.deadline).as_millis();
        let deadline_ms = u32::try_from(left).unwrap_or(u32::MAX);
        let work = || self.plan.message(part, fence, reach.round.activations, deadline_ms);
        match self.plan.parts[part].to {
            Recipient::Worker(worker) => {
                let mut message = work();
                self.trace.sent(worker, &mut message, reach.now);
                let sent = self
                    .adopt(reach, part, worker)
                    .and_then(|()| reach.transport.send(worker, message));
                match sent {
                    Ok(()) => self.watch(reach, part, worker),
                    Err(TransportError::Lost { detail, .. }) => self.gone(reach, part, &detail),
                    Err(error) => self.gone(reach, part, &error.to_string()),
                }
            }
            Recipient::Own => {
                self.counts.own_copies += 1;
                let message = work();
                self.own(reach, part, &message);
            }
            Recipient::Nobody => {
                let detail = "no other worker can compute it".to_owned();
                self.plan.parts[part].state = State::Gone(detail);
            }
        }
    }

    /// Lets a worker stand in for the experts of a part that it does not hold.
    fn adopt(
        &mut self,
        reach: &mut Reach<'_>,
        part: usize,
        worker: usize,
    ) -> Result<(), TransportError> {
        let layer = reach.round.layer;
        let held = |expert: &u32| reach.transport.copies(layer, *expert).contains(&worker);
        // In most rounds everybody holds what is asked of them.
        if self.plan.entries(part).iter().all(|entry| held(&entry.expert)) {
            return Ok(());
        }
        let mut missing = self.plan.experts(part);
        missing.retain(|expert| !held(expert));
        self.counts.adopted += reach.transport.adopt(worker, layer, &missing)? as u64;
        Ok(())
    }

    /// Notes when a part that was sent is late.
    fn watch(&mut self, reach: &Reach<'_>, part: usize, worker: usize) {
        let (rows, layer) = (self.plan.rows(part).len(), reach.round.layer);
        let warm = self.plan.entries(part).iter().all(|entry| {
            reach.transport.copies(layer, entry.expert).iter().any(|&other| other != worker)
        });
        let usual = reach.transport.usual(worker, u32::try_from(rows).unwrap_or(u32::MAX));
        self.plan.parts[part].state = State::Out;
        self.plan.parts[part].late_at = reach.now.checked_add(self.policy.patience(usual, warm));
    }

    /// Computes a part on the coordinator's own copy.
    fn own(
        &mut self,
        reach: &mut Reach<'_>,
        part: usize,
        work: &shimmer_proto::expert::v1::ExpertWork,
    ) {
        let hidden = reach.round.activations.cols();
        match reach.transport.own_copy(work) {
            Some(Ok(result)) if self.fits(part, hidden, &result) => {
                self.plan.parts[part].state = State::Answered(Some(Box::new(result)));
            }
            Some(Err(error)) if error.code() == ErrorCode::Overflow && !error.rows.is_empty() => {
                self.overflow(reach, part, &error.rows, &error.detail);
                self.plan.without(part, &error.rows);
                if self.plan.rows(part).is_empty() {
                    self.plan.parts[part].state = State::Answered(None);
                } else {
                    self.send(reach, part);
                }
            }
            Some(Err(error)) => self.gone(reach, part, &format!("own copy: {}", error.detail)),
            Some(Ok(_)) | None => self.gone(reach, part, "the own copy of the experts is gone"),
        }
    }

    /// A part will not be answered: others get it, unless they have it already.
    pub(super) fn gone(&mut self, reach: &mut Reach<'_>, part: usize, detail: &str) {
        let own = self.plan.parts[part].to == Recipient::Own;
        self.plan.parts[part].state = State::Gone(detail.to_owned());
        if own || !self.plan.parts[part].children.is_empty() {
            return;
        }
        let tried = self.asked(part);
        let check = self.plan.parts[part].check;
        let except = Except { tried: &tried, last_resorts: !check };
        let sent = self.cut_again(reach, part, except, false);
        self.counts.resent += sent as u64;
    }

    /// Workers that were asked for a part. For a third opinion also the other one of the two that disagree: it would only
    /// repeat itself.
    fn asked(&self, part: usize) -> Vec<usize> {
        let mut asked = self.plan.tried(part);
        asked.extend(self.disagreed(part));
        asked
    }

    /// A worker whose memory is damaged says that arithmetic overflows when it does not: another one is asked before rows
    /// fail. False if nobody can be asked, or this is the second one to say so.
    pub(super) fn doubt(&mut self, reach: &mut Reach<'_>, part: usize, detail: &str) -> bool {
        let parent = self.plan.parts[part].parent;
        let confirmed = parent.is_some_and(|parent| self.plan.parts[parent].doubted);
        if confirmed || !self.plan.parts[part].children.is_empty() {
            return false;
        }
        let tried = self.plan.tried(part);
        let except = Except { tried: &tried, last_resorts: true };
        if self.cut_again(reach, part, except, true) == 0 {
            return false;
        }
        self.plan.parts[part].state = State::Gone(detail.to_owned());
        self.plan.parts[part].doubted = true;
        true
    }

    /// Others computed what a worker said overflows: it may prove itself.
    fn confront(&mut self, reach: &mut Reach<'_>, part: usize) {
        if self.plan.parts[part].doubted
            && let Recipient::Worker(worker) = self.plan.parts[part].to
            && self.plan.parts[part].children.iter().all(|&child| self.answered_whole(child))
        {
            self.counts.mismatches += 1;
            let experts = self.plan.experts(part);
            reach.transport.contest(worker, reach.round.layer, &experts);
        }
        for child in self.plan.parts[part].children.clone() {
            self.confront(reach, child);
        }
    }

    /// Answered without any row taken out.
    fn answered_whole(&self, part: usize) -> bool {
        let part = &self.plan.parts[part];
        matches!(part.state, State::Answered(Some(_))) && part.attempt == 0
    }

    /// A part is late: its worker is suspect, and others are asked beside it if they can do all of it.
    pub(super) fn late(&mut self, reach: &mut Reach<'_>, part: usize) {
        self.plan.parts[part].late_at = None;
        let Recipient::Worker(worker) = self.plan.parts[part].to else { return };
        reach.transport.suspect(worker);
        let allowed = self.policy.hedge_factor > 0.0 && self.hedges_left >= 1.0;
        if !allowed || !self.plan.parts[part].children.is_empty() {
            return;
        }
        let tried = self.asked(part);
        let sent = self.cut_again(reach, part, Except { tried: &tried, last_resorts: false }, true);
        if sent > 0 {
            self.counts.hedged += 1;
            self.hedges_left -= 1.0;
        }
    }

    /// A part has gone to a worker that was slow, to show whether it still is: others get it at the same time, so that
    /// nobody waits to see.
    pub(super) fn spare(&mut self, reach: &mut Reach<'_>, part: usize) {
        let Recipient::Worker(worker) = self.plan.parts[part].to else { return };
        let out = self.plan.parts[part].is_out() && self.recipients.tries(worker);
        let costly = || reach.transport.pace(worker) == Pace::Costly;
        if !out || !(costly() || self.is_warm(reach, part, worker)) {
            return;
        }
        let tried = self.asked(part);
        let sent = self.cut_again(reach, part, Except { tried: &tried, last_resorts: false }, true);
        self.counts.hedged += u64::from(sent > 0);
    }

    /// Whether others that serve hold all experts of a part.
    fn is_warm(&self, reach: &Reach<'_>, part: usize, worker: usize) -> bool {
        let layer = reach.round.layer;
        let able = |&other: &usize| {
            other != worker && reach.transport.standing(other) == Standing::Serving
        };
        let held = |entry: &Entry| reach.transport.copies(layer, entry.expert).iter().any(able);
        self.plan.entries(part).iter().all(held)
    }

    /// Cuts a part again and sends its children; their number.
    fn cut_again(
        &mut self,
        reach: &mut Reach<'_>,
        part: usize,
        except: Except<'_>,
        whole: bool,
    ) -> usize {
        let layer = reach.round.layer as usize;
        let (plan, recipients) = (&mut self.plan, &mut self.recipients);
        let cut = plan.again(&*reach.transport, recipients, [part, layer], except, whole);
        let Some(children) = cut else { return 0 };
        if self.plan.parts[children.clone()].iter().all(|c| c.to == Recipient::Nobody) {
            self.plan.parts.truncate(children.start);
            return 0;
        }
        let check = self.plan.parts[part].check;
        self.plan.parts[part].children = children.clone().collect();
        for child in children.clone() {
            self.plan.parts[child].check = check;
            self.send(reach, child);
        }
        children.len()
    }

    /// At the deadline nothing is sent any more: who still owes an answer is given up.
    pub(super) fn time_out(&mut self, reach: &mut Reach<'_>) {
        let (layer, late) = (reach.round.layer, reach.round.deadline.as_millis());
        let detail = format!("no result of layer {layer} within {late} ms");
        for part in 0..self.plan.parts.len() {
            let awaited = !self.plan.parts[self.root(part)].combined;
            if awaited && self.plan.parts[part].is_out() {
                if let Recipient::Worker(worker) = self.plan.parts[part].to {
                    reach.transport.give_up(worker, &detail);
                }
                self.plan.parts[part].state = State::Gone(detail.clone());
            }
        }
        self.end_audits(reach);
        self.advance(reach);
    }

    /// Combines what is settled.
    pub(super) fn advance(&mut self, reach: &mut Reach<'_>) {
        for root in 0..self.plan.parts.len() {
            let part = &self.plan.parts[root];
            let open = part.parent.is_none() && !part.combined;
            if open && !self.is_audited(root) && self.is_settled(root) {
                self.combine(reach, root, root);
            }
        }
    }

    /// Lets what stands for `part` enter the sums in the name of a planned part.
    pub(super) fn combine(&mut self, reach: &mut Reach<'_>, root: usize, part: usize) {
        let hedged = self.plan.parts[part].is_out();
        self.counts.hedges_won += u64::from(hedged);
        let mut sums = std::mem::take(&mut self.sums);
        self.gather(reach, part, &mut sums);
        self.sums = sums;
        if !self.plan.parts[part].children.is_empty() {
            self.confront(reach, part);
        }
        self.fail_dead(reach, part);
        self.plan.parts[root].combined = true;
    }

    /// Fails the rows of every part that nobody answers.
    fn fail_dead(&mut self, reach: &mut Reach<'_>, part: usize) {
        let State::Gone(detail) = &self.plan.parts[part].state else { return };
        if self.plan.parts[part].children.is_empty() {
            let named = |part: usize| match self.plan.parts[part].to {
                Recipient::Worker(worker) => Some(&reach.transport.workers()[worker].id),
                Recipient::Own | Recipient::Nobody => None,
            };
            // Nobody has no reason of its own: what happened to the last one that was asked.
            let parent = self.plan.parts[part].parent;
            let detail = match (named(part), parent.and_then(named), parent) {
                (Some(id), ..) => format!("worker {id}: {detail}"),
                (None, Some(id), Some(parent)) => match &self.plan.parts[parent].state {
                    State::Gone(why) => format!("worker {id}: {why}; {detail}"),
                    State::Out | State::Answered(_) => detail.clone(),
                },
                _ => detail.clone(),
            };
            for &row in self.plan.rows(part) {
                self.counts.unavailable_rows += 1;
                let detail = detail.clone();
                reach.faults.fail(row as usize, RowFault::Unavailable { detail });
            }
            return;
        }
        for child in self.plan.parts[part].children.clone() {
            self.fail_dead(reach, child);
        }
    }

    /// Everything that a part holds has been computed.
    pub(super) fn is_covered(&self, part: usize) -> bool {
        let Self { plan, .. } = self;
        let children = &plan.parts[part].children;
        matches!(plan.parts[part].state, State::Answered(_))
            || (!children.is_empty() && children.iter().all(|&child| self.is_covered(child)))
    }

    /// Nothing that is awaited can change what becomes of a part.
    pub(super) fn is_settled(&self, part: usize) -> bool {
        match &self.plan.parts[part].state {
            State::Answered(_) => true,
            State::Out => self.is_covered(part),
            State::Gone(_) => {
                self.plan.parts[part].children.iter().all(|&child| self.is_settled(child))
            }
        }
    }
}
