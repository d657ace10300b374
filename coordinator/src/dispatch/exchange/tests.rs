//! Any order of answers, repeats, losses, refusals and lateness gives the sums of the undisturbed round.

use std::sync::OnceLock;

use proptest::prelude::*;
use shimmer_kernels::gating::{GatingRule, Score};
use shimmer_kernels::{ActivationFormat, Isa, WeightFormat};
use shimmer_model::tiny::Preset;
use shimmer_proto::expert::v1::ExpertWork;

use super::*;
use crate::dispatch::Pace;
use crate::test_support::{TestWorkers, tiny_model};

const HIDDEN: usize = 64;
const ROWS: usize = 9;
const LAYER: u32 = 1;

/// What a round needs besides workers.
struct Bench {
    kernels: Kernels,
    activations: ActivationRows,
    choices: Choices,
}

impl Bench {
    fn new() -> Self {
        let kernels = Kernels::new(Some(Isa::Scalar)).unwrap();
        let rule = GatingRule {
            score: Score::Softmax,
            top_k: 4,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            normalise_eps: 0.0,
            scale: 1.0,
        };
        let mut faults = RowFaults::default();
        faults.reset(ROWS);
        let scores: Vec<f32> =
            (0..ROWS * 16).map(|i| ((i * 7919 + 13) % 101) as f32 * 0.1).collect();
        let mut choices = Choices::default();
        choices.choose(&rule, &scores, 16, None, LAYER, &mut faults);
        let x: Vec<f32> = (0..ROWS * HIDDEN).map(|i| ((i * 31) % 255) as f32 - 127.0).collect();
        let mut activations = ActivationRows::new();
        activations.set(&kernels, ActivationFormat::A8G64, &x, ROWS, HIDDEN);
        Self { kernels, activations, choices }
    }

    fn workers(&self, count: usize) -> TestWorkers {
        let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
        TestWorkers::new(&tiny, self.kernels, &vec![1.0; count]).limits(4, 1 << 20)
    }

    fn round(&self) -> LayerRound<'_> {
        LayerRound {
            step: 7,
            layer: LAYER,
            activations: &self.activations,
            choices: &self.choices,
            hints: None,
            deadline: Duration::from_secs(10),
        }
    }

    /// The sums of one worker that answers everything.
    fn undisturbed(&self) -> Vec<i64> {
        let (mut exchange, mut workers) = (self.exchange(0), self.workers(1));
        let (mut faults, round) = (RowFaults::default(), self.round());
        faults.reset(ROWS);
        let now = workers.now();
        let mut reach = Reach { transport: &mut workers, round: &round, faults: &mut faults, now };
        exchange.begin(&mut reach);
        while !exchange.is_done() {
            let reply = reach.transport.receive(now).unwrap();
            exchange.reply(&mut reach, reply);
        }
        exchange.sums
    }

    fn exchange(&self, audit_per_10k: u32) -> Exchange {
        Exchange::new(self.kernels, FaultPolicy { audit_per_10k, ..FaultPolicy::default() })
    }
}

/// One thing that happens.
#[derive(Debug, Clone)]
enum Happens {
    /// A message that is out is answered, as sums or as outputs; the message may be answered again later.
    Answer {
        which: usize,
        outputs: bool,
        again: bool,
    },
    Refuse {
        which: usize,
        code: ErrorCode,
    },
    /// Its worker dies, unless it is the last one.
    Die {
        which: usize,
    },
    Pass {
        ms: u64,
    },
}

fn happens() -> impl Strategy<Value = Happens> {
    let which = 0..64_usize;
    let code = prop_oneof![
        Just(ErrorCode::Load),
        Just(ErrorCode::NotOwned),
        Just(ErrorCode::Checksum),
        Just(ErrorCode::StaleFence)
    ];
    prop_oneof![
        4 => (which.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(which, outputs, again)| Happens::Answer { which, outputs, again }),
        1 => (which.clone(), code).prop_map(|(which, code)| Happens::Refuse { which, code }),
        1 => which.prop_map(|which| Happens::Die { which }),
        2 => (0..400_u64).prop_map(|ms| Happens::Pass { ms }),
    ]
}

