use std::sync::Arc;

use proptest::prelude::*;

use super::IncrementalDetokenizer;
use crate::stop::StopMatcher;
use crate::tokenizer::tests::{fixture, ids_of_bytes};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// The texts that single pushes give, and the last one.
fn pieces(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = IncrementalDetokenizer::new(Arc::clone(tokenizer), skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
    pieces.push(detokenizer.finish());
    pieces
}

fn check(bytes: &[&[u8]], expected: &[&str]) {
    let tokenizer = Arc::new(fixture("bytelevel"));
    let ids: Vec<u32> = bytes.iter().flat_map(|part| ids_of_bytes(&tokenizer, part)).collect();
    assert_eq!(pieces(&tokenizer, &ids, false), expected, "{bytes:?}");
}

#[test]
fn t4_an_incomplete_character_is_kept_until_it_is_complete() {
    // A blank-leading token between the halves of two characters, and a Hebrew letter cut in two.
    check(&["世".as_bytes(), b" ", "ש".as_bytes()], &["", "", "世", " ", "", "ש", ""]);
    check(&[&[0xE4], b" ", &[0xB8]], &["", "\u{fffd} ", "\u{fffd}", ""]);
    check(&[&[0xE4, 0xB8]], &["", "", "\u{fffd}"]);
}

#[test]
fn t5_a_character_over_several_tokens_comes_out_whole() {
    check(&["界😀".as_bytes()], &["", "", "界", "", "", "", "😀", ""]);
}

#[test]
fn t6_invalid_bytes_become_replacement_characters_and_the_stream_goes_on() {
    check(
        &[&[0xFF], b"a", &[0xC3], &[0x28], &[0xA9]],
        &["\u{fffd}", "a", "", "\u{fffd}(", "\u{fffd}", ""],
    );
    check(&[&[0xF0, 0x9F, 0x98], b"x"], &["", "", "", "\u{fffd}x", ""]);
    check(&[&[0xED, 0xA0, 0x80]], &["", "\u{fffd}\u{fffd}", "\u{fffd}", ""]);
}

#[test]
fn t7_ids_beyond_the_vocabulary_are_empty_text() {
    for name in ["bytelevel", "mixtral", "metaspace", "unigram", "neox"] {
        let tokenizer = Arc::new(fixture(name));
        let word = tokenizer
            .encode("word", EncodeOptions { add_special: false, parse_special: false })
            .unwrap();
        let gap = u32::try_from(tokenizer.vocab_size()).unwrap() + 7;
        let mut ids = vec![gap];
        ids.extend(&word);
        ids.extend([gap + 1_000, u32::MAX]);
        assert_eq!(pieces(&tokenizer, &ids, false).concat(), "word", "{name}");
        assert_eq!(tokenizer.decode(&ids, false), "word", "{name}");
        assert!(tokenizer.token_bytes(gap).is_empty() && !tokenizer.is_special(gap));
    }
}

#[test]
fn t15_stop_strings_hold_for_ids_in_and_ids_out() {
    // Nothing in the way from an id to a stop string needs the client's text.
    let tokenizer = Arc::new(fixture("bytelevel"));
    let ids = ids_of_bytes(&tokenizer, "one 世界 two".as_bytes());
    let mut detokenizer = IncrementalDetokenizer::new(Arc::clone(&tokenizer), true);
    let mut stops = StopMatcher::new(vec!["世界".to_owned()]);
    let steps: Vec<_> = ids.iter().map(|id| stops.push(&detokenizer.push(*id))).collect();
    assert_eq!(steps.iter().map(|step| step.emit.as_str()).collect::<String>(), "one ");
    assert_eq!(steps.iter().position(|step| step.matched.is_some()), Some("one 世界".len() - 1));
}

#[test]
fn a_text_of_its_own_loses_the_first_blank_and_a_continued_one_keeps_it() {
    let tokenizer = Arc::new(fixture("mixtral"));
    let ids = tokenizer
        .encode("the end", EncodeOptions { add_special: false, parse_special: true })
        .unwrap();
    let mut own = IncrementalDetokenizer::new(Arc::clone(&tokenizer), true);
    let mut continuing = IncrementalDetokenizer::continuing(Arc::clone(&tokenizer), true);
    let text = |detokenizer: &mut IncrementalDetokenizer| {
        ids.iter().map(|id| detokenizer.push(*id)).collect::<String>()
    };
    assert_eq!(text(&mut own), "the end");
    assert_eq!(text(&mut continuing), " the end");
}

proptest! {
    #[test]
    fn any_bytes_decode_as_the_whole_stream_does(
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80_u8..=0xFF, Just(b'a')], 0..48),
    ) {
        let tokenizer = Arc::new(fixture("bytelevel"));
        let ids = ids_of_bytes(&tokenizer, &bytes);
        prop_assert_eq!(pieces(&tokenizer, &ids, false).concat(), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn any_ids_decode_as_the_whole_sequence_does(
        name in prop::sample::select(vec!["bytelevel", "mixtral", "metaspace", "unigram", "neox"]),
        ids in prop::collection::vec(prop_oneof![0_u32..600, 0_u32..3_000], 0..24),
        skip in any::<bool>(),
    ) {
        let tokenizer = Arc::new(fixture(name));
        let pieces = pieces(&tokenizer, &ids, skip);
        prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, skip));
    }
}
