//! Work that two workers compute, so that one that computes differently is found.
//!
//! An audited part is cut by who else can compute it; each piece is sent to both, and their sums must be equal. If they are
//! not, the coordinator's own copy decides, else a third worker; else both are asked to prove themselves, and the one that
//! cannot is lost. The rows go on with the sums that are right.

use std::time::Instant;

use super::{Exchange, Reach};
use crate::dispatch::plan::State;
use crate::dispatch::recipients::{Except, Recipient};

/// Two parts of the same entries on two workers.
#[derive(Debug)]
pub(super) struct Audit {
    /// The part that enters the sums.
    root: usize,
    /// The one that it is compared with.
    check: usize,
    /// Parts of a third opinion, once the two differ.
    third: Vec<usize>,
    /// Until when the two may prove themselves.
    contest: Option<Instant>,
    /// The worker that could not.
    failed: Option<usize>,
    done: bool,
}

impl Audit {
    /// When the audit must be looked at again.
    pub(super) fn until(&self) -> Option<Instant> {
        self.contest.filter(|_| !self.done)
    }
}

/// What an audit came to.
enum Verdict {
    /// This part is right.
    Right(usize),
    /// Nobody can tell.
    Unknown,
}

impl Exchange {
    /// Sends a planned part in pieces to its worker and each piece to another one as well. False, and nothing is sent, if
    /// nobody else can compute all of it.
    pub(super) fn audit(&mut self, reach: &mut Reach<'_>, part: usize) -> bool {
        let Recipient::Worker(worker) = self.plan.parts[part].to else { return false };
        let layer = reach.round.layer as usize;
        let (plan, recipients) = (&mut self.plan, &mut self.recipients);
        let except = Except { tried: &[worker], last_resorts: false };
        let checks = plan.again(&*reach.transport, recipients, [part, layer], except, true);
        let Some(checks) = checks else {
            self.counts.audits_skipped += 1;
            return false;
        };
        // The pieces take the place of the part.
        self.plan.parts[part].state = State::Answered(None);
        self.plan.parts[part].combined = true;
        for check in checks {
            let root = self.plan.parts.len();
            let piece = self.plan.parts[check].same(Recipient::Worker(worker));
            self.plan.parts.push(piece);
            self.plan.parts[check].parent = Some(root);
            self.plan.parts[check].check = true;
            self.audits.push(Audit {
                root,
                check,
                third: Vec::new(),
                contest: None,
                failed: None,
                done: false,
            });
            self.counts.audits += 1;
            self.send(reach, root);
            self.send(reach, check);
        }
        true
    }

    /// Workers that were asked for the compared part, if this one is of a third opinion.
    pub(super) fn disagreed(&self, part: usize) -> Vec<usize> {
        let mut at = Some(part);
        while let Some(part) = at {
            if let Some(audit) = self.audits.iter().find(|audit| audit.third.contains(&part)) {
                return self.plan.tried(audit.check);
            }
            at = self.plan.parts[part].parent;
        }
        Vec::new()
    }

    /// Whether a part enters the sums by the verdict of an audit only.
    pub(super) fn is_audited(&self, part: usize) -> bool {
        self.audits.iter().any(|audit| audit.root == part && !audit.done)
    }

    /// Decides every audit that can be decided.
    pub(super) fn judge(&mut self, reach: &mut Reach<'_>) {
        for index in 0..self.audits.len() {
            if !self.audits[index].done {
                self.judge_one(reach, index);
            }
        }
    }

