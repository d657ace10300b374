//! Schedules of a cluster in virtual time, from seeds. See `shimmer_tests::simulator`.

use std::{ops::Range, time::Instant};

use shimmer_tests::simulator::{self, Mutation, Tally, Violation};

/// Lines of a trace that are printed.
const TRACE_LINES: usize = 200;

/// What must have happened in a thousand schedules, at least: about half of what the first 10,000 have.
const FLOORS: &[(&str, u64)] = &[
    ("answers to writes lost", 40),
    ("backups restored", 70),
    ("comparisons", 30_000),
    ("comparisons left out", 4_000),
    ("comparisons that differed", 300),
    ("crashes", 600),
    ("cuts from a worker", 100),
    ("cuts in both directions", 100),
    ("cuts to a worker", 100),
    ("cuts to the store", 100),
    ("drains", 100),
    ("drains to stop a worker", 100),
    ("experts adopted", 3_000),
    ("faults", 4_000),
    ("frames damaged", 2_000),
    ("hedges", 900),
    ("jumps of a clock", 100),
    ("layers with a lie that was compared", 100),
    ("leaders deposed", 300),
    ("leases of coordinators that end", 100),
    ("leases of workers that end", 100),
    ("liars", 100),
    ("liars found by a proof", 70),
    ("liars found by a third", 200),
    ("messages sent again", 100),
    ("orders refused as stale", 50),
    ("overflows that are lies", 70),
    ("pauses", 100),
    ("placements", 1_000),
    ("rebalances asked for", 100),
    ("rebalances made", 70),
    ("replies doubled", 20_000),
    ("resets", 100),
    ("restarts of a coordinator", 200),
    ("results dropped as doubled", 10_000),
    ("results dropped as stale", 5_000),
    ("results dropped as unknown", 10),
    ("rows checked beside a liar", 2_000),
    ("rows that a liar reached unchecked", 400),
    ("rows that overflow", 2_000),
    ("schedules that compare all", 80),
    ("schedules that compare one in a hundred", 20),
    ("schedules that compare one in twenty", 30),
    ("schedules that compare one in two", 40),
    ("schedules without comparisons", 400),
    ("slow workers", 100),
    ("steps answered", 30_000),
    ("steps without answer", 100),
    ("stops of the store", 100),
    ("stores restored", 100),
    ("stores wiped", 100),
    ("stray orders", 100),
    ("views that stand still", 100),
    ("workers stopped after a drain", 30),
    ("writes lost", 40),
    ("writes that are late", 40),
];

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs schedules; a violation is told with its trace and the command that replays it.
fn check(seeds: Range<u64>) -> Tally {
    match simulator::run_all(seeds, None, threads()) {
        Ok(tally) => tally,
        Err(Violation { seed, .. }) => {
            let violation = simulator::run(seed, None, true).expect_err("a seed is a schedule");
            let skipped = violation.trace.len().saturating_sub(TRACE_LINES);
            violation.trace[skipped..].iter().for_each(|line| println!("{line}"));
            panic!(
                "seed {seed}: {}\nreplay: SHIMMER_TEST_SEED={seed} cargo nextest run --workspace --no-capture \
                 simulation::no_schedule_breaks_a_rule",
                violation.rule
            );
        }
    }
}

/// `SHIMMER_TEST_SCHEDULES` runs another number of them, `SHIMMER_TEST_SEED` begins elsewhere, with one if no number is given.
#[test]
fn no_schedule_breaks_a_rule() {
    let first = number("SHIMMER_TEST_SEED");
    let count =
        number("SHIMMER_TEST_SCHEDULES").unwrap_or(if first.is_some() { 1 } else { 10_000 });
    let first = first.unwrap_or(0);
    let begun = Instant::now();
    let tally = check(first..first + count);
    println!("{tally:#?} in {:.1} s", begun.elapsed().as_secs_f64());
    assert_eq!(tally.of("schedules"), count);
    if count >= 1000 {
        // Faults that do nothing would prove nothing.
        for (what, least) in FLOORS {
            let found = tally.of(what) * 1000 / count;
            assert!(
                found >= *least,
                "{what}: {found} in 1000 schedules, expected {least} at least"
            );
        }
    }
}

/// The simulator finds bugs that are planted: each within so many schedules.
#[test]
fn planted_bugs_are_found() {
    let found = |mutation| simulator::run_all(0..1000, Some(mutation), threads()).unwrap_err();
    for mutation in Mutation::ALL {
        let Violation { seed, rule, .. } = found(mutation);
        println!("{mutation:?}: seed {seed}: {rule}");
        let expected = match mutation {
            Mutation::FenceNotChecked | Mutation::DuplicateAdded | Mutation::ComparisonBlind => {
                "has the sums"
            }
            Mutation::AuditsLeftOut => "though all are to be compared",
            Mutation::OldAttemptAccepted => "failed although copies could be reached",
            Mutation::LimitOfAnother => "and takes",
            // Another generation, or another placement under the same number.
            Mutation::FollowsNotTold => "the placement",
            Mutation::DrainAskedOfOne => "is told to be drained",
            Mutation::OtherAccused => "which is honest",
            Mutation::StaleEpochAccepted => "in a session of epoch",
            Mutation::LeaderNotChecked => "led",
            Mutation::ReadyNotAwaited => "has not loaded",
        };
        assert!(rule.contains(expected), "{mutation:?} at seed {seed}: {rule}");
    }
}

/// What a seed means does not depend on when or where it is run.
#[test]
fn a_seed_is_one_schedule() {
    for seed in 0..20 {
        let once = simulator::run(seed, None, false);
        assert_eq!(once, simulator::run(seed, None, false));
    }
}
