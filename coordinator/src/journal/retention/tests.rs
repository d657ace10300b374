use super::*;

/// Files of ten bytes: name, age in seconds, open here.
fn check(files: &[(&str, u64, bool)], limit_bytes: u64, needed_bytes: u64, expected: &[&str]) {
    let fact = |&(name, age, open): &(&str, u64, bool)| Fact {
        name: name.to_owned(),
        bytes: 10,
        age: Duration::from_secs(age),
        open,
    };
    let facts: Vec<Fact> = files.iter().map(fact).collect();
    let rules =
        Rules { keep: Duration::from_secs(3600), limit_bytes, fresh: Duration::from_secs(60) };
    assert_eq!(given_up(&facts, rules, needed_bytes), expected, "{files:?}");
}

#[test]
fn what_is_too_old_goes_but_never_what_is_open() {
    check(&[("a", 3600, false), ("b", 3599, false), ("c", 9999, true)], 100, 0, &["a"]);
}

#[test]
fn the_oldest_go_when_room_is_needed() {
    let files = [("a", 70, false), ("b", 500, false), ("c", 100, false), ("d", 59, false)];
    check(&files, 40, 0, &[]);
    check(&files, 39, 0, &["b"]);
    check(&files, 40, 11, &["b", "c"]);
    // A young one may be written by somebody else.
    check(&files, 0, 0, &["b", "c", "a"]);
    check(&[("b", 90, false), ("a", 90, false)], 10, 0, &["a"]);
    check(&[("a", 90, true)], 0, u64::MAX, &[]);
}
