//! What a template gets: JSON from the request, as template values.

use minijinja::Value as Rendered;
use serde_json::{Map, Value};

use super::{ChatMessage, RenderOptions};

/// Fields that give a message's reasoning; the first is the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// What a string of the request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Something that somebody says: a template may put it right beside its own text.
    Text,
    /// A name, a key, a schema: templates compare it, and quote it where they print it.
    Data,
}

/// Replaces a string of the request.
pub(super) type Replace<'a> = &'a mut dyn FnMut(&str, Part) -> String;

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
    pub(super) fn map_strings(&self, replace: Replace<'_>) -> Self {
        let tools = |tools: &Vec<Value>| {
            tools.iter().map(|tool| map_value(tool, Part::Data, replace)).collect()
        };
        let tools = self.tools.as_ref().map(tools);
        let messages = self.messages.iter().map(|message| map_message(message, replace)).collect();
        let variable = |(name, value): (&String, &Value)| {
            (name.clone(), map_value(value, Part::Data, replace))
        };
        Self { messages, tools, variables: self.variables.iter().map(variable).collect(), ..*self }
    }

    /// Whether any string satisfies `test`.
    pub(super) fn any_string(&self, test: &mut dyn FnMut(&str, Part) -> bool) -> bool {
        let mut found = false;
        drop(self.map_strings(&mut |text, part| {
            found = found || test(text, part);
            String::new()
        }));
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

/// The names of a message's own fields are the API's and not the client's.
fn map_message(message: &Value, replace: Replace<'_>) -> Value {
    let Value::Object(fields) = message else { return map_value(message, Part::Data, replace) };
    let field = |(name, value): (&String, &Value)| {
        let says = name == "content" || REASONING.contains(&name.as_str());
        (name.clone(), map_value(value, if says { Part::Text } else { Part::Data }, replace))
    };
    Value::Object(fields.iter().map(field).collect())
}

fn map_value(value: &Value, part: Part, replace: Replace<'_>) -> Value {
    match value {
        Value::String(text) => Value::String(replace(text, part)),
        Value::Array(items) => {
            Value::Array(items.iter().map(|item| map_value(item, part, replace)).collect())
        }
        Value::Object(fields) => {
            let field = |(key, value): (&String, &Value)| {
                // Of a content part, only the text is what somebody says; its type is data.
                let inner = if key == "text" { part } else { Part::Data };
                (replace(key, Part::Data), map_value(value, inner, replace))
            };
            Value::Object(fields.iter().map(field).collect())
        }
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
