//! The step under way at a model coordinator: rows, layers, what is out and what has come.

use std::time::{Duration, Instant};

use shimmer_coordinator::{
    dispatch::{self, Exchange, FaultCounts, LayerRound, Reach, Standing},
    fence::Verdict,
    gating::{Choices, RowFaults},
};
use shimmer_kernels::{
    ActivationFormat, ActivationRows, Kernels,
    gating::{GatingRule, Score},
};
use shimmer_proto::expert::v1::{
    ErrorCode, ExpertResult, ExpertWork, Fence, WorkerError, expert_result::Payload,
};

use super::{
    super::{
        EXPERTS, LAYERS, Mutation,
        arithmetic::{HIDDEN, LARGE},
        worker::{Answer, Order},
    },
    DEADLINE, ModelCoordinator,
};
use crate::dice::Dice;

/// All messages, in ten thousandths.
const ALL: u32 = 10_000;
/// Numbers of rows repeat after so many, so that they stay exact; nothing is out for so long.
const ROW_NUMBERS: u64 = 16_000;
/// Percentage of rows whose arithmetic leaves the range of numbers in some experts.
const LARGE_ROWS: usize = 2;

/// The step under way.
#[derive(Debug)]
pub(in super::super) struct Step {
    pub(super) layer: u32,
    pub(super) rows: Vec<f32>,
    activations: ActivationRows,
    pub(super) choices: Choices,
    pub(super) faults: RowFaults,
    /// Rows that had failed before this layer.
    pub(super) failed: Vec<bool>,
    pub(in super::super) round: u64,
    pub(in super::super) begun: Instant,
    pub(in super::super) due: Option<Instant>,
    /// Workers that something happened to since the layer began.
    pub(super) disturbed: Vec<bool>,
    /// What went to whom in this layer.
    pub(super) sent: Vec<(usize, ExpertWork)>,
    /// Pairs of what was sent to two workers at the beginning, to be compared: places in `sent`.
    pub(super) compared: Vec<[usize; 2]>,
    /// How much was sent at the beginning.
    pub(super) begun_with: usize,
    /// Halves of pairs that were compared: the worker and the part.
    pub(super) whole: Vec<(usize, u32)>,
    /// Results that were awaited: the worker, what they answer, and whether they are a liar's.
    pub(super) answered: Vec<(usize, Fence, bool)>,
    /// Refusals that were awaited and name rows, in the same way; with the rows.
    pub(super) refused: Vec<(usize, Fence, bool, Vec<u32>)>,
    /// What a planted bug adds.
    pub(super) extra: Vec<i64>,
    /// What was counted when the layer began.
    pub(super) counts: FaultCounts,
    /// Who computed other bytes at some time during the layer.
    pub(super) liar: Option<usize>,
    /// Messages of the beginning that went to one worker alone, though all are to be compared.
    pub(super) alone: usize,
}

impl ModelCoordinator {
    pub(in super::super) fn begin_step(&mut self, dice: &mut Dice, now: Instant) {
        self.steps += 1;
        let count = 1 + dice.below(3);
        let mut faults = RowFaults::default();
        faults.reset(count);
        self.step = Some(Step {
            layer: 0,
            rows: Vec::new(),
            activations: ActivationRows::new(),
            choices: Choices::default(),
            faults,
            failed: vec![false; count],
            round: 0,
            begun: now,
            due: None,
            disturbed: Vec::new(),
            sent: Vec::new(),
            compared: Vec::new(),
            begun_with: 0,
            whole: Vec::new(),
            answered: Vec::new(),
            refused: Vec::new(),
            extra: Vec::new(),
            counts: FaultCounts::default(),
            liar: None,
            alone: 0,
        });
        self.begin_round(count, dice, now);
    }

