use proptest::prelude::*;

use super::*;

fn owned(experts: &[(u64, u32)]) -> Vec<OwnedLayer> {
    (1u32..)
        .zip(experts)
        .map(|(layer, &(stride, experts))| OwnedLayer {
            layer,
            stride,
            experts: (0..experts).collect(),
        })
        .collect()
}

fn budget(bytes: u64) -> RamBudget {
    RamBudget { bytes, term: BudgetTerm::Host }
}

fn options(change: impl FnOnce(&mut TierOptions)) -> TierOptions {
    let mut options = TierOptions::default();
    change(&mut options);
    options
}

/// Two layers of 10-byte slabs and 8 experts each, the second one's used as often as their number says.
fn check(
    bytes: u64,
    change: impl FnOnce(&mut TierOptions),
    history: bool,
    expected: Result<[(usize, u32); 2], &str>,
) {
    let usage = |layer: u32, expert: u32| if layer == 2 { u64::from(expert) } else { 0 };
    let usage: Option<&dyn Fn(u32, u32) -> u64> = if history { Some(&usage) } else { None };
    let found = plan(&owned(&[(10, 8), (10, 8)]), &budget(bytes), &options(change), usage);
    match (found, expected) {
        (Ok(found), Ok(expected)) => {
            let shown: Vec<_> =
                found.layers.iter().map(|layer| (layer.pinned.len(), layer.cache_slots)).collect();
            assert_eq!(shown, expected);
        }
        (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{error}"),
        (found, expected) => panic!("{found:?} instead of {expected:?}"),
    }
}

#[test]
fn what_fits_is_pinned_as_a_whole() {
    check(160, |_| {}, false, Ok([(8, 0), (8, 0)]));
    check(1000, |o| o.ram = RamSetting::All, false, Ok([(8, 0), (8, 0)]));
    check(1000, |o| o.cap = Some(8), false, Ok([(8, 0), (8, 0)]));
    check(1000, |o| o.cap = Some(2), false, Ok([(0, 2), (0, 2)]));
    check(1000, |o| o.pin = PinSetting::Bytes(0), false, Ok([(8, 0), (8, 0)]));
}

#[test]
fn without_history_everything_is_cache() {
    check(159, |_| {}, false, Ok([(8, 0), (0, 7)]));
    check(90, |_| {}, false, Ok([(0, 5), (0, 4)]));
    check(20, |_| {}, false, Ok([(0, 1), (0, 1)]));
}

#[test]
fn a_history_pins_the_hottest_with_half_of_the_budget() {
    check(90, |_| {}, true, Ok([(0, 3), (4, 2)]));
    // Pins never take the last slot of a layer.
    check(30, |_| {}, true, Ok([(0, 1), (1, 1)]));
    check(20, |_| {}, true, Ok([(0, 1), (0, 1)]));
    let usage = |layer: u32, expert: u32| if layer == 2 { u64::from(expert) } else { 0 };
    let plan = plan(&owned(&[(10, 8), (10, 8)]), &budget(90), &options(|_| {}), Some(&usage));
    assert_eq!(plan.unwrap().layers[1].pinned, [4, 5, 6, 7]);
}

#[test]
fn pins_come_on_top_of_the_cap() {
    check(100, |o| (o.cap, o.pin) = (Some(2), PinSetting::Bytes(50)), true, Ok([(0, 2), (5, 2)]));
    check(100, |o| (o.cap, o.pin) = (Some(2), PinSetting::All), true, Ok([(0, 2), (8, 0)]));
    check(90, |o| o.pin = PinSetting::All, false, Ok([(8, 0), (0, 1)]));
    check(90, |o| o.pin = PinSetting::Bytes(35), true, Ok([(0, 3), (3, 3)]));
}

#[test]
fn what_does_not_fit_is_refused_with_the_limit_and_the_way_out() {
    check(159, |o| o.ram = RamSetting::All, false, Err("--ram all wants 16 experts of 160 bytes"));
    check(59, |o| o.cap = Some(3), false, Err("--cap 3 takes 60 bytes in 2 layers"));
    check(59, |o| o.cap = Some(3), false, Err("this host leaves 59 bytes: --cap 2 fits"));
    check(
        59,
        |o| (o.cap, o.pin) = (Some(2), PinSetting::Bytes(30)),
        false,
        Err(
            "beside 30 bytes pinned, but the memory available on this host leaves 59 bytes: --cap 1 fits",
        ),
    );
    check(
        59,
        |o| o.pin = PinSetting::Bytes(50),
        false,
        Err(
            "pinning 50 bytes beside 20 bytes of cache does not fit: the memory available on this host \
             leaves 59 bytes, so that --pin can be at most 39 bytes",
        ),
    );
    check(19, |_| {}, false, Err("one expert of each of 2 layers takes 20 bytes"));
    check(19, |o| o.cap = Some(1), false, Err("one expert of each of 2 layers takes 20 bytes"));
}

#[test]
fn the_limit_that_binds_is_named() {
    let binding = |bytes, change: fn(&mut TierOptions)| {
        plan(&owned(&[(10, 8)]), &budget(bytes), &options(change), None).unwrap().binding
    };
    assert_eq!(binding(80, |_| {}), None);
    assert_eq!(binding(79, |_| {}), Some(BudgetTerm::Host));
    assert_eq!(binding(79, |o| o.cap = Some(1)), Some(BudgetTerm::Cap));
}

/// Priced at the widest layer, the narrow ones would get half of their slots.
#[test]
fn layers_are_priced_at_their_own_width() {
    let plan = plan(&owned(&[(80, 8), (40, 8), (40, 8)]), &budget(480), &options(|_| {}), None);
    let plan = plan.unwrap();
    assert_eq!(plan.layers.iter().map(|layer| layer.cache_slots).collect::<Vec<_>>(), [3, 3, 3]);
    assert_eq!(plan.cache_bytes, 480);
}

fn any_options() -> impl Strategy<Value = TierOptions> {
    let pin = prop_oneof![
        Just(PinSetting::Auto),
        Just(PinSetting::All),
        (0u64..600).prop_map(PinSetting::Bytes)
    ];
    let ram = prop_oneof![9 => Just(RamSetting::Auto), 1 => Just(RamSetting::All)];
    (ram, prop::option::of(1u32..9), pin).prop_map(|(ram, cap, pin)| TierOptions {
        ram,
        cap,
        pin,
        ..TierOptions::default()
    })
}

proptest! {
    #[test]
    fn plans_keep_the_budget_and_leave_no_layer_without_a_slot(
        layers in prop::collection::vec((1u64..30, 0u32..9), 1..6),
        bytes in 0u64..1200,
        options in any_options(),
        history in any::<bool>(),
    ) {
        let usage = |layer: u32, expert: u32| u64::from(layer * 7 + expert * 5) % 4;
        let usage: Option<&dyn Fn(u32, u32) -> u64> = if history { Some(&usage) } else { None };
        let owned = owned(&layers);
        let Ok(plan) = plan(&owned, &budget(bytes), &options, usage) else { return Ok(()) };
        prop_assert!(plan.bytes() <= bytes);
        let summed: u64 = plan.layers.iter()
            .map(|layer| layer.stride * (layer.pinned.len() as u64 + u64::from(layer.cache_slots))).sum();
        prop_assert_eq!(summed, plan.bytes());
        for (owned, layer) in owned.iter().zip(&plan.layers) {
            let rest = owned.experts.len() - layer.pinned.len();
            prop_assert!(layer.pinned.is_sorted_by(|a, b| a < b));
            prop_assert!(layer.pinned.iter().all(|expert| owned.experts.contains(expert)));
            prop_assert_eq!(rest == 0, layer.cache_slots == 0);
            prop_assert!((layer.cache_slots as usize) < rest || rest == 0);
            if let Some(cap) = options.cap {
                prop_assert!(rest == 0 || layer.cache_slots == cap);
            }
        }
    }

    /// More memory never takes slots away from a layer.
    #[test]
    fn more_memory_never_gives_less_cache(
        layers in prop::collection::vec((1u64..30, 1u32..9), 1..6), bytes in 0u64..1200, more in 0u64..100,
    ) {
        let owned = owned(&layers);
        let of = |bytes| plan(&owned, &budget(bytes), &TierOptions::default(), None);
        let Ok(small) = of(bytes) else { return Ok(()) };
        let large = of(bytes + more).unwrap();
        prop_assert!(large.bytes() >= small.bytes() || large.all_resident());
    }
}
