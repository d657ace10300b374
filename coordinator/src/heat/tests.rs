#![expect(clippy::float_cmp, reason = "halves of whole numbers and their sums are exact")]

use proptest::prelude::*;

use super::*;

fn of(counter: &HeatCounter, layer: u32, expert: u32) -> f64 {
    [&counter.record()].into_iter().collect::<HeatMap>().of(layer, expert)
}

#[test]
fn what_was_counted_halves_with_each_half_life() {
    let mut counter = HeatCounter::new(&[(1, 4), (3, 2)], 10.0);
    (0..800).for_each(|_| counter.count(1, 3));
    assert_eq!(of(&counter, 1, 3), 0.0, "not folded yet");
    counter.fold(5.0);
    assert_eq!(of(&counter, 1, 3), 800.0, "fresh rows have not decayed");
    counter.fold(10.0);
    assert_eq!(of(&counter, 1, 3), 400.0);
    counter.count(1, 3);
    counter.fold(20.0);
    assert_eq!(of(&counter, 1, 3), 101.0);
    assert_eq!(of(&counter, 3, 1), 0.0);
}

#[test]
fn a_clock_that_stands_or_goes_back_decays_nothing() {
    let mut counter = HeatCounter::new(&[(0, 1)], 1.0);
    for elapsed in [0.0, -5.0, f64::NAN] {
        counter.count(0, 0);
        counter.fold(elapsed);
    }
    assert_eq!(of(&counter, 0, 0), 3.0);
}

#[test]
fn experts_that_do_not_exist_are_not_counted() {
    let mut counter = HeatCounter::new(&[(1, 2)], 1.0);
    for (layer, expert) in [(0, 0), (1, 2), (7, 0)] {
        counter.count(layer, expert);
    }
    counter.fold(1.0);
    assert_eq!(counter.record().layers, [(1, vec![0.0, 0.0])]);
}

#[test]
fn hostile_records_add_nothing() {
    let record =
        HeatRecord { layers: vec![(0, vec![f32::NAN, -1.0, f32::INFINITY, 2.0]), (9, Vec::new())] };
    let map: HeatMap = [&record, &record].into_iter().collect();
    let found: Vec<f64> = (0..5).map(|expert| map.of(0, expert)).collect();
    assert_eq!(found, [0.0, 0.0, 0.0, 4.0, 0.0]);
    assert_eq!(map.of(9, 0), 0.0);
}

proptest! {
    /// In whatever portions time is told, the decay is the same.
    #[test]
    fn portions_do_not_matter(portions in prop::collection::vec(0.0..50.0_f64, 1..20)) {
        let mut one = HeatCounter::new(&[(0, 1)], 30.0);
        one.count(0, 0);
        one.fold(0.0);
        let mut other = one.clone();
        portions.iter().for_each(|&elapsed| one.fold(elapsed));
        other.fold(portions.iter().sum());
        prop_assert!((of(&one, 0, 0) - of(&other, 0, 0)).abs() < 1e-6);
    }
}