    fn judge_one(&mut self, reach: &mut Reach<'_>, index: usize) {
        let Audit { root, check, failed, contest, .. } = self.audits[index];
        if !self.is_settled(root) || !self.is_settled(check) {
            return;
        }
        if let Some(worker) = failed {
            let wrong_root = self.plan.parts[root].to == Recipient::Worker(worker);
            let right = if wrong_root { check } else { root };
            return self.conclude(reach, index, &Verdict::Right(right));
        }
        if let Some(until) = contest {
            if until <= reach.now {
                self.conclude(reach, index, &Verdict::Unknown);
            }
            return;
        }
        // A piece whose worker was lost was sent to others; which two would be compared is not worth the trouble.
        let answered = |part: usize| matches!(self.plan.parts[part].state, State::Answered(_));
        if !(answered(root) && answered(check)) {
            self.counts.audits_skipped += 1;
            let right = if self.is_covered(root) { root } else { check };
            return self.conclude(reach, index, &Verdict::Right(right));
        }
        if self.audits[index].third.is_empty() {
            if self.is_same(reach, root, &[check]) {
                return self.conclude(reach, index, &Verdict::Right(root));
            }
            self.counts.mismatches += 1;
            tracing::error!(
                layer = reach.round.layer,
                step = reach.round.step,
                one = self.name(reach, root),
                other = self.name(reach, check),
                "two workers computed different bytes for the same work"
            );
            self.ask_third(reach, index);
        }
        let third = self.audits[index].third.clone();
        if third.is_empty() || !third.iter().all(|&part| self.is_settled(part)) {
            return;
        }
        if !third.iter().all(|&part| self.is_covered(part)) {
            self.audits[index].third.clear();
            return self.contest(reach, index);
        }
        let agrees = [root, check].map(|part| self.is_same(reach, part, &third));
        match agrees {
            [true, _] => self.accuse(reach, index, check, root),
            [_, true] => self.accuse(reach, index, root, check),
            [false, false] => self.neither(reach, index),
        }
    }

    /// Gets a third opinion: the own copy's, or another worker's; else lets the two prove themselves.
    fn ask_third(&mut self, reach: &mut Reach<'_>, index: usize) {
        let Audit { root, check, .. } = self.audits[index];
        let layer = reach.round.layer as usize;
        if reach.transport.has_own_copy(reach.round.layer) {
            let own = self.plan.parts.len();
            let mut piece = self.plan.parts[root].same(Recipient::Own);
            (piece.parent, piece.check) = (Some(root), true);
            self.plan.parts.push(piece);
            self.audits[index].third.push(own);
            return self.send(reach, own);
        }
        let tried: Vec<usize> = [self.plan.tried(root), self.plan.tried(check)].concat();
        let except = Except { tried: &tried, last_resorts: false };
        let (plan, recipients) = (&mut self.plan, &mut self.recipients);
        match plan.again(&*reach.transport, recipients, [root, layer], except, true) {
            Some(parts) => {
                self.audits[index].third = parts.clone().collect();
                for part in parts {
                    self.plan.parts[part].check = true;
                    self.send(reach, part);
                }
            }
            None => self.contest(reach, index),
        }
    }

    /// Asks both workers to prove themselves by self-tests of these experts. One that fails is lost.
    fn contest(&mut self, reach: &mut Reach<'_>, index: usize) {
        let Audit { root, check, .. } = self.audits[index];
        self.audits[index].contest = reach.now.checked_add(self.policy.contest);
        let experts = self.plan.experts(root);
        for part in [root, check] {
            if let Recipient::Worker(worker) = self.plan.parts[part].to {
                reach.transport.contest(worker, reach.round.layer, &experts);
            }
        }
    }

    /// Notes that a worker which had to prove itself could not. One that was lost for another reason may be the honest one.
    pub(super) fn disproved(&mut self, worker: usize) {
        for audit in self.audits.iter_mut().filter(|audit| audit.contest.is_some() && !audit.done) {
            let concerned = [audit.root, audit.check]
                .iter()
                .any(|&part| self.plan.parts[part].to == Recipient::Worker(worker));
            if concerned && audit.failed.is_none() {
                audit.failed = Some(worker);
            }
        }
    }

