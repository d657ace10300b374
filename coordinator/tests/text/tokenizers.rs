//! Ids and decoded texts equal those of transformers on the whole corpus.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use shimmer_coordinator::chat_template::ChatTemplate;
use shimmer_coordinator::detokenizer::IncrementalDetokenizer;
use shimmer_coordinator::tokenizer::{EncodeOptions, Tokenizer};

use crate::{json, path, templates};

const AS_TRANSFORMERS: EncodeOptions = EncodeOptions { add_special: true, parse_special: true };
const BARE: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };
const AS_TEXT: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

/// The demo model's checkpoint: its tokenizer is too large to commit.
const DEMO: &str = "SHIMMER_TEST_DEMO_DIR";

fn load(directory: &std::path::Path) -> Tokenizer {
    let read = |name: &str| std::fs::read(directory.join(name)).unwrap();
    Tokenizer::from_bytes(&read("tokenizer.json"), Some(&read("tokenizer_config.json"))).unwrap()
}

fn fixture(name: &str) -> Tokenizer {
    load(&path("tokenizers").join(name))
}

fn corpus() -> Vec<String> {
    serde_json::from_value(json("corpus.json")).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
        .collect()
}

/// What the golden file says for one text, or the given default.
fn text_at<'a>(golden: &'a Value, index: usize, default: &'a str) -> &'a str {
    golden.get(index.to_string()).map_or(default, |text| text.as_str().unwrap())
}

/// Pushes ids one by one.
fn incremental(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> String {
    let mut detokenizer = IncrementalDetokenizer::new(Arc::clone(tokenizer), skip_special);
    let mut text: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
    text.push_str(&detokenizer.finish());
    text
}

/// Compares a tokenizer with its golden file over the whole corpus; returns how many comparisons were equal.
fn check(name: &str, tokenizer: Tokenizer) -> usize {
    let golden = json(&format!("goldens/ids-{name}.json"));
    let bare = golden.get("bare").unwrap_or(&golden["ids"]);
    let tokenizer = Arc::new(tokenizer);
    let corpus = corpus();
    assert!(corpus.len() >= 500);
    let mut equal = 0;
    let mut same =
        |what: &str, text: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
            assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{name}, {what} of {text:?}");
            equal += 1;
        };
    for (index, text) in corpus.iter().enumerate() {
        let expected = ids(&golden["ids"][index]);
        same("ids", text, &tokenizer.encode(text, AS_TRANSFORMERS).unwrap(), &expected);
        let expected_bare = ids(&bare[index]);
        same("ids without additions", text, &tokenizer.encode(text, BARE).unwrap(), &expected_bare);
        let as_text = tokenizer.encode(text, AS_TEXT).unwrap();
        match golden["as_text"].get(index.to_string()) {
            Some(Value::Null) => {}
            Some(expected) => same("ids as text", text, &as_text, &ids(expected)),
            None => same("ids as text", text, &as_text, &expected_bare),
        }
        if text.contains("sčp") {
            continue;
        }
        for (key, skip) in [("decoded", false), ("decoded_skipping", true)] {
            let decoded = text_at(&golden[key], index, text);
            same("decoded text", text, &tokenizer.decode(&expected, skip), &decoded);
            same("streamed text", text, &incremental(&tokenizer, &expected, skip), &decoded);
        }
    }
    for random in golden["random"].as_array().unwrap() {
        let random_ids = ids(&random["ids"]);
        for (key, skip) in [("decoded", false), ("decoded_skipping", true)] {
            let expected = random[key].as_str().unwrap();
            same("decoded ids", key, &tokenizer.decode(&random_ids, skip), &expected);
            same("streamed ids", key, &incremental(&tokenizer, &random_ids, skip), &expected);
        }
    }
    equal
}

#[test]
fn byte_level_with_a_splitting_expression() {
    assert!(check("bytelevel", fixture("bytelevel")) > 4_000);
}

#[test]
fn byte_level_with_runs_of_blanks_as_added_tokens() {
    assert!(check("neox", fixture("neox")) > 4_000);
}

#[test]
fn byte_level_of_a_trained_small_model() {
    assert!(check("kjv", fixture("kjv")) > 4_000);
}

#[test]
fn sentencepiece_with_a_prepending_normalizer() {
    assert!(check("mixtral", fixture("mixtral")) > 4_000);
}

#[test]
fn sentencepiece_with_a_metaspace_pre_tokenizer() {
    assert!(check("metaspace", fixture("metaspace")) > 4_000);
}

#[test]
fn unigram_with_markers_in_its_vocabulary() {
    assert!(check("unigram", fixture("unigram")) > 4_000);
}

#[test]
fn the_demo_models_tokenizer() {
    let Some(directory) = std::env::var_os(DEMO).map(PathBuf::from) else {
        eprintln!("skipped: {DEMO} does not name the demo checkpoint");
        return;
    };
    assert!(check("smol", load(&directory)) > 4_000);
    let template = std::fs::read_to_string(directory.join("chat_template.jinja")).unwrap();
    let equal =
        check_chats("goldens/chats-smol.json", |_, _| (directory.clone(), template.clone()));
    assert!(equal >= 15, "only {equal} chats were compared");
}

#[test]
fn whole_chats_encode_as_in_transformers() {
    let equal = check_chats("goldens/chats.json", |tokenizer, template| {
        let template = path("templates").join(format!("{template}.jinja"));
        (path("tokenizers").join(tokenizer), std::fs::read_to_string(template).unwrap())
    });
    assert!(equal >= 100, "only {equal} chats were compared");
}

/// Compares the ids of whole chats; `find` gives the tokenizer's directory and the template's source.
fn check_chats(golden: &str, find: impl Fn(&str, &str) -> (PathBuf, String)) -> usize {
    let cases = json("cases.json");
    let mut loaded: BTreeMap<(String, String), (Tokenizer, ChatTemplate)> = BTreeMap::new();
    let chats = json(golden);
    let mut equal = 0;
    for chat in chats.as_array().unwrap() {
        let text = |name: &str| chat[name].as_str().unwrap().to_owned();
        let key = (text("tokenizer"), text("template"));
        let (tokenizer, template) = loaded.entry(key.clone()).or_insert_with(|| {
            let (directory, source) = find(&key.0, &key.1);
            let config = std::fs::read(directory.join("tokenizer_config.json")).unwrap();
            (
                load(&directory),
                ChatTemplate::from_files(Some(&source), Some(&config)).unwrap().unwrap(),
            )
        });
        let case =
            cases.as_array().unwrap().iter().find(|case| case["name"] == chat["case"]).unwrap();
        let (messages, options) = templates::case(case);
        let (found, _) = template.encode_chat(tokenizer, &messages, &options).unwrap();
        let expected = ids(&chat["ids"]);
        let at =
            found.iter().zip(&expected).take_while(|(found, expected)| found == expected).count();
        assert_eq!(found[at..], expected[at..], "{key:?}, {} from id {at}", chat["case"]);
        equal += 1;
    }
    equal
}
