use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{EncodeOptions, TextError, Tokenizer};

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };
const AS_TEXT: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

fn files(name: &str) -> (Vec<u8>, Vec<u8>) {
    let directory =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/text/tokenizers").join(name);
    let read = |file: &str| std::fs::read(directory.join(file)).unwrap();
    (read("tokenizer.json"), read("tokenizer_config.json"))
}

/// One of the small tokenizers of the golden suite.
pub(crate) fn fixture(name: &str) -> Tokenizer {
    let (tokenizer, config) = files(name);
    Tokenizer::from_bytes(&tokenizer, Some(&config)).unwrap()
}

/// One id for each byte.
pub(crate) fn ids_of_bytes(tokenizer: &Tokenizer, bytes: &[u8]) -> Vec<u32> {
    let limit = u32::try_from(tokenizer.vocab_size()).unwrap();
    let id = |byte: &u8| (0..limit).find(|id| tokenizer.token_bytes(*id) == [*byte]).unwrap();
    bytes.iter().map(id).collect()
}

/// The pieces of a text as its tokens cut it.
fn pieces(tokenizer: &Tokenizer, text: &str, options: EncodeOptions) -> Vec<String> {
    let ids = tokenizer.encode(text, options).unwrap();
    ids.iter().map(|id| String::from_utf8_lossy(tokenizer.token_bytes(*id)).into_owned()).collect()
}

#[test]
fn t1_a_control_token_is_recognised_behind_punctuation() {
    let tokenizer = fixture("bytelevel");
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    for text in [
        "Stop.<|im_end|>",
        "Stop. <|im_end|>",
        "(!)<|im_end|>",
        "世界。<|im_end|>",
        "\n\n<|im_end|>",
    ] {
        let ids = tokenizer.encode(text, PLAIN).unwrap();
        assert_eq!(ids.last(), Some(&end), "{text:?}");
        assert_eq!(ids.iter().filter(|id| **id == end).count(), 1, "{text:?}");
    }
}

#[test]
fn t2_the_last_blank_of_a_run_belongs_to_the_next_word() {
    let tokenizer = fixture("bytelevel");
    for blanks in 2..9 {
        let text = format!("\n{}return", " ".repeat(blanks));
        let mut at = 0;
        let starts: Vec<usize> = pieces(&tokenizer, &text, PLAIN)
            .iter()
            .map(|piece| {
                at += piece.len();
                at - piece.len()
            })
            .collect();
        assert!(starts.contains(&blanks), "{text:?} is cut at {starts:?}");
    }
}

#[test]
fn t3_added_tokens_are_literal_text() {
    let tokenizer = fixture("bytelevel");
    let id = tokenizer.token_to_id("sčp").unwrap();
    assert_eq!(tokenizer.token_bytes(id), "sčp".as_bytes());
    assert_eq!(tokenizer.decode(&[id], false), "sčp");
    let ids = tokenizer.encode("a sčp b", PLAIN).unwrap();
    assert!(ids.contains(&id));
    assert_eq!(tokenizer.decode(&ids, false), "a sčp b");
}

#[test]
fn control_markers_are_text_when_they_are_not_parsed() {
    for name in ["bytelevel", "mixtral", "metaspace", "unigram", "neox", "kjv"] {
        let tokenizer = fixture(name);
        for marker in tokenizer.control_markers().collect::<Vec<_>>() {
            for text in [marker.to_owned(), format!("a{marker}b {marker}{marker}")] {
                let ids = tokenizer.encode(&text, AS_TEXT).unwrap();
                let unknown = tokenizer.token_to_id("<unk>");
                let forged =
                    ids.iter().any(|id| tokenizer.control_ids.contains(id) && Some(*id) != unknown);
                assert!(!forged, "{name}: {text:?} gives {ids:?}");
                if unknown.is_none() || name != "unigram" {
                    assert_eq!(tokenizer.decode(&ids, false), text, "{name}");
                }
            }
        }
    }
}

#[test]
fn blanks_as_added_tokens_are_recognised_in_any_text() {
    let tokenizer = fixture("neox");
    let run = tokenizer.token_to_id(&" ".repeat(8)).unwrap();
    let text = format!("a{}b", " ".repeat(8));
    assert!(tokenizer.encode(&text, AS_TEXT).unwrap().contains(&run));
    assert_eq!(tokenizer.encode(&text, AS_TEXT).unwrap(), tokenizer.encode(&text, PLAIN).unwrap());
}

#[test]
fn the_own_search_for_added_tokens_agrees_with_the_librarys() {
    for name in ["bytelevel", "mixtral", "metaspace", "unigram", "neox", "kjv"] {
        let tokenizer = fixture(name);
        let corpus =
            std::fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/text/corpus.json"))
                .unwrap();
        let corpus: Vec<String> = serde_json::from_slice(&corpus).unwrap();
        for text in corpus {
            let starts: Vec<usize> = (0..text.len()).collect();
            assert_eq!(
                tokenizer.encode_marked(&text, &starts).unwrap(),
                tokenizer.encode(&text, PLAIN).unwrap(),
                "{name}: {text:?}"
            );
        }
    }
}

/// Changes the fixture's tokenizer.json and expects an error that names the field.
fn refuses(name: &str, change: impl FnOnce(&mut Value), field: &str) {
    let mut file: Value = serde_json::from_slice(&files(name).0).unwrap();
    change(&mut file);
    let error = Tokenizer::from_bytes(&serde_json::to_vec(&file).unwrap(), None).unwrap_err();
    match &error {
        TextError::File { file: "tokenizer.json", field: named, .. } => {
            assert_eq!(named, field, "{error}")
        }
        other => panic!("{other}"),
    }
}

