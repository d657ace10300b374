//! The renderer, set up as transformers sets up its Jinja environment.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};

use super::{json, methods, python, strftime};

/// Variable that carries the time to `strftime_now`. Not a name that a template can spell.
pub(super) const CLOCK: &str = "unix seconds";

/// A template's own refusal.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

pub(super) fn build() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters do not clash"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(print);
    environment.set_debug(false);
    environment.set_unknown_method_callback(methods::call);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("string", string);
    environment.add_filter("join", join);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// Prints a value as Python's `str` does.
fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            let text = python::text(state, value)?;
            out.write_str(&text)
                .map_err(|_| Error::new(ErrorKind::WriteFailure, "the output is closed"))
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

fn string(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        Ok(value.clone())
    } else {
        python::text(state, value).map(Value::from)
    }
}

/// `join(value, d="", attribute=None)`.
fn join(state: &State<'_, '_>, value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let [separator, attribute] = python::arguments(&args.into_values(), ["d", "attribute"])?;
    let separator =
        separator.map_or(Ok(String::new()), |separator| python::text(state, &separator))?;
    let mut joined = String::new();
    for (index, item) in value.try_iter()?.enumerate() {
        state.consume_fuel(1)?;
        let text = match &attribute {
            Some(attribute) => python::text(state, &item.get_item(attribute)?)?,
            None => python::text(state, &item)?,
        };
        state
            .consume_fuel(u64::try_from((text.len() + separator.len()) / 64).unwrap_or(u64::MAX))?;
        if index > 0 {
            joined.push_str(&separator);
        }
        joined.push_str(&text);
    }
    Ok(joined)
}

fn trim(state: &State<'_, '_>, value: &Value, chars: Option<&str>) -> Result<String, Error> {
    let text = python::text(state, value)?;
    Ok(methods::strip(&text, chars, true, true).to_owned())
}

/// What Python can iterate over. The renderer takes `none` for an empty list; a template that asks expects no.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// What has a length and can be indexed.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined
    )
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(state: &State<'_, '_>, pattern: &str) -> Result<String, Error> {
    let clock = state.lookup(CLOCK).and_then(|clock| clock.as_i64());
    let clock = clock
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the request carries no time"))?;
    Ok(strftime::format(clock, pattern))
}
