//! JSON to template values.

use minijinja::Value as Rendered;
use serde_json::Value;

use super::{ChatMessage, RenderOptions};

/// Converts JSON, keeping the order of keys.
pub(super) fn convert(value: &Value) -> Rendered {
    match value {
        Value::Null => Rendered::from(()),
        Value::Bool(flag) => Rendered::from(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), _, _) => Rendered::from(number),
            (_, Some(number), _) => Rendered::from(number),
            (_, _, Some(number)) => Rendered::from(number),
            _ => Rendered::from(()),
        },
        Value::String(text) => Rendered::from(text.as_str()),
        Value::Array(items) => Rendered::from(items.iter().map(convert).collect::<Vec<_>>()),
        Value::Object(fields) => {
            Rendered::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), convert(value))))
        }
    }
}

/// The variables that transformers passes to a template.
pub(super) fn context(messages: &[ChatMessage], options: &RenderOptions) -> Rendered {
    let messages = messages.iter().map(|message| {
        let fixed = [
            ("role", Rendered::from(&message.role)),
            ("content", Rendered::from(&message.content)),
        ];
        let extra = message.extra.iter().map(|(key, value)| (key.as_str(), convert(value)));
        Rendered::from_pairs(fixed.into_iter().chain(extra))
    });
    let tools = options.tools.as_ref().map(|tools| tools.iter().map(convert).collect::<Vec<_>>());
    let fixed = [
        ("messages", Rendered::from(messages.collect::<Vec<_>>())),
        ("tools", Rendered::from(tools)),
        ("documents", Rendered::from(())),
        ("add_generation_prompt", Rendered::from(options.add_generation_prompt)),
    ];
    let variables = options.variables.iter().map(|(name, value)| (name.as_str(), convert(value)));
    Rendered::from_pairs(fixed.into_iter().chain(variables))
}
