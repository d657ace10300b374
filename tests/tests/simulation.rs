//! Schedules of a cluster in virtual time, from seeds. See `shimmer_tests::simulator`.

use std::{ops::Range, time::Instant};

use shimmer_tests::simulator::{self, Mutation, Tally, Violation};

/// Lines of a trace that are printed.
const TRACE_LINES: usize = 200;

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
    println!("{tally:?} in {:.1} s", begun.elapsed().as_secs_f64());
    assert_eq!(tally.schedules, count);
    if count >= 1000 {
        // Faults that do nothing would prove nothing.
        assert!(tally.faults > 2 * count && tally.completed > 10 * count, "{tally:?}");
        assert!(tally.unavailable > 0 && tally.dropped > count && tally.refused > 0, "{tally:?}");
        assert!(tally.generations > count, "{tally:?}");
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
            Mutation::FenceNotChecked | Mutation::DuplicateAdded | Mutation::AuditsLeftOut => {
                "has the sums"
            }
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
