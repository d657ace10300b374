//! What a template gets: JSON from the request, as template values.

use minijinja::Value as Rendered;
use serde_json::{Map, Value};

use super::{ChatMessage, RenderOptions};

/// Fields that give a message's reasoning; the first is the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Everything that comes from the request.
#[derive(Debug, Clone)]
pub(super) struct Inputs {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    variables: Map<String, Value>,
    add_generation_prompt: bool,
    unix_seconds: Option<i64>,
}

impl Inputs {
    pub(super) fn new(messages: &[ChatMessage], options: &RenderOptions) -> Self {
        Self {
            messages: messages.iter().map(fields).collect(),
            tools: options.tools.clone(),
            variables: options.variables.clone(),
            add_generation_prompt: options.add_generation_prompt,
            unix_seconds: options.unix_seconds,
        }
    }

    pub(super) fn has_tools(&self) -> bool {
        self.tools.is_some()
    }

    /// The same inputs with every string replaced, keys of objects included.
    pub(super) fn map_strings(&self, replace: &mut dyn FnMut(&str) -> String) -> Self {
        let all = |values: &[Value], replace: &mut dyn FnMut(&str) -> String| {
            values.iter().map(|value| map_value(value, replace)).collect::<Vec<_>>()
        };
        let variables = self
            .variables
            .iter()
            .map(|(name, value)| (name.clone(), map_value(value, replace)))
            .collect();
        Self {
            messages: self.messages.iter().map(|message| map_message(message, replace)).collect(),
            tools: self.tools.as_ref().map(|tools| all(tools, replace)),
            variables,
            ..*self
        }
    }

    /// Whether any string satisfies `test`.
    pub(super) fn any_string(&self, test: &mut dyn FnMut(&str) -> bool) -> bool {
        let mut found = false;
        let mut look = |text: &str| {
            found = found || test(text);
            String::new()
        };
        drop(self.map_strings(&mut look));
        found
    }

    /// The variables that transformers passes to a template.
    pub(super) fn context(&self) -> Rendered {
        let list =
            |values: &Vec<Value>| Rendered::from(values.iter().map(convert).collect::<Vec<_>>());
        let mut context = vec![
            ("messages", list(&self.messages)),
            ("tools", self.tools.as_ref().map_or_else(|| Rendered::from(()), list)),
            ("documents", Rendered::from(())),
            ("add_generation_prompt", Rendered::from(self.add_generation_prompt)),
            (
                super::environment::CLOCK,
                self.unix_seconds.map_or_else(|| Rendered::from(()), Rendered::from),
            ),
        ];
        context.extend(self.variables.iter().map(|(name, value)| (name.as_str(), convert(value))));
        Rendered::from_pairs(context)
    }
}

/// A message as an object, without the fields that are null, and with its reasoning under the usual names.
fn fields(message: &ChatMessage) -> Value {
    let mut object = Map::new();
    object.insert("role".to_owned(), Value::String(message.role.clone()));
    object.insert("content".to_owned(), Value::String(message.content.clone()));
    for (name, value) in &message.extra {
        object.insert(name.clone(), value.clone());
    }
    object.retain(|_, value| !value.is_null());
    if let Some(reasoning) = REASONING.iter().find_map(|name| object.get(*name).cloned()) {
        object.entry("thinking").or_insert_with(|| reasoning.clone());
        object.insert(REASONING[0].to_owned(), reasoning);
    }
    Value::Object(object)
}

/// The names of a message's own fields are the API's and not the client's text.
fn map_message(message: &Value, replace: &mut dyn FnMut(&str) -> String) -> Value {
    match message {
        Value::Object(fields) => Value::Object(
            fields.iter().map(|(name, value)| (name.clone(), map_value(value, replace))).collect(),
        ),
        other => map_value(other, replace),
    }
}

fn map_value(value: &Value, replace: &mut dyn FnMut(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(replace(text)),
        Value::Array(items) => {
            Value::Array(items.iter().map(|item| map_value(item, replace)).collect())
        }
        Value::Object(fields) => Value::Object(
            fields.iter().map(|(key, value)| (replace(key), map_value(value, replace))).collect(),
        ),
        other => other.clone(),
    }
}

/// Converts JSON, keeping the order of keys.
fn convert(value: &Value) -> Rendered {
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