/// Lets things happen, then answers whatever is out until the round is done.
fn play(
    count: usize,
    copies: usize,
    audit_per_10k: u32,
    slow: Option<(usize, Pace)>,
    script: &[Happens],
) -> (Vec<i64>, bool) {
    let bench = Bench::new();
    let (mut exchange, round) = (bench.exchange(audit_per_10k), bench.round());
    let mut workers = bench.workers(count).copied(copies).standing_in().with_own_copy();
    if let Some((worker, pace)) = slow {
        workers = workers.slowed(worker % count, pace);
    }
    let mut faults = RowFaults::default();
    faults.reset(ROWS);
    let mut out: Vec<(usize, ExpertWork)> = Vec::new();
    let mut alive: Vec<usize> = (0..count).collect();
    let finish = std::iter::repeat(&Happens::Answer { which: 0, outputs: false, again: false });
    let now = workers.now();
    exchange.begin(&mut Reach { transport: &mut workers, round: &round, faults: &mut faults, now });
    for happens in script.iter().chain(finish.take(10_000)) {
        out.extend(workers.take_sent());
        out.retain(|(worker, _)| alive.contains(worker));
        if exchange.is_done() {
            break;
        }
        let pick = |which: usize| (!out.is_empty()).then(|| which % out.len().max(1));
        let mut event: Option<Reply> = None;
        let mut lost = None;
        match *happens {
            Happens::Answer { which, outputs, again } => {
                if let Some(at) = pick(which) {
                    let (worker, work) = if again { out[at].clone() } else { out.remove(at) };
                    workers.unsuspect(worker);
                    event = Some(Reply { worker, outcome: Ok(workers.answer(&work, outputs)) });
                }
            }
            Happens::Refuse { which, code } => {
                if let Some(at) = pick(which) {
                    let (worker, work) = out.remove(at);
                    workers.unsuspect(worker);
                    let error = WorkerError {
                        code: code.into(),
                        fence: work.fence,
                        expert: work.experts.first().copied(),
                        ..WorkerError::default()
                    };
                    event = Some(Reply { worker, outcome: Err(error) });
                }
            }
            Happens::Die { which } => {
                if let Some(at) = pick(which).filter(|_| alive.len() > 1) {
                    let worker = out[at].0;
                    alive.retain(|&other| other != worker);
                    workers.lose(worker);
                    lost = Some(worker);
                }
            }
            Happens::Pass { ms } => workers.pass(Duration::from_millis(ms)),
        }
        let now = workers.now();
        let mut reach = Reach { transport: &mut workers, round: &round, faults: &mut faults, now };
        match (event, lost) {
            (Some(reply), _) => exchange.reply(&mut reach, reply),
            (None, Some(worker)) => exchange.lost(&mut reach, worker, "killed by the test"),
            (None, None) => exchange.tick(&mut reach),
        }
    }
    assert!(exchange.is_done(), "something is waited for that will never come");
    (exchange.sums, faults.first_in(0..ROWS).is_some())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_schedule_gives_the_same_sums(
        count in 1..5_usize,
        copies in 1..4_usize,
        audits in prop_oneof![Just(0), Just(5_000), Just(10_000_u32)],
        slow in proptest::option::of((0..4_usize, prop_oneof![Just(Pace::Slow), Just(Pace::Costly)])),
        script in proptest::collection::vec(happens(), 0..60),
    ) {
        let passed: u64 = script.iter().map(|h| if let Happens::Pass { ms } = h { *ms } else { 0 }).sum();
        prop_assume!(passed < 10_000);
        let (sums, failed) = play(count, copies, audits, slow, &script);
        prop_assert!(!failed, "the own copy can always compute");
        static UNDISTURBED: OnceLock<Vec<i64>> = OnceLock::new();
        prop_assert_eq!(&sums, UNDISTURBED.get_or_init(|| Bench::new().undisturbed()));
    }
}

#[test]
fn the_slow_answer_counts_if_the_hedge_is_not_complete() {
    let late = Happens::Pass { ms: 600 };
    let first = Happens::Answer { which: 0, outputs: false, again: true };
    let (sums, failed) = play(3, 2, 0, None, &[late, first.clone(), first]);
    assert!(!failed);
    assert_eq!(sums, Bench::new().undisturbed());
}

#[test]
fn at_the_deadline_rows_fail_instead_of_waiting() {
    let bench = Bench::new();
    let (mut exchange, round, mut workers) = (bench.exchange(0), bench.round(), bench.workers(2));
    let mut faults = RowFaults::default();
    faults.reset(ROWS);
    let now = workers.now();
    let mut reach = Reach { transport: &mut workers, round: &round, faults: &mut faults, now };
    exchange.begin(&mut reach);
    assert!(exchange.due(&reach) < now + round.deadline, "late long before the deadline");
    reach.now = now + round.deadline;
    exchange.tick(&mut reach);
    assert!(exchange.is_done());
    assert!(faults.first_in(0..ROWS).is_some());
}

