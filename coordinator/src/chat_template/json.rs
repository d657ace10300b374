//! The `tojson` filter with the signature that transformers gives it: Python's `json.dumps`, without the HTML escapes
//! of Jinja's own filter.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, State, Value};

use super::python::{arguments, float_repr, items};

/// Nesting beyond this is refused; Python gives up at about a thousand.
const DEPTH_LIMIT: usize = 256;

/// How the text is laid out.
struct Layout {
    ensure_ascii: bool,
    /// One level of indentation; `None` keeps all on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ensure_ascii, indent, separators, sort_keys] = arguments(&args.into_values(), names)?;

    let indent = indent.map(|indent| indent_of(&indent)).transpose()?;
    let mut layout = Layout {
        ensure_ascii: ensure_ascii.is_some_and(|flag| flag.is_true()),
        item_separator: if indent.is_some() { "," } else { ", " }.to_owned(),
        key_separator: ": ".to_owned(),
        indent,
        sort_keys: sort_keys.is_some_and(|flag| flag.is_true()),
    };
    if let Some(separators) = separators {
        let pair: Vec<String> = items(state, &separators)?.iter().map(Value::to_string).collect();
        let [item, key] = <[String; 2]>::try_from(pair).map_err(|_| {
            Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair of strings")
        })?;
        layout.item_separator = item;
        layout.key_separator = key;
    }
    let mut out = String::new();
    layout.write(state, value, 0, &mut out)?;
    Ok(Value::from(out))
}

fn indent_of(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.to_owned());
    }
    let width = match (indent.as_i64(), indent.kind()) {
        (Some(width), _) => usize::try_from(width.clamp(0, 64)).unwrap_or(0),
        (None, ValueKind::Bool) => usize::from(indent.is_true()),
        _ => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: indent must be a number or a string",
            ));
        }
    };
    Ok(" ".repeat(width))
}

impl Layout {
    fn write(
        &self,
        state: &State<'_, '_>,
        value: &Value,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        if depth > DEPTH_LIMIT {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: value is nested too deeply",
            ));
        }
        state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.string(state, value.as_str().unwrap_or_default(), out)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items = items(state, value)?;
                self.sequence(depth, ('[', ']'), items.len(), out, |index, out| {
                    self.write(state, &items[index], depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in items(state, value)? {
                    let entry = value.get_item(&key)?;
                    pairs.push((key_text(&key)?, entry));
                }
                if self.sort_keys {
                    pairs.sort_by(|left, right| left.0.cmp(&right.0));
                }
                self.sequence(depth, ('{', '}'), pairs.len(), out, |index, out| {
                    let (key, entry) = &pairs[index];
                    self.string(state, key, out)?;
                    out.push_str(&self.key_separator);
                    self.write(state, entry, depth + 1, out)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: cannot write a value of type {kind}"),
                ));
            }
        }
        Ok(())
    }

    fn sequence(
        &self,
        depth: usize,
        (open, close): (char, char),
        count: usize,
        out: &mut String,
        mut item: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        out.push(open);
        for index in 0..count {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            line(depth + 1, out);
            item(index, out)?;
        }
        if count > 0 {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, state: &State<'_, '_>, text: &str, out: &mut String) -> Result<(), Error> {
        state.consume_fuel(u64::try_from(text.len() / 64).unwrap_or(u64::MAX))?;
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
        Ok(())
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => match number {
            number if number.is_nan() => "NaN".to_owned(),
            number if number.is_infinite() => {
                if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
            }
            number => float_repr(number),
        },
        _ => value.to_string(),
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson: keys cannot be of type {kind}"),
        )),
    }
}
