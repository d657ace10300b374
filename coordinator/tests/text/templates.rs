//! Rendered prompts equal those of transformers, for the templates of the supported families and for every test of the
//! language that templates are written in.

use std::path::Path;

use serde_json::{Map, Value};
use shimmer_coordinator::chat_template::{ChatMessage, ChatTemplate, RenderOptions};
use shimmer_coordinator::tokenizer::TextError;

use crate::{json, path};

/// The second at which `make_goldens.py` stops its clock: 7 March 2025, 09:05:03.
pub(crate) const NOW: i64 = 1_741_338_303;

/// Messages and options of one case of `cases.json`.
pub(crate) fn case(case: &Value) -> (Vec<ChatMessage>, RenderOptions) {
    let messages = case["messages"].as_array().unwrap().iter().map(|message| {
        let mut extra = message.as_object().unwrap().clone();
        let role = extra.remove("role").unwrap();
        ChatMessage { role: role.as_str().unwrap().to_owned(), content: String::new(), extra }
    });
    let options = RenderOptions {
        add_generation_prompt: case
            .get("add_generation_prompt")
            .is_none_or(|flag| flag.as_bool().unwrap()),
        tools: case.get("tools").map(|tools| tools.as_array().unwrap().clone()),
        variables: case
            .get("variables")
            .map_or_else(Map::new, |variables| variables.as_object().unwrap().clone()),
        unix_seconds: Some(NOW),
    };
    (messages.collect(), options)
}

fn special_tokens() -> Vec<(String, String)> {
    [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>")]
        .map(|(name, token)| (name.to_owned(), token.to_owned()))
        .to_vec()
}

/// Renders one case and says what differs from the expected outcome.
fn difference(
    template: &Result<ChatTemplate, TextError>,
    input: &Value,
    expected: &Value,
) -> Option<String> {
    let (messages, options) = case(input);
    let rendered = match template {
        Ok(template) => template.render(&messages, &options).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match (rendered, expected["text"].as_str()) {
        (Ok(text), Some(expected)) if text == expected => None,
        (Ok(text), Some(expected)) => Some(first_difference(&text, expected)),
        (Ok(text), None) => {
            Some(format!("rendered {text:?}\nexpected an error: {}", expected["message"]))
        }
        (Err(error), Some(expected)) => Some(format!("failed {error}\nexpected {expected:?}")),
        (Err(error), None) => {
            let message = expected["message"].as_str().unwrap();
            let raised = expected["error"] == "TemplateError";
            (raised && !error.contains(message))
                .then(|| format!("failed {error}\nexpected the message {message:?}"))
        }
    }
}

/// Both texts around the first place where they differ.
fn first_difference(text: &str, expected: &str) -> String {
    let (left, right): (Vec<char>, Vec<char>) =
        (text.chars().collect(), expected.chars().collect());
    let at = left.iter().zip(&right).take_while(|(left, right)| left == right).count();
    let window = |side: &[char]| -> String {
        let from = at.saturating_sub(40).min(side.len());
        side[from..(at + 60).min(side.len())].iter().collect()
    };
    format!("at character {at}\nrendered …{:?}…\nexpected …{:?}…", window(&left), window(&right))
}

/// Compares all cases on all templates of a directory; returns how many agree and what differs.
fn compare(directory: &Path, cases: &Value, goldens: &Value) -> (usize, Vec<String>) {
    let (mut equal, mut differences) = (0, Vec::new());
    for (name, expected) in goldens.as_object().unwrap() {
        let source = std::fs::read_to_string(directory.join(name)).unwrap();
        let template = ChatTemplate::new(&source, special_tokens());
        for (input, expected) in cases.as_array().unwrap().iter().zip(expected.as_array().unwrap())
        {
            match difference(&template, input, expected) {
                None => equal += 1,
                Some(difference) => {
                    differences.push(format!("{name}, {}:\n{difference}", input["name"]))
                }
            }
        }
    }
    (equal, differences)
}

#[test]
fn rendered_prompts_equal_those_of_transformers() {
    let (equal, differences) =
        compare(&path("templates"), &json("cases.json"), &json("goldens/templates.json"));
    assert!(
        differences.is_empty(),
        "{} of {}:\n{}",
        differences.len(),
        equal + differences.len(),
        differences.join("\n\n")
    );
    assert!(equal >= 200, "only {equal} renders were compared");
}
