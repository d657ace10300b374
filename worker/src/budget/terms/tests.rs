use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;

fn available(host: u64, group: Option<u64>) -> Available {
    Available { host: Some(host), group }
}

fn terms() -> Vec<Term> {
    let term = |name, bytes, kind| Term { name, bytes, kind };
    vec![
        term("trunk", GIB, Kind::Anonymous),
        term("KV pages", 2 * GIB, Kind::Anonymous),
        term("in use already", GIB / 2, Kind::Held),
    ]
}

/// What is left of `bytes` beside [`terms`] and the kernel's part.
fn left(bytes: u64) -> u64 {
    bytes - 3 * GIB - bytes / 512 - (bytes / 32).min(GIB)
}

fn check(available: Available, ram: RamSetting, expected: Result<(u64, BudgetTerm), &str>) {
    let found = Budget::new(available, ram, terms());
    match (found, expected) {
        (Ok(budget), Ok((bytes, term))) => assert_eq!(budget.experts, RamBudget { bytes, term }),
        (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{error}"),
        (found, expected) => panic!("{found:?} instead of {expected:?}"),
    }
}

#[test]
fn the_smallest_limit_binds_and_is_named() {
    use RamSetting::{All, Auto, Bytes};
    check(available(8 * GIB, None), Auto, Ok((left(8 * GIB), BudgetTerm::Host)));
    let both = available(80 * GIB, Some(8 * GIB));
    check(both, Auto, Ok((left(8 * GIB), BudgetTerm::ControlGroup)));
    check(both, All, Ok((left(8 * GIB), BudgetTerm::ControlGroup)));
    check(both, Bytes(GIB), Ok((GIB, BudgetTerm::Setting)));
}

#[test]
fn a_size_that_does_not_fit_is_refused_as_well() {
    let both = available(80 * GIB, Some(8 * GIB));
    check(
        both,
        RamSetting::Bytes(5 * GIB),
        Err(
            "--ram 5.00 GiB does not fit: the memory limit of the control group leaves 4.73 GiB for experts",
        ),
    );
    check(
        available(3 * GIB, None),
        RamSetting::Auto,
        Err(
            "the memory available on this host leaves 3.00 GiB, but 3.09 GiB go elsewhere, most of it to KV pages (2.00 GiB)",
        ),
    );
}

#[test]
fn without_any_figure_only_a_size_is_taken() {
    let unknown = Available::default();
    check(unknown, RamSetting::Auto, Err("give --ram a size"));
    check(unknown, RamSetting::All, Err("give --ram a size"));
    check(unknown, RamSetting::Bytes(GIB), Ok((GIB, BudgetTerm::Setting)));
}

#[test]
fn the_peak_counts_anonymous_memory_and_what_is_held_already() {
    let budget = Budget::new(available(80 * GIB, None), RamSetting::Auto, terms()).unwrap();
    assert_eq!(budget.peak(10 * GIB), 13 * GIB + GIB / 2);
}

proptest! {
    #[test]
    fn shares_never_exceed_the_whole_and_hold_what_fits(
        owned in prop::collection::vec(0u64..1 << 40, 1..9), bytes in 0u64..1 << 43,
    ) {
        let experts = RamBudget { bytes, term: BudgetTerm::Host };
        let budget = Budget { available: bytes, limit: BudgetTerm::Host, terms: Vec::new(), experts };
        let shares = budget.shares(&owned);
        prop_assert!(shares.iter().map(|share| share.bytes).sum::<u64>() <= bytes);
        if owned.iter().sum::<u64>() <= bytes {
            prop_assert!(shares.iter().zip(&owned).all(|(share, owned)| share.bytes >= *owned));
        }
    }
}
