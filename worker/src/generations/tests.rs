use super::*;

fn stamp(generation: u64) -> Stamp {
    Stamp::new(7, generation)
}

/// What a session holds after these assignments came, where those of `ready` became so at once: generations, and whether
/// they admit work.
fn check(came: &[(u64, bool)], expected: &[(u64, bool)]) {
    let mut held = Generations::<u64>::default();
    for &(generation, ready) in came {
        let (number, _) = held.begin(stamp(generation));
        if ready {
            held.ready(number, generation).unwrap();
        }
    }
    let found: Vec<(u64, bool)> =
        held.held.iter().map(|held| (held.stamp.generation, held.ready.is_some())).collect();
    assert_eq!(found, expected, "{came:?}");
    for &(generation, ready) in expected {
        let admitted = ready.then_some(&generation);
        assert_eq!(held.admitting(stamp(generation)), admitted, "{came:?}");
        assert_eq!(held.admitting(Stamp::new(6, generation)), None, "of another epoch");
    }
}

#[test]
fn a_third_assignment_takes_the_place_of_the_newer_one() {
    check(&[(1, true)], &[(1, true)]);
    check(&[(1, true), (2, false)], &[(1, true), (2, false)]);
    check(&[(1, true), (2, true), (3, false)], &[(1, true), (3, false)]);
    check(&[(1, true), (2, false), (3, false)], &[(1, true), (3, false)]);
    check(&[(1, false), (2, true), (3, true)], &[(1, false), (3, true)]);
    check(&[(1, false), (2, false), (3, false)], &[(1, false), (3, false)]);
    check(&[(1, true), (2, false), (3, false), (4, false)], &[(1, true), (4, false)]);
}

#[test]
fn the_same_stamp_again_replaces_what_it_named() {
    check(&[(1, true), (1, false)], &[(1, false)]);
    check(&[(1, true), (2, true), (1, true)], &[(2, true), (1, true)]);
    let mut held = Generations::default();
    let (first, _) = held.begin(stamp(1));
    let (second, gone) = held.begin(stamp(1));
    assert_eq!(gone, Some((stamp(1), None)));
    assert_eq!(held.ready(first, "first"), Err("first"), "nobody waits for it any more");
    assert!(!held.failed(first) && held.holds(second) && !held.holds(first));
    assert_eq!(held.ready(second, "second"), Ok(()));
    assert_eq!(held.admitting(stamp(1)), Some(&"second"));
}

#[test]
fn a_release_ends_what_is_earlier_and_nothing_else() {
    let mut held = Generations::default();
    let (one, _) = held.begin(stamp(4));
    held.ready(one, 'a').unwrap();
    let (two, _) = held.begin(stamp(5));
    assert_eq!(held.release(stamp(4)), [], "the first that stays");
    assert_eq!(held.release(Stamp::new(6, 99)), [], "of an earlier epoch");
    assert_eq!(held.release(stamp(5)), [(stamp(4), Some('a'))]);
    assert_eq!(held.admitting(stamp(4)), None);
    held.ready(two, 'b').unwrap();
    assert_eq!(held.all().collect::<Vec<_>>(), [&'b']);
    let (three, _) = held.begin(stamp(6));
    let gone = held.release(Stamp::new(8, 0));
    assert_eq!(gone, [(stamp(5), Some('b')), (stamp(6), None)], "those being loaded as well");
    assert!(!held.holds(three));
}

#[test]
fn a_load_that_failed_leaves_the_earlier_assignment() {
    let mut held = Generations::default();
    let (one, _) = held.begin(stamp(1));
    held.ready(one, ()).unwrap();
    let (two, _) = held.begin(stamp(2));
    assert!(held.failed(two) && !held.failed(two));
    assert_eq!(held.stamps().collect::<Vec<_>>(), [stamp(1)]);
    assert_eq!(admits([stamp(1), stamp(3)], stamp(3)), Some(1));
    assert_eq!(admits([stamp(1), stamp(3)], stamp(2)), None, "between them is neither");
}
