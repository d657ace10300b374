//! The real gRPC stack under faults of a simulated network, from seeds. See `shimmer_tests::simulated_network`.

use std::time::Instant;

use shimmer_tests::simulated_network::{Bench, Planted, Tally, Violation};

/// Schedules without further word.
const SCHEDULES: u64 = 40;
/// Runs of a seed that is asked for alone: it fixes the faults, but not in which order tokio and the libraries above it
/// poll, so that one run may miss what another one met.
const REPLAYS: u64 = 10;
/// Schedules in which a planted bug must have been found.
const FOUND_WITHIN: u64 = 20;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs a schedule; a violation is told with the command that replays it.
fn check(bench: &Bench, seed: u64) -> Tally {
    bench.run(seed, None).unwrap_or_else(|Violation { seed, rule, trace }| {
        trace.iter().for_each(|line| println!("{line}"));
        panic!(
            "seed {seed}: {rule}\nreplay: SHIMMER_TEST_SEED={seed} cargo nextest run --workspace --no-capture \
             simulated_network::no_fault_changes_a_byte"
        )
    })
}

/// `SHIMMER_TEST_SCHEDULES` runs another number of them, `SHIMMER_TEST_SEED` begins elsewhere; without a number it runs that
/// seed alone, several times.
#[test]
fn no_fault_changes_a_byte() {
    let first = number("SHIMMER_TEST_SEED");
    let asked = number("SHIMMER_TEST_SCHEDULES");
    let (count, times) = match (first, asked) {
        (_, Some(count)) => (count, 1),
        (Some(_), None) => (1, REPLAYS),
        (None, None) => (SCHEDULES, 1),
    };
    let first = first.unwrap_or(0);
    let bench = Bench::new();
    let (begun, mut tally) = (Instant::now(), Tally::default());
    for seed in (0..times).flat_map(|_| first..first + count) {
        let one = check(&bench, seed);
        println!("seed {seed}: {} generations in {} ms", one.generations, one.turns);
        tally.add(&one);
    }
    println!("{tally:#?} in {:.1} s", begun.elapsed().as_secs_f64());
    assert_eq!(tally.schedules, count * times);
    if count >= SCHEDULES {
        // Faults that do nothing would prove nothing.
        let done = &tally.injected;
        assert!(done.cut_open > count / 2 && done.resets > count / 4, "{tally:?}");
        assert!(done.holds > count / 4 && done.crashes > count / 4, "{tally:?}");
        assert!(done.one_way > 0 && done.slow > 0 && done.stops > 0 && done.jumps > 0, "{tally:?}");
        assert!(
            tally.losses > count && tally.resent > count / 4 && tally.hedged > count,
            "{tally:?}"
        );
        assert!(tally.restarts > count && tally.own_copies > 0 && tally.audits > 0, "{tally:?}");
        assert!(tally.repeated > count && tally.of_old_sessions > 0, "{tally:?}");
        assert!(tally.dropped > count && tally.stale_works > 0, "{tally:?}");
    }
}

/// The comparison finds results that are taken although they are not awaited: each within so many schedules.
#[test]
fn results_taken_by_mistake_are_found() {
    let bench = Bench::new();
    for planted in Planted::ALL {
        let found = (0..FOUND_WITHIN).find_map(|seed| bench.run(seed, Some(planted)).err());
        let Violation { seed, rule, .. } = found.expect("a bug is found");
        println!("{planted:?}: seed {seed}: {rule}");
        assert!(rule.contains("gave other bytes"), "{planted:?} at seed {seed}: {rule}");
    }
}