/// Two workers that hold everything, of which one lies and both have to prove themselves; then something happens to one of
/// them, and the time for it passes. The sums, and whether rows failed.
fn contested(liar: usize, happens: impl FnOnce(&mut TestWorkers) -> usize) -> (Vec<i64>, bool) {
    let bench = Bench::new();
    let (mut exchange, round) = (bench.exchange(10_000), bench.round());
    let mut workers = bench.workers(2).copied(2);
    let mut faults = RowFaults::default();
    faults.reset(ROWS);
    let now = workers.now();
    exchange.begin(&mut Reach { transport: &mut workers, round: &round, faults: &mut faults, now });
    for (worker, work) in workers.take_sent() {
        let result = if worker == liar { workers.lie(&work) } else { workers.answer(&work, false) };
        let reply = Reply { worker, outcome: Ok(result) };
        let mut reach = Reach { transport: &mut workers, round: &round, faults: &mut faults, now };
        exchange.reply(&mut reach, reply);
    }
    assert!(exchange.counts.mismatches > 0 && !exchange.is_done(), "a contest is open");
    let gone = happens(&mut workers);
    let mut reach = Reach { transport: &mut workers, round: &round, faults: &mut faults, now };
    exchange.lost(&mut reach, gone, "the session ended");
    reach.now = now + exchange.policy.contest;
    exchange.tick(&mut reach);
    assert!(exchange.is_done());
    (exchange.sums, faults.first_in(0..ROWS).is_some())
}

#[test]
fn an_honest_worker_that_is_lost_in_a_contest_is_not_the_liar() {
    for honest in 0..2 {
        let lost = |workers: &mut TestWorkers| {
            workers.lose(honest);
            honest
        };
        let (_, failed) = contested(1 - honest, lost);
        assert!(failed, "nobody could tell which is right, and the liar's bytes are in the sums");
    }
}

#[test]
fn a_worker_that_cannot_prove_itself_is_the_liar() {
    for liar in 0..2 {
        let disproved = |workers: &mut TestWorkers| {
            workers.quarantine(liar, "it failed its self-test");
            liar
        };
        let (sums, failed) = contested(liar, disproved);
        assert!(!failed);
        assert_eq!(sums, Bench::new().undisturbed());
    }
}

/// Experts of each worker in so many rounds, while one worker is slow; and messages that others got as well.
fn shares(
    copies: usize,
    slow: Option<Pace>,
    policy: FaultPolicy,
    rounds: u64,
) -> (Vec<[usize; 3]>, u64) {
    let bench = Bench::new();
    let mut exchange = Exchange::new(bench.kernels, policy);
    let mut workers = bench.workers(3).copied(copies).standing_in();
    if let Some(pace) = slow {
        workers = workers.slowed(0, pace);
    }
    let shares = (0..rounds).map(|step| {
        let (mut faults, round) = (RowFaults::default(), LayerRound { step, ..bench.round() });
        faults.reset(ROWS);
        let now = workers.now();
        let mut reach = Reach { transport: &mut workers, round: &round, faults: &mut faults, now };
        exchange.begin(&mut reach);
        let mut share = [0; 3];
        for (worker, work) in workers.take_sent() {
            share[worker] += work.experts.len();
            let outcome = Ok(workers.answer(&work, false));
            let mut reach =
                Reach { transport: &mut workers, round: &round, faults: &mut faults, now };
            exchange.reply(&mut reach, Reply { worker, outcome });
        }
        assert!(exchange.is_done());
        assert_eq!(exchange.sums, bench.undisturbed());
        share
    });
    (shares.collect(), exchange.counts().hedged)
}

#[test]
fn a_slow_worker_is_spared_in_every_layer_and_tried_in_one_of_seventeen() {
    let policy = FaultPolicy::default();
    let (shares, hedged) = shares(2, Some(Pace::Slow), policy, 51);
    let tried: Vec<usize> = (0..51).filter(|&round| shares[round][0] > 0).collect();
    assert_eq!(tried, [16, 33, 50]);
    assert!(hedged >= 3, "others get what it is tried with: {hedged}");
    let (untouched, hedged) = self::shares(2, None, policy, 51);
    assert!(untouched.iter().all(|share| share.iter().all(|&experts| experts > 0)));
    assert_eq!(hedged, 0);
    let never = FaultPolicy { hedge_factor: 0.0, ..policy };
    assert_eq!(self::shares(2, Some(Pace::Slow), never, 51), (untouched, 0));
}

#[test]
fn experts_without_a_copy_are_read_by_others_only_if_that_pays() {
    let policy = FaultPolicy::default();
    let usual = shares(1, None, policy, 18);
    assert_eq!(shares(1, Some(Pace::Slow), policy, 18), usual);
    let (costly, hedged) = shares(1, Some(Pace::Costly), policy, 18);
    assert!((0..18).all(|round| (costly[round][0] > 0) == (round == 16)), "{costly:?}");
    assert!(hedged > 0);
}
