//! The renderer, set up as transformers sets up its Jinja environment.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};

use super::python::float_repr;
use super::{json, methods, strftime};

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
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// Prints a value as Python's `str` does; only floats differ from the renderer's own way.
fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.kind() == ValueKind::Number
        && !value.is_integer()
        && let Ok(number) = f64::try_from(value.clone())
    {
        let text = match number {
            number if number.is_nan() => "nan".to_owned(),
            number if number.is_infinite() => if number > 0.0 { "inf" } else { "-inf" }.to_owned(),
            number => float_repr(number),
        };
        return out
            .write_str(&text)
            .map_err(|_| Error::new(ErrorKind::WriteFailure, "the output is closed"));
    }
    minijinja::escape_formatter(out, state, value)
}

fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = value.to_string();
    methods::strip(&text, chars, true, true).to_owned()
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