    fn begin_round(&mut self, count: usize, dice: &mut Dice, now: Instant) {
        self.rounds += 1;
        let (steps, away) = (self.steps, self.away());
        let step = self.step.as_mut().expect("a step is under way");
        let number = |row: usize| {
            u16::try_from((steps * 4 + row as u64) % ROW_NUMBERS).expect("below a u16")
        };
        step.rows.clear();
        for row in 0..count {
            let size = if dice.chance(LARGE_ROWS) { LARGE } else { 0.5 };
            step.rows.extend([f32::from(number(row)), size]);
        }
        let kernels = Kernels::new(None).expect("the best kernels run anywhere");
        step.activations.set(&kernels, ActivationFormat::F32, &step.rows, count, HIDDEN);
        let logits: Vec<f32> = (0..count * EXPERTS as usize)
            .map(|_| f32::from(u8::try_from(dice.below(64)).expect("below 64")))
            .collect();
        let rule = GatingRule {
            score: Score::Sigmoid,
            top_k: 2,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            normalise_eps: 0.0,
            scale: 1.0,
        };
        step.choices.choose(&rule, &logits, EXPERTS as usize, None, step.layer, &mut step.faults);
        step.failed = (0..count).map(|row| step.faults.has(row)).collect();
        (step.round, step.begun, step.due) = (self.rounds, now, None);
        step.disturbed = away;
        step.sent.clear();
        step.answered.clear();
        step.whole.clear();
        step.refused.clear();
        step.extra = vec![0; count * HIDDEN];
        (step.counts, step.liar) = (*self.exchange.counts(), self.liar);
        self.drive(now, Exchange::begin);
        let step = self.step.as_mut().expect("a step is under way");
        step.compared = if self.audit_per_10k > 0 { pairs(&step.sent) } else { Vec::new() };
        step.begun_with = step.sent.len();
        let (before, counts) = (&step.counts, self.exchange.counts());
        let is_all = self.audit_per_10k == ALL
            && counts.audits_skipped == before.audits_skipped
            && counts.resent == before.resent;
        step.alone = if is_all { step.sent.len() - 2 * step.compared.len() } else { 0 };
    }

    fn away(&self) -> Vec<bool> {
        self.transport.standings.iter().map(|&standing| standing != Standing::Serving).collect()
    }

