//! Small pieces of Python's behaviour that templates rely on.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Containers nested deeper than this are not shown.
const REPR_DEPTH: usize = 64;

/// Sorts a call's arguments, by place or by name, into a function's parameters. `None` and absent are the same.
pub(super) fn arguments<const N: usize>(
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (places, named): (&[Value], Kwargs) = from_args(args)?;
    if places.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut found = [const { None }; N];
    for (index, name) in names.into_iter().enumerate() {
        let value = match places.get(index) {
            Some(value) => Some(value.clone()),
            None => named.get::<Option<Value>>(name)?,
        };
        found[index] = value.filter(|value| !value.is_none() && !value.is_undefined());
    }
    named.assert_all_used()?;
    Ok(found)
}

/// Whether `str.isspace` holds: Unicode white space and the four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Whether `str.splitlines` breaks here.
fn is_line_break(c: char) -> bool {
    matches!(
        c,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// `str.splitlines`.
pub(super) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_line_break).unwrap_or(rest.len());
        let width = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(&rest[..if keep_ends { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    lines
}

/// `str.split` and `str.rsplit`; no separator means runs of white space.
pub(super) fn split<'a>(
    text: &'a str,
    separator: Option<&str>,
    limit: Option<usize>,
    from_right: bool,
) -> Vec<&'a str> {
    let limit = limit.unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    match (separator, from_right) {
        (Some(separator), false) => {
            return text.splitn(limit.saturating_add(1), separator).collect();
        }
        (Some(separator), true) => parts.extend(text.rsplitn(limit.saturating_add(1), separator)),
        (None, false) => {
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                if parts.len() == limit {
                    parts.push(rest);
                    break;
                }
                let end = rest.find(is_space).unwrap_or(rest.len());
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start_matches(is_space);
            }
            return parts;
        }
        (None, true) => {
            let mut rest = text.trim_end_matches(is_space);
            while !rest.is_empty() {
                if parts.len() == limit {
                    parts.push(rest);
                    break;
                }
                let start = rest
                    .rfind(is_space)
                    .map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end_matches(is_space);
            }
        }
    }
    parts.reverse();
    parts
}

/// The items of a sequence or the keys of a map, each paid for: a lazy sequence may be as long as it likes.
pub(super) fn items(state: &State<'_, '_>, value: &Value) -> Result<Vec<Value>, Error> {
    let mut items = Vec::new();
    for item in value.try_iter()? {
        state.consume_fuel(1)?;
        items.push(item);
    }
    Ok(items)
}

/// `str` of a value: `repr` but for strings, which stand for themselves.
pub(super) fn text(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => repr(state, value, 0),
        ValueKind::Iterable => Ok(format!("[{}]", reprs(state, value, 0)?.join(", "))),
        _ => Ok(value.to_string()),
    }
}

fn reprs(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<Vec<String>, Error> {
    items(state, value)?.iter().map(|item| repr(state, item, depth + 1)).collect()
}

/// `repr` of a value; beyond a depth that no prompt needs it fails.
fn repr(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<String, Error> {
    if depth > REPR_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply"));
    }
    let text = match value.kind() {
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) if number.is_nan() => "nan".to_owned(),
            Ok(number) if number.is_infinite() => {
                if number > 0.0 { "inf" } else { "-inf" }.to_owned()
            }
            Ok(number) => float_repr(number),
            Err(_) => value.to_string(),
        },
        ValueKind::Seq | ValueKind::Iterable => {
            match (value.is_tuple(), reprs(state, value, depth)?.as_slice()) {
                (true, [single]) => format!("({single},)"),
                (true, parts) => format!("({})", parts.join(", ")),
                (false, parts) => format!("[{}]", parts.join(", ")),
            }
        }
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in items(state, value)? {
                let entry = value.get_item(&key)?;
                pairs.push(format!(
                    "{}: {}",
                    repr(state, &key, depth + 1)?,
                    repr(state, &entry, depth + 1)?
                ));
            }
            format!("{{{}}}", pairs.join(", "))
        }
        _ => format!("{value:?}"),
    };
    state.consume_fuel(u64::try_from(text.len() / 64).unwrap_or(u64::MAX))?;
    Ok(text)
}

/// `repr` of a finite float: the shortest digits, an exponent from 1e16 upwards and below 1e-4.
pub(super) fn float_repr(number: f64) -> String {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = number.to_string();
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}
