use proptest::prelude::*;

use super::StopMatcher;

/// Feeds chunks; returns the text given out after each, what matched, and what was left at the end.
fn feed(stops: &[&str], chunks: &[&str]) -> (Vec<String>, Option<String>, String) {
    let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
    let (mut emitted, mut matched) = (Vec::new(), None);
    for chunk in chunks {
        let step = matcher.push(chunk);
        emitted.push(step.emit);
        matched = matched.or(step.matched);
    }
    (emitted, matched, matcher.finish())
}

fn check(stops: &[&str], chunks: &[&str], emitted: &[&str], matched: Option<&str>, rest: &str) {
    let found = feed(stops, chunks);
    let expected = (
        emitted.iter().map(|text| (*text).to_owned()).collect(),
        matched.map(str::to_owned),
        rest.to_owned(),
    );
    assert_eq!(found, expected, "stops {stops:?}, chunks {chunks:?}");
}

#[test]
fn t13_a_stop_over_several_tokens_is_seen_and_no_part_of_it_leaks() {
    check(
        &["STOPPED"],
        &["a ", "ST", "OP", "PE", "D", "!"],
        &["a ", "", "", "", "", ""],
        Some("STOPPED"),
        "",
    );
    check(&["STOPPED"], &["x STOPPE", "R"], &["x ", "STOPPER"], None, "");
    check(&["\n\n"], &["a\n", "\nb"], &["a", ""], Some("\n\n"), "");
    check(&["世界"], &["你好世", "界！"], &["你好", ""], Some("世界"), "");
}

#[test]
fn t14_text_is_held_only_while_it_may_become_a_stop() {
    check(&["</think>"], &["Hello", " wor", "ld"], &["Hello", " wor", "ld"], None, "");
    check(&["</think>"], &["a <", "b"], &["a ", "<b"], None, "");
    check(&["</think>"], &["a </thi"], &["a "], None, "</thi");
    check(&["aab"], &["aaa", "a"], &["a", "a"], None, "aa");
    check(&["abcd", "cx"], &["abc", "x"], &["", "ab"], Some("cx"), "");
}

#[test]
fn the_stop_that_is_complete_first_wins_and_the_longest_of_those_that_end_together() {
    check(&["abcdef", "cd"], &["abcdef"], &["ab"], Some("cd"), "");
    check(&["abcdef", "cd"], &["ab", "cd"], &["", "ab"], Some("cd"), "");
    check(&["d", "bcd", "cd"], &["abcd"], &["a"], Some("bcd"), "");
    check(&["a", "b"], &["xb", "a"], &["x", ""], Some("b"), "");
}

#[test]
fn no_stops_and_empty_stops_hold_nothing() {
    check(&[], &["a", ""], &["a", ""], None, "");
    check(&["", "z"], &["ab"], &["ab"], None, "");
}

/// The stop that ends first in a whole text.
fn oracle(stops: &[String], text: &str) -> Option<(usize, String)> {
    let ends = (1..=text.len()).filter(|end| text.is_char_boundary(*end));
    ends.flat_map(|end| {
        let matching = stops.iter().filter(move |stop| text[..end].ends_with(stop.as_str()));
        matching.max_by_key(|stop| stop.len()).map(|stop| (end - stop.len(), stop.clone()))
    })
    .next()
}

proptest! {
    #[test]
    fn any_chunking_gives_what_the_whole_text_gives(
        stops in prop::collection::vec("[ab<é]{1,5}", 0..4),
        chunks in prop::collection::vec("[abc<é]{0,4}", 0..12),
    ) {
        let text = chunks.concat();
        let mut matcher = StopMatcher::new(stops.clone());
        let (mut emitted, mut seen, mut matched) = (String::new(), String::new(), None);
        for chunk in &chunks {
            let step = matcher.push(chunk);
            emitted.push_str(&step.emit);
            seen.push_str(chunk);
            matched = matched.or(step.matched);
            if matched.is_none() {
                // All is given out but the longest tail that begins a stop.
                let tail = (0..=seen.len())
                    .filter(|at| seen.is_char_boundary(*at))
                    .find(|at| stops.iter().any(|stop| stop.len() > seen.len() - at && stop.starts_with(&seen[*at..])));
                prop_assert_eq!(&emitted, &seen[..tail.unwrap_or(seen.len())]);
            }
        }
        emitted.push_str(&matcher.finish());
        match oracle(&stops, &text) {
            Some((start, stop)) => {
                prop_assert_eq!(emitted, &text[..start]);
                prop_assert_eq!(matched, Some(stop));
            }
            None => {
                prop_assert_eq!(emitted, text);
                prop_assert_eq!(matched, None);
            }
        }
    }
}