    /// Tells the exchange something about the round under way.
    pub(super) fn drive(&mut self, now: Instant, tell: impl FnOnce(&mut Exchange, &mut Reach<'_>)) {
        let Self { exchange, transport, step, steps, .. } = self;
        let Some(step) = step else { return };
        let round = LayerRound {
            step: *steps,
            layer: step.layer,
            activations: &step.activations,
            choices: &step.choices,
            hints: None,
            deadline: DEADLINE,
        };
        transport.now = now;
        let before = transport.outbox.len();
        let mut reach = Reach { transport, round: &round, faults: &mut step.faults, now };
        tell(exchange, &mut reach);
        let due = exchange.due(&reach);
        step.due = (!exchange.is_done()).then_some(due);
        for (worker, order) in &self.transport.outbox[before..] {
            if let Order::Work(work) = order {
                step.sent.push((*worker, (**work).clone()));
            }
        }
    }

    pub(in super::super) fn tick(&mut self, now: Instant) {
        if self.step.as_ref().is_some_and(|step| step.due.is_some_and(|due| due <= now)) {
            self.drive(now, Exchange::tick);
        }
    }

    /// A reply has arrived.
    pub(in super::super) fn reply(
        &mut self,
        worker: usize,
        answer: Answer,
        mutation: Option<Mutation>,
        now: Instant,
    ) {
        let Answer { mut outcome, lies } = answer;
        let fence = match &outcome {
            Ok(result) => result.fence,
            Err(error) => error.fence,
        };
        let mut verdict = self.transport.ledger.settle(worker, fence.as_ref());
        if let (Verdict::Duplicate, Some(Mutation::DuplicateAdded), Ok(result)) =
            (verdict, mutation, &outcome)
        {
            self.add_again(worker, result);
        }
        if verdict != Verdict::Accept
            && let Some(planted) = mutation
            && let Some(fence) = self.mistaken(worker, planted, fence, outcome.is_ok())
        {
            verdict = Verdict::Accept;
            match &mut outcome {
                Ok(result) => result.fence = Some(fence),
                Err(error) => error.fence = Some(fence),
            }
        }
        if verdict != Verdict::Accept {
            return;
        }
        if self.transport.standings[worker] == Standing::Suspect {
            self.transport.standings[worker] = Standing::Serving;
        }
        self.take_down(worker, &mut outcome, lies, mutation);
        let reply = dispatch::Reply { worker, outcome };
        self.drive(now, |exchange, reach| exchange.reply(reach, reply));
    }

    /// The planted bugs that take a reply for the answer to something else: what it is taken for.
    fn mistaken(
        &mut self,
        worker: usize,
        planted: Mutation,
        fence: Option<Fence>,
        is_result: bool,
    ) -> Option<Fence> {
        let fence = fence?;
        let place = |of: &Fence| (of.epoch, of.generation, of.step, of.layer, of.part);
        let is_mistaken = |sent: &Fence| match planted {
            Mutation::FenceNotChecked => is_result,
            Mutation::OldAttemptAccepted => {
                place(sent) == place(&fence) && fence.attempt < sent.attempt
            }
            _ => false,
        };
        let Self { step, transport, .. } = self;
        let sent = step.as_ref()?.sent.iter().filter(|(to, _)| *to == worker);
        let mut sent = sent.filter_map(|(_, work)| work.fence).filter(is_mistaken);
        sent.find(|fence| transport.ledger.settle(worker, Some(fence)) == Verdict::Accept)
    }

    /// Takes down what came for work that was out.
    fn take_down(
        &mut self,
        worker: usize,
        outcome: &mut Result<ExpertResult, WorkerError>,
        lies: bool,
        mutation: Option<Mutation>,
    ) {
        let Some(step) = &mut self.step else { return };
        match outcome {
            Ok(result) => {
                let Some(fence) = result.fence else { return };
                step.answered.push((worker, fence, lies));
                step.complete_pair(worker, &fence);
                if mutation == Some(Mutation::ComparisonBlind) && !lies {
                    // Whatever is compared seems to be the same, because both are wrong alike.
                    step.repeat_lie(worker, &fence, result);
                }
            }
            Err(error) => {
                if error.code() == ErrorCode::Overflow
                    && let Some(fence) = error.fence
                {
                    step.refused.push((worker, fence, lies, error.rows.clone()));
                }
            }
        }
    }

    /// The planted bug: a second answer enters the sums as well.
    fn add_again(&mut self, worker: usize, result: &ExpertResult) {
        let Some(step) = &mut self.step else { return };
        let Some(Payload::Accumulators(bytes)) = &result.payload else { return };
        let of = |(to, work): &&(usize, ExpertWork)| *to == worker && work.fence == result.fence;
        let Some((_, work)) = step.sent.iter().find(of) else { return };
        let sums = bytes.as_chunks::<8>().0;
        for (row, place) in step.places(work).into_iter().enumerate() {
            let Some(place) = place else { continue };
            for column in 0..HIDDEN {
                step.extra[place * HIDDEN + column] +=
                    i64::from_le_bytes(sums[row * HIDDEN + column]);
            }
        }
    }

    /// Ends the layer if everything is answered, and begins the next one. True at the end of the step.
    pub(in super::super) fn advance(
        &mut self,
        dice: &mut Dice,
        world: Duration,
        now: Instant,
    ) -> Result<bool, String> {
        if self.step.is_none() || !self.exchange.is_done() {
            return Ok(false);
        }
        self.check_layer()?;
        let step = self.step.as_mut().expect("a step is under way");
        step.layer += 1;
        let count = step.failed.len();
        let alive = (0..count).any(|row| !step.faults.has(row));
        if step.layer < LAYERS && alive {
            self.begin_round(count, dice, now);
            return Ok(false);
        }
        // Rows that fail by their own arithmetic have been answered.
        let failed = (0..count).any(|row| step.is_unavailable(row));
        self.tally.count(if failed { "steps without answer" } else { "steps answered" }, 1);
        if !failed {
            self.last_done = world;
        }
        self.step = None;
        Ok(true)
    }
}

/// Pairs of work of the same rows and experts that went to two workers at once: places in what was sent.
fn pairs(sent: &[(usize, ExpertWork)]) -> Vec<[usize; 2]> {
    let same = |a: &ExpertWork, b: &ExpertWork| {
        (&a.rows, &a.experts, &a.item_rows, &a.row_indices, &a.gates)
            == (&b.rows, &b.experts, &b.item_rows, &b.row_indices, &b.gates)
    };
    let mut pairs = Vec::new();
    for (two, (worker, work)) in sent.iter().enumerate() {
        let one = sent[..two].iter().position(|(other, of)| other != worker && same(of, work));
        pairs.extend(one.map(|one| [one, two]));
    }
    pairs
}