    /// Takes the worker of the wrong part out of service.
    fn accuse(&mut self, reach: &mut Reach<'_>, index: usize, wrong: usize, right: usize) {
        if let Recipient::Worker(worker) = self.plan.parts[wrong].to {
            let experts = self.plan.experts(wrong);
            let reason = format!(
                "its result for experts {experts:?} of layer {} differs from that of {} and of a third",
                reach.round.layer,
                self.name(reach, right)
            );
            tracing::error!(worker = self.name(reach, wrong), reason, "worker quarantined");
            reach.transport.quarantine(worker, &reason);
            self.counts.quarantines += 1;
            self.conclude(reach, index, &Verdict::Right(right));
            self.lost(reach, worker, &reason);
        }
    }

    /// All three differ. The own copy was read and checked just now; another worker's word is no better than theirs.
    fn neither(&mut self, reach: &mut Reach<'_>, index: usize) {
        let Audit { root, check, .. } = self.audits[index];
        let third = self.audits[index].third.clone();
        if let [own] = third[..]
            && self.plan.parts[own].to == Recipient::Own
        {
            self.accuse(reach, index, check, own);
            if let Recipient::Worker(worker) = self.plan.parts[root].to {
                let reason = "its result differs from the coordinator's own";
                reach.transport.quarantine(worker, reason);
                self.counts.quarantines += 1;
                self.lost(reach, worker, reason);
            }
            return;
        }
        self.audits[index].third.clear();
        self.contest(reach, index);
    }

    fn conclude(&mut self, reach: &mut Reach<'_>, index: usize, verdict: &Verdict) {
        let root = self.audits[index].root;
        self.audits[index].done = true;
        match verdict {
            Verdict::Right(part) => self.combine(reach, root, *part),
            Verdict::Unknown => {
                let detail = "it and another worker computed different bytes, and nobody could tell which is right";
                self.plan.parts[root].state = State::Gone(detail.to_owned());
                self.plan.parts[root].children.clear();
                self.combine(reach, root, root);
            }
        }
    }

    /// Ends all audits at the deadline, with what is there.
    pub(super) fn end_audits(&mut self, reach: &mut Reach<'_>) {
        for index in 0..self.audits.len() {
            let Audit { root, check, done, contest, .. } = self.audits[index];
            if done {
                continue;
            }
            let disputed = contest.is_some() || !self.audits[index].third.is_empty();
            // One of the two never answered: the other's sums enter the round without a comparison.
            self.counts.audits_skipped += u64::from(!disputed);
            let verdict = match (self.is_covered(root), self.is_covered(check)) {
                _ if disputed => Verdict::Unknown,
                (false, true) => Verdict::Right(check),
                _ => Verdict::Right(root),
            };
            self.conclude(reach, index, &verdict);
        }
    }

    /// Whether a part and others that hold the same entries have equal sums.
    fn is_same(&mut self, reach: &mut Reach<'_>, part: usize, others: &[usize]) -> bool {
        let hidden = reach.round.activations.cols();
        let mut compared = std::mem::take(&mut self.compared);
        for sums in &mut compared {
            sums.resize(self.sums.len().max(reach.round.activations.rows() * hidden), 0);
            for &row in self.plan.rows(part) {
                sums[row as usize * hidden..][..hidden].fill(0);
            }
        }
        let [one, other] = &mut compared;
        self.gather(reach, part, one);
        for &part in others {
            self.gather(reach, part, other);
        }
        let same = self.plan.rows(part).iter().all(|&row| {
            let range = row as usize * hidden..(row as usize + 1) * hidden;
            one[range.clone()] == other[range]
        });
        self.compared = compared;
        same
    }

    fn name(&self, reach: &Reach<'_>, part: usize) -> String {
        match self.plan.parts[part].to {
            Recipient::Worker(worker) => reach.transport.workers()[worker].id.clone(),
            Recipient::Own => "the coordinator's own copy".to_owned(),
            Recipient::Nobody => "nobody".to_owned(),
        }
    }
}