#[test]
fn broken_files_are_refused_by_file_and_field() {
    refuses("bytelevel", |file| file["version"] = json!("2.0"), "version");
    refuses("bytelevel", |file| file["model"] = Value::Null, "model");
    refuses("bytelevel", |file| file["model"]["type"] = json!("Magic"), "model");
    refuses("bytelevel", |file| file["model"]["merges"][3] = json!(["zzzz", "yyyy"]), "model");
    refuses(
        "bytelevel",
        |file| file["model"]["vocab"]["huge"] = json!(4_000_000_000_u32),
        "model.vocab",
    );
    refuses("bytelevel", |file| file["normalizer"] = json!({"type": "Nothing"}), "normalizer");
    refuses(
        "bytelevel",
        |file| file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json!({"Regex": "("}),
        "pre_tokenizer",
    );
    refuses("mixtral", |file| file["post_processor"]["single"] = json!("x"), "post_processor");
    refuses("bytelevel", |file| file["decoder"] = Value::Null, "decoder");
    refuses(
        "bytelevel",
        |file| file["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        "decoder",
    );
    refuses(
        "mixtral",
        |file| file["decoder"]["decoders"][3]["stop"] = json!(1),
        "decoder.decoders[3]",
    );
    refuses(
        "mixtral",
        |file| file["decoder"]["decoders"][0]["pattern"] = json!({"Regex": "▁"}),
        "decoder.decoders[0]",
    );
    refuses(
        "bytelevel",
        |file| file["added_tokens"][1]["content"] = json!(5),
        "added_tokens[1].content",
    );
    refuses(
        "bytelevel",
        |file| file["added_tokens"][1]["special"] = json!("yes"),
        "added_tokens[1].special",
    );
}

#[test]
fn broken_configs_are_refused_by_file_and_field() {
    let (tokenizer, _) = files("bytelevel");
    let check = |config: &str, field: &str| match Tokenizer::from_bytes(
        &tokenizer,
        Some(config.as_bytes()),
    ) {
        Err(TextError::File { file: "tokenizer_config.json", field: named, .. }) => {
            assert_eq!(named, field)
        }
        other => panic!("{config}: {other:?}"),
    };
    check("{", "");
    check("[]", "");
    check(r#"{"bos_token": 1}"#, "bos_token");
    check(r#"{"bos_token": {"text": "x"}}"#, "bos_token.content");
    check(r#"{"added_tokens_decoder": []}"#, "added_tokens_decoder");
    check(r#"{"added_tokens_decoder": {"x": {"content": "y"}}}"#, "added_tokens_decoder.x");
    check(r#"{"added_tokens_decoder": {"9": {}}}"#, "added_tokens_decoder.9.content");
}

#[test]
fn truncation_and_padding_of_the_file_do_not_apply() {
    let mut file: Value = serde_json::from_slice(&files("mixtral").0).unwrap();
    file["truncation"] =
        json!({"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5});
    file["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"});
    let tokenizer = Tokenizer::from_bytes(&serde_json::to_vec(&file).unwrap(), None).unwrap();
    let text = "the quick brown fox ".repeat(9);
    assert_eq!(
        tokenizer.encode(&text, PLAIN).unwrap(),
        fixture("mixtral").encode(&text, PLAIN).unwrap()
    );
}

#[test]
fn the_config_adds_tokens_and_flags() {
    let (tokenizer, _) = files("bytelevel");
    let config = r#"{"pad_token": "<new>", "added_tokens_decoder": {"1": {"content": "<think>", "special": true}}}"#;
    let tokenizer = Tokenizer::from_bytes(&tokenizer, Some(config.as_bytes())).unwrap();
    let (added, think) =
        (tokenizer.token_to_id("<new>").unwrap(), tokenizer.token_to_id("<think>").unwrap());
    assert_eq!(usize::try_from(added).unwrap(), tokenizer.vocab_size() - 1);
    assert!(tokenizer.is_special(added) && tokenizer.is_special(think));
    assert_eq!(tokenizer.encode("<new>", PLAIN).unwrap(), [added]);
    assert_eq!(tokenizer.special_token("pad_token"), Some("<new>"));
    assert_eq!(tokenizer.special_token("bos_token"), None);
}

thread_local! {
    static ORIGINALS: RefCell<BTreeMap<&'static str, Vec<u8>>> = const { RefCell::new(BTreeMap::new()) };
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn damaged_files_never_panic(
        name in prop::sample::select(vec!["bytelevel", "mixtral", "unigram"]),
        place in 0.0_f64..1.0,
        change in prop_oneof![Just("\""), Just("{"), Just("null"), Just("-1"), Just("99999999999"), Just("\u{0}"), Just("]")],
        cut in 0_usize..6,
    ) {
        let mut bytes = ORIGINALS.with_borrow_mut(|originals| originals.entry(name).or_insert_with(|| files(name).0).clone());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a place in a file")]
        let at = (place * bytes.len() as f64) as usize;
        let end = (at + cut).min(bytes.len());
        bytes.splice(at..end, change.bytes());
        if let Ok(tokenizer) = Tokenizer::from_bytes(&bytes, None) {
            let ids = tokenizer.encode("some <s> text 世界", PLAIN);
            drop(ids.map(|ids| tokenizer.decode(&ids, false)));
        }
    }
}
